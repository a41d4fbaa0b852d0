"""KernelImage: the built-in kernel's ELF file as segments to map and tables for the probe engine."""

from __future__ import annotations

import json
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from errno import ENOENT, ENOEXEC
from functools import cached_property
from pathlib import Path
from typing import Self

from emulated_kernel.image import text_tables
from emulated_kernel.image.alternatives import CPU_FEATURES, alternatives, replaced
from emulated_kernel.image.elf import ElfFile
from emulated_kernel.image.kallsyms import Kallsyms, Symbol, elf_symbols
from emulated_kernel.image.text_tables import (
    BlacklistEntry,
    BugEntry,
    ExTableEntry,
    JumpLabel,
    Range,
    StaticCall,
)
from emulated_kernel.util.abi import Prot
from emulated_kernel.util.config import ARCHITECTURES, IMAGE_LIMIT
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, replace
from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.util.safe_read import read_regular

PREBUILT = Path(__file__).parent / "prebuilt"


class Segment(NamedTuple):
    """Guest memory to map: address, initial bytes, size in memory, access rights.

    The bytes after the initial ones are zero.
    """

    va: int
    data: bytes
    mem_size: int
    prot: Prot


class AbiTable(dict[str, int]):
    """Numbers that the built-in kernel tells kprobefs: name -> value.

    Most are offsets and sizes of structures; others are addresses and numbers of system calls. A missing name
    raises KernelError ENOEXEC.
    """

    def __missing__(self, name: str) -> int:
        raise KernelError(ENOEXEC, f"kernel image: its ABI table has no {name}")


@dataclass(frozen=True)
class KernelImage:
    """A parsed kernel image; addresses are virtual."""

    path: Path
    arch: str
    entry: int
    segments: tuple[Segment, ...]
    kallsyms: Kallsyms
    text_ranges: tuple[Range, ...]
    """Core kernel text, as defined by core_kernel_text()."""
    ex_table: tuple[ExTableEntry, ...]
    """The exception table, sorted by the address of the instruction."""
    blacklist: tuple[BlacklistEntry, ...]
    """Functions that must not be probed, in the order of debugfs kprobes/blacklist."""
    mcount: frozenset[int]
    """Addresses of the fentry sites."""
    bugs: Mapping[int, BugEntry]
    """Address of a trap instruction -> its entry in the bug table."""
    jump_labels: tuple[JumpLabel, ...]
    """Branches of static keys, sorted by address."""
    static_calls: tuple[StaticCall, ...]
    """Call sites of static calls, sorted by address."""
    abi: dict[str, int]
    """Numbers that the image tells kprobefs (AbiTable); empty if the image wasn't built from src/."""
    version: str
    """The kernel's banner (linux_banner), including its newline."""
    bits: int = 64
    """Word size of the machine: 32 or 64."""

    @property
    def data(self) -> Iterator[tuple[int, bytes]]:
        """Address and contents of each data segment."""
        return ((segment.va, segment.data) for segment in self.segments if not segment.prot & Prot.EXEC)

    def with_symbols(self, kallsyms: Kallsyms, /) -> Self:
        """Return a copy of this image with another symbol table."""
        return replace(self, kallsyms=kallsyms)

    def read(self, va: int, size: int, /) -> bytes:
        """Return `size` bytes of the image at address `va`, as they are before boot.

        Raises: KernelError ENOEXEC (no segment contains the bytes).
        """
        return self._bytes.read(va, size)

    def string(self, va: int, limit: int = 512) -> str:
        """Return the string at the address `va` without its zero byte, cut after `limit` bytes.

        Return "" if the address is after the contents of a segment.

        Raises: KernelError ENOEXEC (the address is below all segments).
        """
        return self._bytes.string(va, limit)

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the segments' addresses and contents as loaded, even if the file has changed since."""
        checksum = 0
        for segment in self.segments:
            checksum = zlib.crc32(segment.data, zlib.crc32(segment.va.to_bytes(8, "little"), checksum))
        return checksum

    @cached_property
    def _bytes(self) -> _Bytes:
        return _Bytes(self.segments)


def load_image(path: Path | str | None = None, arch: str = "x86_64") -> KernelImage:
    """Load a kernel image from a file; None selects the architecture's prebuilt image.

    Raises: KernelError ENOENT (no image for the architecture), ENOEXEC (an unusable file), OSError (the file
    can't be read).
    """
    if arch not in ARCHITECTURES:
        raise KernelError(ENOENT, f"unknown architecture {arch}")
    file = PREBUILT / arch / "vmlinux" if path is None else Path(path)
    if path is None and not file.exists():
        raise KernelError(ENOENT, f"no prebuilt image for {arch}")
    elf = ElfFile(read_regular(file, IMAGE_LIMIT))
    if elf.machine != ARCHITECTURES[arch]:
        raise KernelError(ENOEXEC, f"{file.name} is for ELF machine {elf.machine}, not for {arch}")
    return _Loader(elf).load(file, arch)


def prebuilt_dependencies(arch: str) -> dict[str, list[str]]:
    """Return name of a prebuilt module -> names of the modules on which the module depends."""
    manifest = json.loads((PREBUILT / "manifest.json").read_text())
    modules = manifest.get(arch, {}).get("modules", {})
    return {name: module["depends"] for name, module in modules.items()}


class _Bytes:
    """The initial memory of an image, by virtual address."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self._segments = sorted(segments)
        self._starts = [segment.va for segment in self._segments]

    def read(self, va: int, size: int) -> bytes:
        index = bisect_right(self._starts, va) - 1
        if index >= 0:
            segment = self._segments[index]
            offset = va - segment.va
            if offset + size <= segment.mem_size:
                return segment.data[offset : offset + size].ljust(size, b"\0")
        raise KernelError(ENOEXEC, f"{size} bytes at {va:#x} aren't in the image")

    def string(self, va: int, limit: int = 512) -> str:
        index = bisect_right(self._starts, va) - 1
        if index < 0:
            raise KernelError(ENOEXEC, f"no string at {va:#x}")
        segment = self._segments[index]
        text = segment.data[va - segment.va : va - segment.va + limit]
        return text.split(b"\0", 1)[0].decode("ascii", "replace")


class _Loader:
    def __init__(self, elf: ElfFile) -> None:
        self._elf = elf
        self._segments = _segments(elf)
        self._bytes = _Bytes(self._segments)
        symbols = list(elf_symbols(elf))
        if not symbols:
            raise KernelError(ENOEXEC, "the image has no symbol table")
        self._kallsyms = Kallsyms(symbols, *_borders(symbols), word_size=elf.bits // 8)

    def load(self, path: Path, arch: str) -> KernelImage:
        abi = self._abi()
        if abi:
            self._apply_alternatives()
        table = self._table
        word = self._elf.bits // 8
        return KernelImage(
            path=path,
            arch=arch,
            entry=self._elf.entry,
            segments=self._segments,
            kallsyms=self._kallsyms,
            text_ranges=(self._range("_stext", "_etext"),),
            ex_table=tuple(sorted(text_tables.ex_table(*table("__ex_table"), "<ii" if abi else "<iii"))),
            blacklist=tuple(self._blacklist()),
            mcount=frozenset(text_tables.words(table("mcount_loc")[1], word)),
            bugs=text_tables.bugs(*table("__bug_table"), self._bytes.string),
            jump_labels=tuple(
                sorted(text_tables.jump_labels(*table("__jump_table"), "<iiq" if word == 8 else "<iii"))
            ),
            static_calls=tuple(sorted(text_tables.static_calls(*table("static_call_sites")))),
            abi=abi,
            version=self._banner(),
            bits=self._elf.bits,
        )

    def _apply_alternatives(self) -> None:
        """Apply the alternatives for CPU_FEATURES to the segments.

        The loader does this, because the built-in kernel itself can't write to its text at boot.
        """
        table = self._between("__alt_instructions", "__alt_instructions_end")
        changes = {
            entry.site: replaced(entry, self._bytes.read(entry.replacement, entry.replacement_size))
            for entry in alternatives(*table)
            if entry.feature in CPU_FEATURES
        }
        self._segments = tuple(_patched(segment, changes) for segment in self._segments)
        self._bytes = _Bytes(self._segments)

    def _address(self, name: str) -> int:
        address = self._kallsyms.lookup_name(name)
        if address is None:
            raise KernelError(ENOEXEC, f"the image has no symbol {name}")
        return address

    def _range(self, start: str, end: str) -> Range:
        return Range(self._address(start), self._address(end))

    def _between(self, start: str, end: str) -> tuple[int, bytes]:
        """Return address and contents of the table from the symbol `start` to the symbol `end`.

        If a symbol is missing, return (0, b"").
        """
        first = self._kallsyms.lookup_name(start)
        last = self._kallsyms.lookup_name(end)
        if first is None or last is None or last <= first:
            return 0, b""
        return first, self._bytes.read(first, last - first)

    def _table(self, name: str) -> tuple[int, bytes]:
        return self._between(f"__start_{name}", f"__stop_{name}")

    def _blacklist(self) -> Iterator[BlacklistEntry]:
        _, listed = self._table("kprobe_blacklist")
        lookup = self._kallsyms.lookup_name
        areas = []
        for area in text_tables.BLACKLISTED:
            start = lookup(f"__{area}_text_start")
            end = lookup(f"__{area}_text_end")
            if start is not None and end is not None:
                areas.append(Range(start, end))
        return text_tables.blacklist(self._kallsyms, text_tables.words(listed, self._elf.bits // 8), areas)

    def _abi(self) -> dict[str, int]:
        address = self._kallsyms.lookup_name("__guest_abi")
        table = AbiTable()
        while address is not None:
            raw, value = struct.unpack("<40sQ", self._bytes.read(address, 48))
            name = raw.split(b"\0", 1)[0].decode("ascii", "replace")
            if not name:
                break
            table[name] = value
            address += 48
        return table

    def _banner(self) -> str:
        return self._bytes.string(self._address("linux_banner"))


def _patched(segment: Segment, changes: Mapping[int, bytes]) -> Segment:
    data = bytearray(segment.data)
    for address, code in changes.items():
        offset = address - segment.va
        if 0 <= offset < len(data):
            data[offset : offset + len(code)] = code
    return segment._replace(data=bytes(data))


def _segments(elf: ElfFile) -> tuple[Segment, ...]:
    """Return the segments to map, each at its physical address plus the offset of the kernel's mapping.

    The virtual address in the program header isn't used, because the per-CPU segment is linked at address 0.
    """
    if not elf.segments:
        raise KernelError(ENOEXEC, "the image has no segment to load")
    first = elf.segments[0]
    offset = first.vaddr - first.paddr
    return tuple(
        Segment(segment.paddr + offset, elf.segment_data(segment), segment.mem_size, Prot(segment.flags & 7))
        for segment in elf.segments
        if segment.mem_size
    )


def _borders(symbols: list[Symbol]) -> tuple[int, int]:
    found = {symbol.name: symbol.address for symbol in symbols if symbol.name in ("_stext", "_end")}
    if len(found) < 2:
        raise KernelError(ENOEXEC, "the image has no symbols _stext and _end")
    return found["_stext"], found["_end"]
