"""Vmlinux: an unpacked vmlinux with its memory by virtual address, its sections and its symbol table."""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import Any, BinaryIO, Self

from emulated_kernel.image.elf import (
    PT_LOAD,
    SHF_ALLOC,
    SHN_ABS,
    SHT_NOBITS,
    SHT_SYMTAB,
    STT_FUNC,
    STT_NOTYPE,
    STT_OBJECT,
    nm_letter,
)
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.util.config import ElfMachine
from emulated_kernel.util.fast_dataclass import dataclass, replace

_HEADER = struct.Struct("<4sBBB9xHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_MACHINES = {
    3: "i386",
    21: "ppc64",
    22: "s390x",
    40: "arm",
    243: "32-bit riscv",
    258: "loongarch64",
}
"""e_machine -> name of the machine, for the error about a file that is no supported kernel."""
_ARCHITECTURES = {ElfMachine.X86_64: "x86_64", ElfMachine.AARCH64: "arm64", ElfMachine.RISCV: "riscv64"}
_ET_EXEC = 2
_ET_DYN = 3
FILE_LIMIT = 256 << 20
"""Maximum total size in bytes of all segments in the file; kernels of distributions have 30 to 70 MiB."""
_MEMORY_LIMIT = 1 << 30
"""Maximum total size in bytes of all segments in memory: KERNEL_IMAGE_SIZE."""
_SYMTAB_LIMIT = 32 << 20
_NAMES_LIMIT = 1 << 20
_SHORT_TEXT = 64


@dataclass(frozen=True, slots=True)
class LoadSegment:
    """A PT_LOAD segment. Its memory after `data` is zero. `flags`: 1 execute, 2 write, 4 read."""

    va: int
    pa: int
    data: bytes | memoryview
    mem_size: int
    flags: int


@dataclass(frozen=True, slots=True)
class Section:
    """A section that has an address in memory."""

    address: int
    size: int
    flags: int
    in_file: bool


class LinkedMemory:
    """The memory of a linked kernel, by virtual address."""

    architecture = "x86_64"
    """Name of the architecture for which the kernel is built, as in MachineConfig.arch."""

    def __init__(self, entry: int, segments: tuple[LoadSegment, ...], sections: dict[str, Section]) -> None:
        """Store the entry point, the segments sorted by address, and a map: name -> section.

        The map may be empty.
        """
        self.entry = entry
        self.segments = segments
        self.sections = sections
        self._starts = [segment.va for segment in segments]

    def view(self, va: int, size: int) -> bytes | memoryview:
        """Return `size` bytes at `va` as they were linked, without a copy if the file is mapped.

        Raises: KernelError ENOEXEC (no segment contains the bytes).
        """
        segment = self._segment_at(va)
        if segment is None or va + size > segment.va + segment.mem_size or size < 0:
            raise unusable(f"{size} bytes at {va:#x} aren't in it")
        offset = va - segment.va
        found = segment.data[offset : offset + size]
        return found if len(found) == size else bytes(found).ljust(size, b"\0")

    def read(self, va: int, size: int) -> bytes:
        """Return a copy of the result of view(). Raises: as view()."""
        return bytes(self.view(va, size))

    def string(self, va: int, limit: int = 1 << 16) -> str:
        """Return the string at the address `va` without its zero byte, cut after `limit` bytes.

        Raises: KernelError ENOEXEC (the address is not in the file data of a segment).
        """
        segment = self._segment_at(va)
        if segment is None or not segment.va <= va < segment.va + len(segment.data):
            raise unusable(f"no text at {va:#x}")
        start = va - segment.va
        for size in (min(_SHORT_TEXT, limit), limit):
            text, ended, _ = bytes(segment.data[start : start + size]).partition(b"\0")
            if ended:
                break
        return text.decode("utf-8", "replace")

    def has(self, va: int) -> bool:
        """Return True if a segment contains the address `va`."""
        segment = self._segment_at(va)
        return segment is not None and va < segment.va + segment.mem_size

    def with_bytes(self, va: int, data: bytes) -> Self:
        """Return a copy of this memory in which `data` replaces the bytes at `va`.

        All replaced bytes must be in the file data of one segment.
        """
        segment = self._segment_at(va)
        if segment is None or va + len(data) > segment.va + len(segment.data):
            raise unusable(f"{len(data)} bytes at {va:#x} aren't in its file")
        at = va - segment.va
        patched = b"".join((segment.data[:at], data, segment.data[at + len(data) :]))
        copied = copy(self)
        copied.segments = tuple(
            replace(each, data=patched) if each is segment else each for each in self.segments
        )
        return copied

    def section_bytes(self, name: str) -> tuple[int, bytes]:
        """Return a section's address and contents; (0, b"") if it doesn't exist or isn't in the file."""
        address, size = self.section_place(name)
        return address, self.read(address, size) if size else b""

    def section_place(self, name: str) -> tuple[int, int]:
        """Return a section's address and size; (0, 0) if it doesn't exist or isn't in the file."""
        section = self.sections.get(name)
        if section is None or not section.in_file or not self.has(section.address):
            return 0, 0
        return section.address, section.size

    def _segment_at(self, va: int) -> LoadSegment | None:
        index = bisect_right(self._starts, va) - 1
        return self.segments[index] if index >= 0 else None


class ElfReader:
    """Reader of headers and parts of a linked ELF file. Sizes in the file are not trusted.

    Raises: KernelError ENOEXEC (any other kind of file).
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = file.seek(0, os.SEEK_END)
        fields = self._unpack(_HEADER, 0, "ELF header")
        magic, elf_class, order, _, kind, machine, _, self.entry = fields[:8]
        self._programs = fields[8], fields[12], fields[13]
        self._sections = fields[9], fields[14], fields[15]
        self.names: int = fields[16]
        """Index of the section that contains the names of sections."""
        if magic != b"\x7fELF":
            raise unusable("no ELF file")
        if (elf_class, order) != (2, 1) or machine not in _ARCHITECTURES:
            name = _MACHINES.get(machine, f"another machine (number {machine})")
            raise unusable(f"an ELF file for {name}; use a kernel for x86_64, arm64 or riscv64")
        self.architecture = _ARCHITECTURES[machine]
        if kind not in (_ET_EXEC, _ET_DYN):
            raise unusable("an ELF file that isn't linked (a module?), or a dump")

    def program_headers(self) -> Iterator[tuple[int, ...]]:
        """Yield the fields of each program header, in the order of Elf64_Phdr.

        Raises: KernelError ENOEXEC (the file is truncated).
        """
        offset, size, count = self._programs
        for index in range(count):
            yield self._unpack(_PROGRAM, offset + index * size, "program header")

    def section_headers(self) -> list[tuple[int, ...]]:
        """Return for each section header its fields, in the order of Elf64_Shdr.

        The list is empty if the headers are missing or damaged.
        """
        offset, size, count = self._sections
        if size < _SECTION.size:
            return []
        raw = self.read(offset, size * count)
        if len(raw) < size * count:
            return []
        return [_SECTION.unpack_from(raw, index * size) for index in range(count)]

    def names_symbol(self, name: str) -> bool:
        """Return True if a symbol table of the file contains the name `name`.

        Raises: KernelError ENOEXEC (a symbol table has no sensible size).
        """
        word = f"\0{name}\0".encode()
        tables = _symbol_tables(self.section_headers())
        return any(word in self.read(strings[4], strings[5]) for _, strings in tables)

    def slice(self, offset: int, size: int, what: str) -> bytes:
        """Return `size` bytes of the file at `offset`; `what` names these bytes in error messages.

        Raises: KernelError ENOEXEC (the file ends earlier).
        """
        data = self.read(offset, size)
        if len(data) < size:
            raise unusable(f"truncated: {what} isn't all there")
        return data

    def read(self, offset: int, size: int) -> bytes:
        """Return at most `size` bytes at `offset`. Memory is allocated only for bytes that the file has."""
        end = min(offset + size, self._size)
        if offset >= end:
            return b""
        self._file.seek(offset)
        return self._file.read(end - offset)

    def _unpack(self, layout: struct.Struct, offset: int, what: str) -> tuple[Any, ...]:
        return layout.unpack(self.slice(offset, layout.size, what))


def _symbol_tables(headers: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (header of a symbol table, header of its string table) for each symbol table.

    `headers` is a result of ElfReader.section_headers(), and the yielded headers are items of it.

    Raises: KernelError ENOEXEC (a symbol table has no sensible size).
    """
    for header in headers:
        if header[1] == SHT_SYMTAB and header[6] < len(headers):
            strings = headers[header[6]]
            if max(header[5], strings[5]) > _SYMTAB_LIMIT:
                raise unusable("its symbol table has no sensible size")
            yield header, strings


class Vmlinux(LinkedMemory):
    """The memory, sections and symbols of a vmlinux, which is a linked ELF file for x86_64, arm64 or riscv64.

    The file can be closed after the object has been created.

    Raises: KernelError ENOEXEC (any other kind of file).
    """

    def __init__(self, file: BinaryIO) -> None:
        elf = ElfReader(file)
        super().__init__(elf.entry, self._segments(elf), {})
        self.architecture = elf.architecture
        self._symbol_table: tuple[list[tuple[int, ...]], bytes, bytes] | None = None
        self._read_sections(elf)

    @cached_property
    def symtab(self) -> list[tuple[int, str, str]]:
        """(address, nm's letter, name) of each symbol for kallsyms; empty if the file is stripped."""
        return list(self._symbols(*self._symbol_table)) if self._symbol_table else []

    @staticmethod
    def _segments(elf: ElfReader) -> tuple[LoadSegment, ...]:
        found = []
        in_file = 0
        in_memory = 0
        for index, header in enumerate(elf.program_headers()):
            kind, flags, at, va, pa, file_size, mem_size, _ = header
            if kind != PT_LOAD or not mem_size:
                continue
            in_file = in_file + file_size
            in_memory = in_memory + mem_size
            if file_size > mem_size or in_file > FILE_LIMIT or in_memory > _MEMORY_LIMIT:
                raise unusable(
                    f"its segments want {in_file >> 20} MiB of the file, and {in_memory >> 20} of memory"
                )
            found.append(LoadSegment(va, pa, elf.slice(at, file_size, f"segment {index}"), mem_size, flags))
        if not found:
            raise unusable("no segment to load; debug information alone?")
        found.sort(key=lambda segment: segment.va)
        if any(low.va + low.mem_size > high.va for low, high in pairwise(found)):
            raise unusable("its segments overlap")
        return tuple(found)

    def _read_sections(self, elf: ElfReader) -> None:
        headers = elf.section_headers()
        if elf.names >= len(headers) or headers[elf.names][5] > _NAMES_LIMIT:
            return
        texts = elf.read(headers[elf.names][4], headers[elf.names][5])
        for name, kind, flags, address, _, length, *_ in headers:
            if flags & SHF_ALLOC:
                section = Section(address, length, flags, kind != SHT_NOBITS)
                self.sections.setdefault(_text(texts, name), section)
        for table, strings in _symbol_tables(headers):
            texts = elf.slice(strings[4], strings[5], "symbol names")
            data = elf.slice(table[4], table[5] // _SYMBOL.size * _SYMBOL.size, "symbol table")
            self._symbol_table = headers, texts, data

    @staticmethod
    def _symbols(headers: list[tuple[int, ...]], texts: bytes, data: bytes) -> Iterator[tuple[int, str, str]]:
        for name, info, _, section, value, _ in _SYMBOL.iter_unpack(data):
            if not name or info & 15 not in (STT_NOTYPE, STT_OBJECT, STT_FUNC):
                continue
            letter = _letter(info, section, headers)
            text = _text(texts, name)
            if letter and not text.startswith((".L", "$", "__crc_", "__cfi_", "__pfx_")):
                yield value, letter, text


def _text(texts: bytes, offset: int) -> str:
    end = texts.find(b"\0", offset)
    return texts[offset : end if end >= 0 else len(texts)].decode("utf-8", "replace")


def _letter(info: int, section: int, headers: list[tuple[int, ...]]) -> str:
    """Return the letter that nm prints for a symbol; "" for a symbol that kallsyms doesn't list.

    `info` is st_info, `section` is st_shndx, and `headers` is a result of ElfReader.section_headers().
    """
    if section == SHN_ABS:
        return "A" if info >> 4 else "a"
    if not 0 < section < len(headers) or not headers[section][2] & SHF_ALLOC:
        return ""
    return nm_letter(info >> 4, info & 15, headers[section][2], headers[section][1])
