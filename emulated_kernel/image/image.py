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

from emulated_kernel.abi import Prot
from emulated_kernel.config import IMAGE_LIMIT
from emulated_kernel.dataclass import dataclass
from emulated_kernel.errors import KernelError
from emulated_kernel.image.alternatives import CPU_FEATURES, alternatives, replaced
from emulated_kernel.image.elf import ElfFile, ElfMachine
from emulated_kernel.image.kallsyms import Kallsyms, Symbol, elf_symbols
from emulated_kernel.regular import read_regular

PREBUILT = Path(__file__).parent / "prebuilt"

_MACHINES = {
    "x86_64": ElfMachine.X86_64,
    "i386": ElfMachine.I386,
    "riscv64": ElfMachine.RISCV,
    "riscv64i": ElfMachine.RISCV,
}


class Segment(NamedTuple):
    """Memory to map: virtual address, initial bytes, size in memory (the rest is zero), access."""

    va: int
    data: bytes
    mem_size: int
    prot: Prot


class Range(NamedTuple):
    """Addresses from `start` up to, but not including, `end`."""

    start: int
    end: int


class ExTableEntry(NamedTuple):
    """A faulting instruction's address and where to go on."""

    insn: int
    fixup: int


class BlacklistEntry(NamedTuple):
    """A function that may not be probed."""

    start: int
    end: int
    name: str


class JumpLabel(NamedTuple):
    """A nop that becomes a jump to `target` when the static key at `key` is switched on."""

    code: int
    target: int
    key: int


class StaticCall(NamedTuple):
    """A call that the static call at `key` leads to another function."""

    site: int
    key: int
    is_tail_call: bool


@dataclass(frozen=True, slots=True)
class BugEntry:
    """A ud2 of BUG() or WARN()."""

    address: int
    file: str
    line: int
    flags: int


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

        Raises: KernelError ENOEXEC where no segment has them.
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

    Raises: KernelError ENOENT for an architecture without image, ENOEXEC for a file that can't be used,
    OSError where it can't be read.
    """
    if arch not in _MACHINES:
        raise KernelError(ENOENT, f"unknown architecture {arch}")
    file = PREBUILT / arch / "vmlinux" if path is None else Path(path)
    if path is None and not file.exists():
        raise KernelError(ENOENT, f"no prebuilt image for {arch}")
    elf = ElfFile(read_regular(file, IMAGE_LIMIT))
    if elf.machine != _MACHINES[arch]:
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
        return KernelImage(
            path=path,
            arch=arch,
            entry=self._elf.entry,
            segments=self._segments,
            kallsyms=self._kallsyms,
            text_ranges=(self._range("_stext", "_etext"),),
            ex_table=self._ex_table(8 if abi else 12),
            blacklist=tuple(self._blacklist()),
            mcount=frozenset(self._words("__start_mcount_loc", "__stop_mcount_loc")),
            bugs=self._bugs(),
            jump_labels=tuple(sorted(self._jump_labels())),
            static_calls=tuple(sorted(self._static_calls())),
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
        first, last = self._kallsyms.lookup_name(start), self._kallsyms.lookup_name(end)
        if first is None or last is None or last <= first:
            return 0, b""
        return first, self._bytes.read(first, last - first)

    def _words(self, start: str, end: str) -> list[int]:
        _, data = self._between(start, end)
        size, code = (8, "Q") if self._elf.bits == 64 else (4, "I")
        return list(struct.unpack(f"<{len(data) // size}{code}", data[: len(data) // size * size]))

    def _ex_table(self, entry_size: int) -> tuple[ExTableEntry, ...]:
        base, data = self._between("__start___ex_table", "__stop___ex_table")
        entries = []
        for offset in range(0, len(data) - entry_size + 1, entry_size):
            insn, fixup = struct.unpack_from("<ii", data, offset)
            entries.append(ExTableEntry(base + offset + insn, base + offset + 4 + fixup))
        return tuple(sorted(entries))

    def _jump_labels(self) -> Iterator[JumpLabel]:
        base, data = self._between("__start___jump_table", "__stop___jump_table")
        size, code = (16, "<iiq") if self._elf.bits == 64 else (12, "<iii")
        for at in range(0, len(data) - size + 1, size):
            label, target, key = struct.unpack_from(code, data, at)
            # Linux: of the key's address the lowest bits say what the branch does by default.
            yield JumpLabel(base + at + label, base + at + 4 + target, (base + at + 8 + key) & ~3)

    def _static_calls(self) -> Iterator[StaticCall]:
        base, data = self._between("__start_static_call_sites", "__stop_static_call_sites")
        for at in range(0, len(data) - 7, 8):
            site, key = struct.unpack_from("<ii", data, at)
            key += base + at + 4
            # Linux: of the key's address the lowest bit says that it is a tail call.
            yield StaticCall(base + at + site, key & ~3, bool(key & 1))

    def _bugs(self) -> dict[int, BugEntry]:
        base, data = self._between("__start___bug_table", "__stop___bug_table")
        bugs = {}
        for offset in range(0, len(data) - 11, 12):
            address, file, line, flags = struct.unpack_from("<iiHH", data, offset)
            address += base + offset
            bugs[address] = BugEntry(address, self._bytes.string(base + offset + 4 + file), line, flags)
        return bugs

    def _blacklist(self) -> list[BlacklistEntry]:
        """Mirrors: kernel/kprobes.c:populate_kprobe_blacklist (v6.1)"""
        entries = []
        for address in self._words("__start_kprobe_blacklist", "__stop_kprobe_blacklist"):
            entry = self._function(address)
            if entry:
                entries.append(entry)
        for area in ("kprobes", "noinstr", "entry"):
            entries += self._functions_between(f"__{area}_text_start", f"__{area}_text_end")
        return entries

    def _function(self, address: int) -> BlacklistEntry | None:
        found = self._kallsyms.lookup(address)
        if found is None:
            return None
        return BlacklistEntry(address, address + found.symbol.size - found.offset, found.name)

    def _functions_between(self, start: str, end: str) -> list[BlacklistEntry]:
        """Mirrors: kernel/kprobes.c:kprobe_add_area_blacklist (v6.1)"""
        address, last = self._kallsyms.lookup_name(start), self._kallsyms.lookup_name(end)
        entries: list[BlacklistEntry] = []
        while address is not None and last is not None and address < last:
            entry = self._function(address)
            if entry is None:
                break
            entries.append(entry)
            address = max(entry.end, address + 1)
        return entries

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
