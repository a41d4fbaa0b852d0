"""ELF reader for kernel images: segments, sections and symbols, without relocations and DWARF."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cached_property
from typing import NoReturn

from emulated_kernel.util.errors import UnusableFile
from emulated_kernel.util.fast_dataclass import dataclass

PT_LOAD = 1
SHT_NOBITS = 8
SHT_SYMTAB = 2
SHF_WRITE = 1
SHF_ALLOC = 2
SHF_EXECINSTR = 4
SHN_UNDEF = 0
SHN_ABS = 0xFFF1
STB_LOCAL = 0
STB_WEAK = 2
STT_NOTYPE = 0
STT_OBJECT = 1
STT_FUNC = 2
STT_SECTION = 3
STT_FILE = 4
NT_GNU_BUILD_ID = 3
_NOTE = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class SectionHeader:
    """One section header; `address` is virtual, `offset`, `size` and `alignment` are in bytes."""

    index: int
    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    alignment: int


@dataclass(frozen=True, slots=True)
class ProgramHeader:
    """One PT_LOAD header. `flags` are the ELF flags: 1 execute, 2 write, 4 read."""

    flags: int
    offset: int
    vaddr: int
    paddr: int
    file_size: int
    mem_size: int


@dataclass(frozen=True, slots=True)
class ElfSymbol:
    """One entry of the ELF symbol table."""

    name: str
    value: int
    size: int
    type: int
    binding: int
    section: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """Formats of the headers of an ELF class (32 or 64 bits), for Python's struct module."""

    header: str
    program: str
    section: str
    symbol: str


_LAYOUTS = {
    1: _Layout("HHIIIIIHHHHHH", "IIIIIIII", "IIIIIIIIII", "IIIBBH"),
    2: _Layout("HHIQQQIHHHHHH", "IIQQQQQQ", "IIQQQQIIQQ", "IBBHQQ"),
}
_IDENT_SIZE = 16


class ElfFile:
    """An ELF file that was read into memory.

    Raises: UnusableFile (the data isn't a complete little-endian ELF file; its `why` has the reason).
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        if data[:4] != b"\x7fELF":
            _bad("no ELF magic")
        if len(data) < _IDENT_SIZE:
            _bad("truncated ELF identification")
        if data[4] not in _LAYOUTS:
            _bad(f"unknown ELF class {data[4]}")
        if data[5] != 1:
            _bad("not little-endian")
        self.bits = 32 * data[4]
        self._layout = _LAYOUTS[data[4]]
        fields = self._unpack(self._layout.header, _IDENT_SIZE, "header")
        self.type, self.machine, _, self.entry, phoff, shoff = fields[:6]
        phentsize, phnum, shentsize, shnum, self._shstrndx = fields[8:13]
        self.segments = self._read_segments(phoff, phentsize, phnum)
        self.sections = self._read_sections(shoff, shentsize, shnum)

    @cached_property
    def symbols(self) -> list[ElfSymbol]:
        """All symbols of the file, in the file's order; empty if the file is stripped."""
        for section in self.sections.values():
            if section.type == SHT_SYMTAB:
                return self._read_symbols(section)
        return []

    def segment_data(self, segment: ProgramHeader) -> bytes:
        """Return the contents of a segment: the first `file_size` bytes of its memory."""
        return self._slice(segment.offset, segment.file_size, f"segment at {segment.vaddr:#x}")

    def _read_segments(self, offset: int, size: int, count: int) -> list[ProgramHeader]:
        segments = []
        for index in range(count):
            fields = self._unpack(self._layout.program, offset + index * size, "program header")
            if self.bits == 64:
                kind, flags, start, vaddr, paddr, file_size, mem_size, _ = fields
            else:
                kind, start, vaddr, paddr, file_size, mem_size, flags, _ = fields
            if kind == PT_LOAD:
                segments.append(ProgramHeader(flags, start, vaddr, paddr, file_size, mem_size))
        whole = [each.file_size for each in segments if each.offset + each.file_size <= len(self.data)]
        # Thousands of segments that share one piece of the file would take gigabytes of memory.
        if sum(whole) > len(self.data):
            _bad("segments with more bytes than the file")
        return segments

    def _read_sections(self, offset: int, size: int, count: int) -> dict[str, SectionHeader]:
        headers = [
            self._unpack(self._layout.section, offset + index * size, "section header")
            for index in range(count)
        ]
        if not headers:
            return {}
        if self._shstrndx >= len(headers):
            _bad("section names are outside of the section table")
        names = self._slice(headers[self._shstrndx][4], headers[self._shstrndx][5], "section names")
        sections: dict[str, SectionHeader] = {}
        for index, fields in enumerate(headers):
            name, kind, flags, address, start, length, link, _, alignment, _ = fields
            section = SectionHeader(
                index, _string(names, name), kind, flags, address, start, length, link, alignment
            )
            sections.setdefault(section.name, section)
        return sections

    def _read_symbols(self, table: SectionHeader) -> list[ElfSymbol]:
        linked = next((s for s in self.sections.values() if s.index == table.link), None)
        if linked is None:
            _bad("symbol table without string table")
        names = self._slice(linked.offset, linked.size, "symbol names")
        data = self._slice(table.offset, table.size, "symbol table")
        entry = struct.Struct("<" + self._layout.symbol)
        if len(data) % entry.size:
            _bad("symbol table of odd size")
        # All names are decoded at once, because a call for each of them would take a fifth of the time.
        text = names.decode("ascii", "replace")
        symbols = []
        for fields in entry.iter_unpack(data):
            if self.bits == 64:
                start, info, _, section, value, size = fields
            else:
                start, value, size, info, _, section = fields
            end = text.find("\0", start)
            if end < 0:
                _bad("a name is outside of its string table")
            symbols.append(ElfSymbol(text[start:end], value, size, info & 15, info >> 4, section))
        return symbols

    def _unpack(self, layout: str, offset: int, what: str) -> tuple[int, ...]:
        raw = self._slice(offset, struct.calcsize("<" + layout), what)
        return struct.unpack("<" + layout, raw)

    def _slice(self, offset: int, size: int, what: str) -> bytes:
        if offset + size > len(self.data):
            _bad(f"truncated: {what} ends at {offset + size:#x}, the file at {len(self.data):#x}")
        return self.data[offset : offset + size]


def nm_letter(binding: int, kind: int, flags: int, section: int) -> str:
    """Return the letter that nm prints for a symbol of type `kind` (STT) and binding `binding` (STB).

    `flags` and `section` are the flags and the type of the symbol's section.
    Mirrors: bfd_decode_symclass.
    """
    if binding == STB_WEAK:
        return "V" if kind == STT_OBJECT else "W"
    if flags & SHF_EXECINSTR:
        letter = "T"
    elif section == SHT_NOBITS:
        letter = "B"
    elif flags & SHF_WRITE:
        letter = "D"
    elif flags & SHF_ALLOC:
        letter = "R"
    else:
        letter = "N"
    return letter.lower() if binding == STB_LOCAL else letter


def _string(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    if end < 0:
        _bad("a name is outside of its string table")
    return table[offset:end].decode("ascii", "replace")


def _bad(message: str) -> NoReturn:
    raise UnusableFile("kernel image", message)


def elf_notes(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield the owner, the type and the contents of each note in `data`, a segment or section of notes."""
    at = 0
    while at + _NOTE.size <= len(data):
        name_size, size, kind = _NOTE.unpack_from(data, at)
        at += _NOTE.size
        name = data[at : at + name_size].rstrip(b"\0")
        at += -(-name_size // 4) * 4
        yield name, kind, data[at : at + size]
        at += -(-size // 4) * 4


def gnu_build_id(notes: bytes) -> str:
    """Return the GNU build id in `notes`, in hexadecimal; "" if there is none."""
    found = (text for name, kind, text in elf_notes(notes) if (name, kind) == (b"GNU", NT_GNU_BUILD_ID))
    return next(found, b"").hex()
