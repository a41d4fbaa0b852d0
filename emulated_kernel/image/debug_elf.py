"""ELF files for debuggers: a kernel's memory and symbols, and debug sections that the caller provides."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.elf import (
    NT_GNU_BUILD_ID,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHF_WRITE,
    SHN_ABS,
    SHT_NOBITS,
    SHT_SYMTAB,
    STT_FUNC,
    STT_NOTYPE,
    STT_OBJECT,
)
from emulated_kernel.util.fast_named_tuple import NamedTuple

_SHT_PROGBITS = 1
_SHT_STRTAB = 3
_SHT_NOTE = 7
_ET_EXEC = 2
_PT_LOAD = 1
_IDENT = b"\x7fELF%c\x01\x01" + bytes(9)
_STB_GLOBAL = 1
_PAGE = 4096
NOTES_SECTION = ".notes"
BUILD_ID_SECTION = ".note.gnu.build-id"


class MemorySection(NamedTuple):
    """A section of memory: its name, address and flags (SHF_), its contents and its size in memory."""

    name: str
    address: int
    flags: int
    data: bytes | memoryview
    size: int


class NamedAddress(NamedTuple):
    """A symbol: name, address, size, and the letter that nm prints for its kind."""

    name: str
    address: int
    size: int
    letter: str


class _Section(NamedTuple):
    name: str
    kind: int
    flags: int
    address: int
    data: bytes | memoryview
    size: int
    link: int = 0
    info: int = 0
    align: int = 1
    entry: int = 0


def build_id(image: KernelImage) -> bytes:
    """Return a build id for a built-in kernel's image: a digest of its segments."""
    # The import loads OpenSSL, which takes a thirtieth of the time of a start.
    import hashlib

    digest = hashlib.sha1(usedforsecurity=False)
    for segment in image.segments:
        digest.update(segment.va.to_bytes(8, "little"))
        digest.update(segment.data)
    return digest.digest()


def build_id_note(build_id: bytes) -> bytes:
    """Return the contents of a note section with the GNU build id of a kernel."""
    return struct.pack("<III4s", 4, len(build_id), NT_GNU_BUILD_ID, b"GNU\0") + build_id


def debug_elf(
    machine: int,
    bits: int,
    memory: Iterable[MemorySection],
    symbols: Sequence[NamedAddress],
    debug: Mapping[str, bytes],
    build_id: bytes = b"",
) -> bytes:
    """Return an ELF file with the memory, the symbols and the debug sections of a kernel.

    `machine`: number of the machine in ELF files. `debug`: name -> contents of each debug section.
    `build_id`: the kernel's build id, for which a note section is added; b"" for no such section.
    """
    sections = [_Section("", 0, 0, 0, b"", 0, align=0)]
    starts = []
    for each in (part for section in memory for part in _with_rest(section)):
        kind = _SHT_NOTE if each.name == NOTES_SECTION else _SHT_PROGBITS if len(each.data) else SHT_NOBITS
        flags = each.flags & (SHF_WRITE | SHF_ALLOC | SHF_EXECINSTR)
        starts.append((each.address, each.address + each.size, len(sections)))
        sections.append(_Section(each.name, kind, flags, each.address, each.data, each.size, align=16))
    if build_id:
        note = build_id_note(build_id)
        sections.append(_Section(BUILD_ID_SECTION, _SHT_NOTE, 0, 0, note, len(note), align=4))
    sections += [_Section(name, _SHT_PROGBITS, 0, 0, data, len(data)) for name, data in debug.items()]
    table, names = _symbols(bits, symbols, starts)
    link = len(sections) + 1
    entry = 24 if bits == 64 else 16
    sections.append(_Section(".symtab", SHT_SYMTAB, 0, 0, table, len(table), link, 1, align=8, entry=entry))
    sections.append(_Section(".strtab", _SHT_STRTAB, 0, 0, names, len(names)))
    return _file(machine, bits, sections)


def _with_rest(section: MemorySection) -> Iterator[MemorySection]:
    """Yield `section`, or two sections in its place if its contents are shorter than its memory.

    The first then ends with the contents; the second is called .bss and has none. A section without any
    contents is not divided. gdb warns of a section with contents if the section is longer than the contents
    of its segment.
    """
    size = len(section.data)
    if not 0 < size < section.size:
        yield section
        return
    yield section._replace(size=size)
    yield MemorySection(".bss", section.address + size, section.flags, b"", section.size - size)


def _symbols(
    bits: int, symbols: Sequence[NamedAddress], places: Sequence[tuple[int, int, int]]
) -> tuple[bytes, bytes]:
    """Return the contents of a symbol table and of its string table.

    `places`: (start address, end address, index in the ELF file) of each section of memory.
    """
    layout = struct.Struct("<IBBHQQ" if bits == 64 else "<IIIBBH")
    table = bytearray(layout.size)
    names = bytearray(b"\0")
    ordered = sorted(places)
    at = 0
    for each in sorted(symbols, key=lambda symbol: symbol.address):
        while at < len(ordered) and ordered[at][1] <= each.address:
            at += 1
        inside = at < len(ordered) and ordered[at][0] <= each.address
        index = ordered[at][2] if inside else SHN_ABS
        kind = STT_FUNC if each.letter in "tTwW" else STT_OBJECT if each.letter in "dDbBrR" else STT_NOTYPE
        info = _STB_GLOBAL << 4 | kind
        name = len(names)
        names += each.name.encode() + b"\0"
        if bits == 64:
            table += layout.pack(name, info, 0, index, each.address, each.size)
        else:
            table += layout.pack(name, each.address, each.size, info, 0, index)
    return bytes(table), bytes(names)


def _file(machine: int, bits: int, sections: list[_Section]) -> bytes:
    """Return the contents of the ELF file. Each section of memory has a separate program header."""
    is_64 = bits == 64
    header_size, program_size, section_size = (64, 56, 64) if is_64 else (52, 32, 40)
    names = bytearray()
    sections = [*sections, _Section(".shstrtab", _SHT_STRTAB, 0, 0, b"", 0)]
    name_at = []
    for each in sections:
        name_at.append(len(names))
        names += each.name.encode() + b"\0"
    sections[-1] = sections[-1]._replace(data=bytes(names), size=len(names))
    loaded = [each for each in sections if each.flags & SHF_ALLOC and each.size]
    at = header_size + program_size * len(loaded)
    parts: list[bytes | memoryview] = []
    offsets = []
    for each in sections:
        gap = (each.address - at) % _PAGE if each.flags & SHF_ALLOC else -at % max(each.align, 1)
        parts += [bytes(gap), each.data]
        at += gap
        offsets.append(at)
        at += len(each.data)
    gap = -at % 8
    parts.append(bytes(gap))
    at += gap
    programs = []
    for each, offset in zip(sections, offsets, strict=True):
        if each.flags & SHF_ALLOC and each.size:
            rights = 4 | (each.flags & SHF_WRITE) << 1 | (1 if each.flags & SHF_EXECINSTR else 0)
            where = offset, each.address, each.address, len(each.data), each.size
            if is_64:
                programs.append(struct.pack("<IIQQQQQQ", _PT_LOAD, rights, *where, _PAGE))
            else:
                programs.append(struct.pack("<IIIIIIII", _PT_LOAD, *where, rights, _PAGE))
    headers = [
        struct.pack(
            "<IIQQQQIIQQ" if is_64 else "<IIIIIIIIII",
            name, each.kind, each.flags, each.address, offset, each.size, each.link, each.info, each.align,
            each.entry,
        )
        for each, offset, name in zip(sections, offsets, name_at, strict=True)
    ]  # fmt: skip
    counts = header_size, program_size, len(programs), section_size, len(sections), len(sections) - 1
    fields = _ET_EXEC, machine, 1, 0, header_size, at, 0, *counts
    header = _IDENT % (2 if is_64 else 1)
    header += struct.pack("<HHIQQQIHHHHHH" if is_64 else "<HHIIIIIHHHHHH", *fields)
    return b"".join([header, *programs, *parts, *headers])
