"""Kernel images: the ELF file as what the machine maps and what the probe engine asks about."""

from __future__ import annotations

import json
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from errno import ENOENT, ENOEXEC
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

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
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.safe_read import read_regular

PREBUILT = Path(__file__).parent / "prebuilt"


class Segment(NamedTuple):
    """Memory to map: virtual address, initial bytes, size in memory (the rest is zero), access."""

    va: int
    data: bytes
    mem_size: int
    prot: Prot


class AbiTable(dict[str, int]):
    """The guest's own table of layouts. What it lacks raises KernelError ENOEXEC, not KeyError."""

    def __missing__(self, name: str) -> int:
        raise KernelError(ENOEXEC, f"the kernel image doesn't tell its {name}")


@dataclass(frozen=True)
class KernelImage:
    """A kernel binary, loaded and taken apart; addresses are virtual."""

    path: Path
    arch: str
    entry: int
    segments: tuple[Segment, ...]
    kallsyms: Kallsyms
    text_ranges: tuple[Range, ...]
    """Core text, as core_kernel_text() sees it."""
    ex_table: tuple[ExTableEntry, ...]
    """Sorted by instruction."""
    blacklist: tuple[BlacklistEntry, ...]
    """In the order of debugfs kprobes/blacklist."""
    mcount: frozenset[int]
    """Addresses of the fentry sites."""
    bugs: Mapping[int, BugEntry]
    """By address."""
    jump_labels: tuple[JumpLabel, ...]
    """Sorted by address."""
    static_calls: tuple[StaticCall, ...]
    """Sorted by address."""
    abi: dict[str, int]
    """The guest's own table of layouts; empty for images that aren't ours."""
    version: str
    """The banner, with its line end."""
    bits: int = 64
    """Of a word of the machine."""

    @property
    def data(self) -> Iterator[tuple[int, bytes]]:
        """What isn't code, with its addresses."""
        return ((segment.va, segment.data) for segment in self.segments if not segment.prot & Prot.EXEC)

    def with_symbols(self, kallsyms: Kallsyms, /) -> Self:
        """The same with another table of symbols."""
        return replace(self, kallsyms=kallsyms)

    def read(self, va: int, size: int, /) -> bytes:
        """Bytes as the image holds them before it runs.

        Raises: KernelError ENOEXEC (no segment has them).
        """
        return self._bytes.read(va, size)

    def string(self, va: int, limit: int = 512) -> str:
        """A string of the image, up to its NUL. Raises: KernelError ENOEXEC."""
        return self._bytes.string(va, limit)

    @cached_property
    def checksum(self) -> int:
        """Of what was loaded, whatever the file holds by now; 32 bits."""
        checksum = 0
        for segment in self.segments:
            checksum = zlib.crc32(segment.data, zlib.crc32(segment.va.to_bytes(8, "little"), checksum))
        return checksum

    @cached_property
    def _bytes(self) -> _Bytes:
        return _Bytes(self.segments)


def load_image(path: Path | str | None = None, arch: str = "x86_64") -> KernelImage:
    """A kernel image from a file; None takes the prebuilt one of the architecture.

    Raises: KernelError ENOENT (an architecture without image), ENOEXEC (a file that can't be used), OSError
    (it can't be read).
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
    """Of each module that comes with an architecture's image the modules that it uses."""
    manifest = json.loads((PREBUILT / "manifest.json").read_text())
    modules = manifest.get(arch, {}).get("modules", {})
    return {name: module["depends"] for name, module in modules.items()}


class _Bytes:
    """Image memory by virtual address."""

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
        """As our kernel's boot would do it, which can't write to its text."""
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
        """Address and contents of a table; empty where the image doesn't have it."""
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
    """What to map: at the physical address plus the kernel map, which also holds for per-CPU data.

    The per-CPU segment is linked from address 0, so its own virtual address is none to map it at.
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
