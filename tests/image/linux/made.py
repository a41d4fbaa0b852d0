"""Small kernels that tests make, in all formats of distributions, so that nothing has to be fetched."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

TEXT = 0xFFFF_FFFF_8100_0000
RODATA = TEXT + 0x20_0000
DATA = TEXT + 0x40_0000
END = DATA + 0x10_0000
RETURN_THUNK_CALL = b"\xe9\0\0\0\0"
NOP5 = bytes.fromhex("0f1f440000")


class Addresses(Enum):
    """How a kallsyms table stores addresses of symbols."""

    PERCPU_ABSOLUTE = auto()
    RELATIVE = auto()
    WHOLE = auto()
    OWN_ENTRY = auto()
    """Offsets from the place of the offset itself, in tables aligned to 4 bytes, as since Linux 7.0."""


@dataclass(frozen=True)
class Format:
    """A layout of kallsyms' tables."""

    addresses: Addresses = Addresses.PERCPU_ABSOLUTE
    addresses_last: bool = False
    """Whether addresses follow the names, as since Linux 6.4."""
    sequence: bool = False
    """Whether there is a table kallsyms_seqs_of_names, as since Linux 6.2."""


FORMATS = (
    *(
        Format(addresses, last, sequence)
        for addresses in (Addresses.PERCPU_ABSOLUTE, Addresses.RELATIVE, Addresses.WHOLE)
        for last, sequence in ((False, False), (False, True), (True, True))
    ),
    Format(Addresses.OWN_ENTRY, addresses_last=True, sequence=True),
)


def kallsyms(
    symbols: Sequence[tuple[int, str, str]], form: Format, base: int = TEXT, in_front: int = 0
) -> bytes:
    """Return kallsyms' tables for `symbols`, which are (address, type, name) in ascending order of addresses.

    The tables are aligned to 8 bytes, or to 4 bytes for OWN_ENTRY. `base`: address from which the offsets
    count. `in_front`: offset of the tables from RODATA, which OWN_ENTRY needs.
    """
    size = 4 if form.addresses is Addresses.OWN_ENTRY else 8
    tokens = _tokens(symbols)
    packed, markers = b"", []
    for number, (_, letter, name) in enumerate(symbols):
        if number % 256 == 0:
            markers.append(len(packed))
        text = _compress(letter + name, tokens)
        length = bytes((len(text),)) if len(text) < 0x80 else bytes((len(text) & 0x7F | 0x80, len(text) >> 7))
        packed += length + text
    table = b"".join(token + b"\0" for token in tokens)
    index, at = [], 0
    for token in tokens:
        index.append(at)
        at += len(token) + 1
    names = _padded(struct.pack("<I", len(symbols)), size) + _padded(packed, size)
    names += _padded(struct.pack(f"<{len(markers)}I", *markers), size)
    looked_up = _padded(table, size) + _padded(struct.pack("<256H", *index), size)
    sequence = _padded(bytes(3 * len(symbols)), size) if form.sequence else b""
    if form.addresses is Addresses.OWN_ENTRY:
        base = RODATA + in_front + len(names) + len(looked_up)
    addresses = _addresses([address for address, _, _ in symbols], form.addresses, base)
    if form.addresses_last:
        return names + looked_up + addresses + sequence
    return addresses + names + sequence + looked_up


def _addresses(addresses: list[int], form: Addresses, base: int) -> bytes:
    if form is Addresses.WHOLE:
        return struct.pack(f"<{len(addresses)}Q", *addresses)
    if form is Addresses.OWN_ENTRY:
        offsets = [address - (base + 4 * number) for number, address in enumerate(addresses)]
        return struct.pack(f"<{len(offsets)}i", *offsets)
    if form is Addresses.RELATIVE:
        offsets = [(address - base) & 0xFFFFFFFF for address in addresses]
        return _padded(struct.pack(f"<{len(offsets)}I", *offsets)) + struct.pack("<Q", base)
    signed = [address if address < 1 << 31 else base - 1 - address for address in addresses]
    return _padded(struct.pack(f"<{len(signed)}i", *signed)) + struct.pack("<Q", base)


def _tokens(symbols: Iterable[tuple[int, str, str]]) -> list[bytes]:
    """Return the 256 tokens of the table.

    Digits, and the characters that occur in names, stand for themselves. Other tokens stand for pieces of
    names.
    """
    used = {ord(char) for _, letter, name in symbols for char in letter + name} | set(b"0123456789")
    pieces = iter((b"vfs_", b"__start", b"sys_", b"Tdo_", b"_text_", b"func_"))
    return [bytes((code,)) if code in used else next(pieces, b"") for code in range(256)]


def _compress(text: str, tokens: list[bytes]) -> bytes:
    rest, found = text.encode(), b""
    used = [code for code in range(256) if tokens[code]]
    while rest:
        best = max(
            (code for code in used if rest.startswith(tokens[code])), key=lambda code: len(tokens[code])
        )
        found += bytes((best,))
        rest = rest[len(tokens[best]) :]
    return found


def _padded(data: bytes, size: int = 8) -> bytes:
    return data + bytes(-len(data) % size)


class Btf:
    """A writer of BTF; types are numbered from 1 in the order in which they are added."""

    def __init__(self) -> None:
        self._types: list[bytes] = []
        self._texts = b"\0"

    def add(
        self, kind: int, name: str = "", size: int = 0, tail: bytes = b"", count: int = 0, flag: bool = False
    ) -> int:
        info = kind << 24 | count | flag << 31
        self._types.append(struct.pack("<III", self.text(name), info, size) + tail)
        return len(self._types)

    def text(self, name: str) -> int:
        if not name:
            return 0
        at = len(self._texts)
        self._texts += name.encode() + b"\0"
        return at

    def structure(self, name: str, size: int, *members: tuple[str, int, int], union: bool = False) -> int:
        """Add a structure or `union`, whose members are (name, type, offset in bytes); return its number."""
        tail = b"".join(struct.pack("<III", self.text(each), kind, 8 * at) for each, kind, at in members)
        return self.add(5 if union else 4, name, size, tail, len(members))

    def fields(self, name: str, size: int, *members: tuple[str, int, int, int]) -> int:
        """Add a structure with bit fields: name, type, offset in bits and width in bits of each member."""
        words = ((self.text(each), kind, width << 24 | at) for each, kind, at, width in members)
        tail = b"".join(struct.pack("<III", *each) for each in words)
        return self.add(4, name, size, tail, len(members), flag=True)

    def array(self, element: int, count: int) -> int:
        """Add an array of `count` elements of the type `element`, and return its number."""
        return self.add(3, "", 0, struct.pack("<III", element, 1, count))

    def prototype(self, returns: int, *parameters: tuple[str, int]) -> int:
        tail = b"".join(struct.pack("<II", self.text(each), kind) for each, kind in parameters)
        return self.add(13, "", returns, tail, len(parameters))

    def enum(self, name: str, **values: int) -> int:
        tail = b"".join(struct.pack("<II", self.text(each), value) for each, value in values.items())
        return self.add(6, name, 4, tail, len(values))

    def data(self) -> bytes:
        types = b"".join(self._types)
        header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(self._texts))
        return header + types + self._texts


class Area:
    """Memory that grows: a new piece gets the next aligned address."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.data = bytearray()

    @property
    def end(self) -> int:
        return self.address + len(self.data)

    def add(self, data: bytes, align: int = 8) -> int:
        self.data += bytes(-len(self.data) % align)
        at = self.end
        self.data += data
        return at

    def string(self, text: str) -> int:
        return self.add(text.encode() + b"\0", 1)


class Kernel:
    """A kernel of a few functions. Tests add tables and symbols, and elf() then links the kernel."""

    def __init__(self, form: Format = Format()) -> None:
        self.form = form
        self.text, self.rodata, self.area = Area(TEXT), Area(RODATA), Area(DATA)
        self.symbols: list[tuple[int, str, str]] = [
            (0, "A", "fixed_percpu_data"),
            (0x40, "A", "current_task"),
        ]
        if form.addresses in (Addresses.RELATIVE, Addresses.OWN_ENTRY):
            self.symbols = []
        self.mark("_stext")
        self.text.add(b"\x90" * 16)
        self.define("linux_banner", b"Linux version 6.1.0-made (nobody@nowhere) #1\n\0")

    def mark(self, name: str, address: int | None = None, letter: str = "T") -> int:
        """Add a symbol at `address`, or else at the end of the text; return its address.

        `letter`: type of the symbol, as in kallsyms.
        """
        at = self.text.end if address is None else address
        self.symbols.append((at, letter, name))
        return at

    def function(self, name: str, code: bytes) -> int:
        """Add a function at an aligned address, and return the address. As linkers do, fill the gap before it
        with int3.
        """
        self.text.data += b"\xcc" * (-len(self.text.data) % 16)
        at = self.mark(name)
        self.text.data += code
        return at

    def define(self, name: str, data: bytes, letter: str = "D") -> int:
        """Add data with a symbol of the type `letter`, and return its address."""
        return self.mark(name, self.area.add(data), letter)

    def table(self, name: str, data: bytes) -> int:
        """Add data between new symbols __start_NAME and __stop_NAME, and return the data's address."""
        at = self.mark(f"__start_{name}", self.area.add(data), "D")
        self.mark(f"__stop_{name}", self.area.end, "D")
        return at

    def next_data(self) -> int:
        """Return the address that the next table will have. Tables with self-relative entries need it in
        advance.
        """
        return self.area.end + -len(self.area.data) % 8

    def elf(self, *, sections: bool = True, ends: bool = True) -> bytes:
        """Return a stripped vmlinux. `sections`: with section headers.

        `ends`: with the symbols _etext and _end.
        """
        if ends:
            self.mark("_etext")
            self.mark("_end", END, "B")
        # At one address, a kernel's build puts the symbols of the linker script last.
        ordered = sorted(self.symbols, key=lambda symbol: (symbol[0], symbol[2].startswith("__")))
        self.rodata.data = bytearray(kallsyms(ordered, self.form))
        return elf(
            [(area.address, bytes(area.data)) for area in (self.text, self.rodata, self.area)],
            sections=sections,
        )


def elf(
    segments: list[tuple[int, bytes]],
    *,
    machine: int = 62,
    kind: int = 2,
    sections: bool = True,
    bss: int = 0x1000,
) -> bytes:
    """Return an ELF file with `segments`, which are (address, contents).

    The last segment has `bss` zero bytes more in memory. `machine`, `kind`: e_machine and e_type. `sections`:
    with section headers.
    """
    offset, headers, body = 64 + 56 * len(segments), b"", b""
    names = b"\0.text\0.rodata\0.data\0.shstrtab\0"
    rows = [struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)]
    for index, (address, data) in enumerate(segments):
        memory = len(data) + (bss if index == len(segments) - 1 else 0)
        physical = address & 0x3FFFFFFF
        headers += struct.pack(
            "<IIQQQQQQ", 1, 5 if index == 0 else 6, offset, address, physical, len(data), memory, 16
        )
        name = names.index((b".text\0", b".rodata\0", b".data\0")[min(index, 2)])
        flags = 6 if index == 0 else 2
        rows.append(struct.pack("<IIQQQQIIQQ", name, 1, flags, address, offset, len(data), 0, 0, 16, 0))
        body += data
        offset += len(data)
    rows.append(
        struct.pack("<IIQQQQIIQQ", names.index(b".shstrtab"), 3, 0, 0, offset, len(names), 0, 0, 1, 0)
    )
    table = offset + len(names) if sections else 0
    count = len(rows) if sections else 0
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    entry = segments[0][0] if segments else 0
    header = struct.pack(
        "<HHIQQQIHHHHHH",
        kind,
        machine,
        1,
        entry,
        64,
        table,
        0,
        64,
        56,
        len(segments),
        64,
        count,
        count - 1 if count else 0,
    )
    return ident + header + headers + body + (names + b"".join(rows) if sections else b"")


def vmlinuz(vmlinux: bytes, packed_by: str = "gzip", *, protocol: int = 0x20F) -> bytes:
    """Return a bzImage that contains a vmlinux.

    `packed_by`: name of the compression, as for packed(). `protocol`: version of the boot protocol.
    """
    payload = packed(vmlinux, packed_by)
    if packed_by != "gzip":
        payload += struct.pack("<I", len(vmlinux))
    return around(payload, protocol=protocol)


def around(payload: bytes, *, protocol: int = 0x20F) -> bytes:
    """Return a bzImage whose payload is `payload`. `protocol`: version of the boot protocol."""
    setup = bytearray(5 * 512)
    setup[:2], setup[0x1F1], setup[0x1FE:0x200] = b"MZ", 4, b"\x55\xaa"
    setup[0x202:0x208] = b"HdrS" + struct.pack("<H", protocol)
    struct.pack_into("<II", setup, 0x248, 16, len(payload))
    return bytes(setup) + bytes(16) + payload + b"behind it"


def packed(data: bytes, by: str) -> bytes:
    """Compress data in the format that the kernel's build uses, with less effort."""
    if by == "zstd":
        import zstandard

        return zstandard.ZstdCompressor().compress(data)
    if by == "lz4":
        import lz4.block

        blocks = [data[at : at + (8 << 20)] for at in range(0, len(data), 8 << 20)]
        squeezed = [lz4.block.compress(block, store_size=False) for block in blocks]
        return b"\x02\x21\x4c\x18" + b"".join(struct.pack("<I", len(block)) + block for block in squeezed)
    return {
        "gzip": lambda: gzip.compress(data, mtime=0),
        "bzip2": lambda: bz2.compress(data),
        "xz": lambda: lzma.compress(data, lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, preset=0),
        "lzma": lambda: lzma.compress(data, lzma.FORMAT_ALONE, preset=0),
    }[by]()


def xz_blocks(data: bytes, size: int) -> bytes:
    """Return one xz stream with a block for each `size` bytes, as several threads of xz make it."""
    blocks, index = [], b""
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        stream = packed(piece, "xz")
        # A header, a block, an index with its size in four bytes each, and a footer.
        end = len(stream) - 12 - (int.from_bytes(stream[-8:-4], "little") + 1) * 4
        blocks.append(stream[12:end])
        unpadded = next(n for n in range(end - 15, end - 11) if stream[end + 2 :].startswith(_varint(n)))
        index += _varint(unpadded) + _varint(len(piece))
    index = b"\0" + _varint(len(blocks)) + index
    index += bytes(-len(index) % 4)
    index += struct.pack("<I", zlib.crc32(index))
    about = struct.pack("<I", len(index) // 4 - 1) + stream[6:8]
    return stream[:12] + b"".join(blocks) + index + struct.pack("<I", zlib.crc32(about)) + about + b"YZ"


def _varint(value: int) -> bytes:
    """Return a number with seven bits in each byte, the lowest bits first."""
    low = value & 0x7F
    return bytes((low | 0x80,)) + _varint(value >> 7) if value >> 7 else bytes((low,))


PACKERS = ("gzip", "bzip2", "xz", "lzma", "zstd", "lz4")


def tar(files: dict[str, bytes]) -> bytes:
    """Return a tar archive with these files."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def rpm(files: dict[str, bytes], packed_by: str = "zstd") -> bytes:
    """Return an RPM package with these files: a lead, a signature, a header and a cpio archive."""
    archive = b""
    for name, data in (*files.items(), ("TRAILER!!!", b"")):
        mode = 0o100644 if data else 0
        numbers = (1, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        archive += b"070701" + b"".join(b"%08x" % number for number in numbers) + name.encode() + b"\0"
        archive += bytes(-len(archive) % 4) + data
        archive += bytes(-len(archive) % 4)
    signature = struct.pack(">4s4xII", b"\x8e\xad\xe8\x01", 1, 5) + bytes(16 + 5)
    header = struct.pack(">4s4xII", b"\x8e\xad\xe8\x01", 2, 9) + bytes(32 + 9)
    lead = b"\xed\xab\xee\xdb\x03\0".ljust(96, b"\0")
    return lead + signature + bytes(-len(signature) % 8) + header + packed(archive, packed_by)


def deb(files: dict[str, bytes], packed_by: str | None = "xz", block: int = 0, depends: str = "") -> bytes:
    """Return a Debian package with these files.

    `packed_by`: compression of the files, or None. `block`: number of bytes in each block of their xz stream;
    0 for one block. `depends`: value of the field Depends.
    """
    suffix = {"gzip": ".gz", "bzip2": ".bz2", "xz": ".xz", "lzma": ".lzma", "zstd": ".zst", None: ""}[
        packed_by
    ]
    if block:
        data = xz_blocks(tar(files), block)
    else:
        data = packed(tar(files), packed_by) if packed_by else tar(files)
    control = packed(tar({"./control": f"Package: made\nDepends: {depends}\n".encode()}), "xz")
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": control if depends else b"odd",
        f"data.tar{suffix}": data,
    }
    return b"!<arch>\n" + b"".join(_ar_member(name, content) for name, content in members.items())


def _ar_member(name: str, data: bytes) -> bytes:
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode()
    return header + data + b"\n" * (len(data) % 2)
