"""Links the files of a distribution's modules at made-up addresses, for their text, symbols and tables.

Linking needs no running kernel. A running kernel patches the text of a module; here the text has no
patches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from errno import EOPNOTSUPP
from itertools import pairwise

from emulated_kernel.image import text_tables
from emulated_kernel.image.elf import (
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHN_ABS,
    SHN_UNDEF,
    SHT_NOBITS,
    STB_WEAK,
    STT_FILE,
    STT_SECTION,
    ElfFile,
    ElfSymbol,
    SectionHeader,
    nm_letter,
)
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.linux.linux_kernel import LinuxKernel, ReturnThunks
from emulated_kernel.image.linux.unusable import read_as, unusable
from emulated_kernel.image.live_image import Module
from emulated_kernel.image.text_tables import BlacklistEntry, Range
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, replace

_FIRST = 0xFFFFFFFFC0000000
"""Address of the first module. Mirrors: arch/x86/include/asm/pgtable_64_types.h:MODULES_VADDR (v6.1)."""
_PAGE = 4096
_LIMIT = 48 << 20
"""Maximum size of a module's memory in bytes."""
_RELOCATION = struct.Struct("<QQq")
_NONE = 0
_ABSOLUTE = {1: 8, 10: 4, 11: 4}
"""Type of a relocation that stores an address -> size in bytes. Mirrors: R_X86_64_64, _32, _32S."""
_RELATIVE = {2: 4, 4: 4, 24: 8}
"""Type of a relocation that stores a distance -> size in bytes. Mirrors: R_X86_64_PC32, _PLT32, _PC64."""
_UNPROBED = (".kprobes.text", ".noinstr.text")
"""Sections whose functions cannot be probed. Mirrors: kernel/kprobes.c:add_module_kprobe_blacklist (v6.1)."""


@dataclass(frozen=True)
class LinkedModule:
    """A linked module, and the addresses of those jumps in it that lead to the return thunk."""

    module: Module
    return_sites: tuple[int, ...]

    def booted(self, returns: ReturnThunks) -> Module:
        """Return the module with its return instructions rewritten as `returns` says.

        The kernel rewrites return instructions when it loads the module.
        """
        code = {start: bytearray(text) for start, text in self.module.code.items()}
        for site in self.return_sites:
            for start, text in code.items():
                at = site - start
                if 0 <= at <= len(text) - text_tables.RETURN_SIZE and not returns.has_thunk(site):
                    patched = text_tables.plain_return(bytes(text[at : at + text_tables.RETURN_SIZE]))
                    text[at : at + text_tables.RETURN_SIZE] = (
                        patched or text[at : at + text_tables.RETURN_SIZE]
                    )
        return replace(self.module, code={start: bytes(text) for start, text in code.items()})


def link_modules(
    kernel: LinuxKernel, files: Sequence[tuple[str, bytes]], loaded: Sequence[Module] = ()
) -> list[LinkedModule]:
    """Link modules with a kernel, in the order of loading. `files`: name and contents of each module.

    `loaded`: modules that the kernel has loaded before.
    Raises: KernelError ENOEXEC (a damaged module, or one for another kernel), EOPNOTSUPP (the kernel is not
    for x86_64).
    """
    if kernel.architecture != "x86_64":
        why = f"modules for {kernel.architecture} cannot be read without a running kernel"
        raise KernelError(EOPNOTSUPP, f"{why}; mount it and load the module there")
    found: list[LinkedModule] = []
    known = {symbol.name: symbol.address for module in loaded for symbol in module.symbols}
    ends = [part.end for module in loaded for part in (module.text, *module.data)]
    start = -(-max(ends, default=_FIRST) // _PAGE) * _PAGE

    def resolve(name: str) -> int | None:
        address = known.get(name)
        return kernel.kallsyms.lookup_name(name) if address is None else address

    for name, data in files:
        with read_as(f"module ({name})"):
            linker = _Linker(name, ElfFile(data), start)
            linker.relocate(resolve)
            made = linker.linked(kernel)
        found.append(made)
        known |= {symbol.name: symbol.address for symbol in made.module.symbols}
        start = linker.end
    return found


class _Linker:
    def __init__(self, name: str, elf: ElfFile, start: int) -> None:
        self._name = name
        self._elf = elf
        self._sections = {section.index: section for section in elf.sections.values()}
        self._addresses: dict[int, int] = {}
        """Index of a section -> its address."""
        self.end = start
        parts = []
        for is_text, is_init in ((True, False), (False, False), (True, True), (False, True)):
            chosen = [each for each in self._sections.values() if _belongs(each, is_text, is_init)]
            parts.append(self._place(chosen))
        self._text, self._data, self._init_text, self._init_data = parts
        if self.end - start > _LIMIT:
            raise unusable(f"more than {_LIMIT >> 20} MiB")
        self._memory = {
            part.start: bytearray(part.end - part.start) for part in parts if part.end > part.start
        }
        for index, address in self._addresses.items():
            section = self._sections[index]
            if section.type != SHT_NOBITS:
                self._write(address, self._contents(section))

    def _place(self, sections: list[SectionHeader]) -> Range:
        """Assign addresses to `sections`, one after the other; return their range.

        The range begins at the first page after the sections that were placed before.

        Mirrors: kernel/module/main.c:layout_sections (v6.1).
        """
        first = self.end
        for section in sections:
            alignment = min(max(section.alignment, 1), _PAGE)
            self.end = -(-self.end // alignment) * alignment
            self._addresses[section.index] = self.end
            self.end += section.size
        last = self.end
        self.end = -(-self.end // _PAGE) * _PAGE
        return Range(first, last)

    def _contents(self, section: SectionHeader) -> bytes:
        data = self._elf.data[section.offset : section.offset + section.size]
        if len(data) < section.size:
            raise unusable(f"truncated: section {section.name}")
        return data

    def _write(self, address: int, data: bytes) -> None:
        for start, memory in self._memory.items():
            at = address - start
            if at >= 0 and at + len(data) <= len(memory):
                memory[at : at + len(data)] = data
                return
        raise unusable(f"it writes outside of its sections, at {address:#x}")

    def relocate(self, resolve: Callable[[str], int | None]) -> None:
        """Apply the relocations; `resolve` returns a symbol's address, or None if the kernel lacks it.

        A weak symbol that the kernel lacks counts as 0.
        Raises: KernelError ENOEXEC (the kernel lacks any other symbol, or a relocation is damaged or
        unknown).
        """
        symbols = self._elf.symbols
        for name, section in self._elf.sections.items():
            target = self._elf.sections.get(name.removeprefix(".rela"))
            if not name.startswith(".rela") or target is None or target.index not in self._addresses:
                continue
            base = self._addresses[target.index]
            data = self._contents(section)
            whole = data[: len(data) // _RELOCATION.size * _RELOCATION.size]
            for offset, info, addend in _RELOCATION.iter_unpack(whole):
                number = info >> 32
                if number >= len(symbols):
                    raise unusable("a relocation has no symbol")
                value = self._value(symbols[number], resolve)
                self._relocate_one(base + offset, info & 0xFFFFFFFF, value + addend)

    def _relocate_one(self, place: int, kind: int, value: int) -> None:
        if kind in _RELATIVE:
            size = _RELATIVE[kind]
            value -= place
        elif kind in _ABSOLUTE:
            size = _ABSOLUTE[kind]
        elif kind == _NONE:
            return
        else:
            raise unusable(f"a relocation of the unknown type {kind}")
        self._write(place, (value & (1 << 8 * size) - 1).to_bytes(size, "little"))

    def _value(self, symbol: ElfSymbol, resolve: Callable[[str], int | None]) -> int:
        if symbol.section == SHN_UNDEF:
            address = resolve(symbol.name) if symbol.name else 0
            if address is None and symbol.binding != STB_WEAK:
                raise unusable(f"this kernel has no symbol {symbol.name}")
            return address or 0
        if symbol.section == SHN_ABS:
            return symbol.value
        # The symbol is in a section that is not loaded.
        return self._addresses.get(symbol.section, 0) + symbol.value

    # The result

    def linked(self, kernel: LinuxKernel) -> LinkedModule:
        """Return the linked module with its tables, and without its init sections, which Linux frees.

        `kernel`: the kernel, which decides the layout of the bug table.
        """
        symbols = tuple(self._symbols())
        module = Module(
            name=self._name,
            text=self._text,
            init_text=self._init_text,
            data=(self._data,),
            init_data=(self._init_data,),
            symbols=symbols,
            ex_table=tuple(text_tables.ex_table(*self._table("__ex_table"))),
            blacklist=tuple(self._blacklist(symbols)),
            mcount=frozenset(text_tables.words(self._table("__mcount_loc")[1])),
            bugs=text_tables.bugs(
                *self._table("__bug_table"), lambda _at, _limit: "", has_format=kernel.bugs_have_format
            ),
            code=self._bytes(self._text, self._init_text),
            contents=self._bytes(self._data, self._init_data),
            jump_labels=tuple(text_tables.jump_labels(*self._table("__jump_table"))),
            static_calls=tuple(text_tables.static_calls(*self._table(".static_call_sites"))),
        )
        # Its init function has returned.
        return LinkedModule(
            module.without_init(), tuple(text_tables.return_sites(*self._table(".return_sites")))
        )

    def _bytes(self, *parts: Range) -> Mapping[int, bytes]:
        return {part.start: bytes(self._memory[part.start]) for part in parts if part.end > part.start}

    def _table(self, name: str) -> tuple[int, bytes]:
        section = self._elf.sections.get(name)
        if section is None or section.index not in self._addresses:
            return 0, b""
        address = self._addresses[section.index]
        start = next(each for each, data in self._memory.items() if each <= address < each + len(data) + 1)
        at = address - start
        return address, bytes(self._memory[start][at : at + section.size])

    def _symbols(self) -> Iterator[Symbol]:
        parts = (self._text, self._data, self._init_text, self._init_data)
        found = []
        for symbol in self._elf.symbols:
            address = self._addresses.get(symbol.section)
            if address is None or not symbol.name or symbol.type in (STT_SECTION, STT_FILE):
                continue
            header = self._sections[symbol.section]
            letter = nm_letter(symbol.binding, symbol.type, header.flags, header.type)
            found.append((symbol.name, address + symbol.value, letter))
        starts = sorted({address for _, address, _ in found})
        following = dict(pairwise(starts))
        for name, address, letter in found:
            end = next((part.end for part in parts if part.start <= address < part.end), address)
            yield Symbol(name, address, letter, min(following.get(address, end), end) - address)

    def _blacklist(self, symbols: tuple[Symbol, ...]) -> Iterator[BlacklistEntry]:
        listed = set(text_tables.words(self._table("_kprobe_blacklist")[1]))
        areas = [range(at, at + len(data)) for at, data in map(self._table, _UNPROBED) if data]
        for symbol in {each.address: each for each in reversed(symbols) if each.size}.values():
            if symbol.address in listed or any(symbol.address in area for area in areas):
                yield BlacklistEntry(symbol.address, symbol.address + symbol.size, symbol.name)


def _belongs(section: SectionHeader, is_text: bool, is_init: bool) -> bool:
    """Return True if a section is loaded into the memory area that `is_text` and `is_init` select.

    `is_text`: whether the area is for text; otherwise it is for data. `is_init`: whether the area is for init
    functions and their data; otherwise it is for all other contents of the module.
    """
    if not section.flags & SHF_ALLOC or not section.size:
        return False
    in_text = bool(section.flags & SHF_EXECINSTR)
    return in_text == is_text and section.name.startswith(".init") == is_init
