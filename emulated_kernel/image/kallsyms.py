"""Symbols of a kernel by name and by address, with the rules that /proc/kallsyms and %pS follow."""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from emulated_kernel.errors import KernelError
from emulated_kernel.image.elf import (
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHF_WRITE,
    SHN_ABS,
    SHN_UNDEF,
    SHT_NOBITS,
    STB_LOCAL,
    STB_WEAK,
    STT_FILE,
    STT_OBJECT,
    STT_SECTION,
    ElfFile,
    ElfSymbol,
    SectionHeader,
)

_OWN_TABLES = frozenset(
    f"kallsyms_{table}"
    for table in (
        "addresses",
        "markers",
        "name_offsets",
        "names",
        "num_syms",
        "offsets",
        "relative_base",
        "token_index",
        "token_table",
    )
)
"""The table's own parts aren't in the table."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol; `type` is nm's letter, `size` the distance to the next higher address in bytes."""

    name: str
    address: int
    type: str
    size: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def is_text(self) -> bool:
        """Whether it names code."""
        return self.type in "tTwW"


@dataclass(frozen=True, slots=True)
class Location:
    """An address as a symbol and an offset in bytes."""

    symbol: Symbol
    offset: int
    module: str | None = None
    """The module that it belongs to; None for the kernel itself."""

    @property
    def name(self) -> str:
        """The symbol's name."""
        return self.symbol.name

    def __str__(self) -> str:
        module = f" [{self.module}]" if self.module else ""
        return f"{self.symbol.name}+{self.offset:#x}/{self.symbol.size:#x}{module}"


class Kallsyms:
    """The symbol table of one kernel.

    `start` and `end` border what addresses are looked up for: _stext and _end.

    Mirrors: kernel/kallsyms.c (v6.1)
    """

    def __init__(
        self, symbols: Iterable[Symbol], start: int = 0, end: int = 1 << 64, word_size: int = 8
    ) -> None:
        self.digits = 2 * word_size
        """Hexadecimal digits of an address."""
        self.start = start
        self.end = end
        self.symbols: tuple[Symbol, ...] = tuple(_with_sizes(sorted(symbols, key=_order), end))
        self._addresses = [symbol.address for symbol in self.symbols]
        self._by_name: dict[str, list[Symbol]] = {}
        for symbol in self.symbols:
            self._by_name.setdefault(symbol.name, []).append(symbol)

    def __len__(self) -> int:
        return len(self.symbols)

    def lookup_name(self, name: str) -> int | None:
        """The address of the first symbol of that name.

        Mirrors: kernel/kallsyms.c:kallsyms_lookup_name (v6.1)
        """
        found = self._by_name.get(name)
        return found[0].address if found else None

    def has_module(self, name: str) -> bool:  # noqa: ARG002 - it has the kernel's symbols alone
        """Whether a module of that name is loaded."""
        return False

    def count_name(self, name: str) -> int:
        """How many symbols have that name."""
        return len(self._by_name.get(name, ()))

    def by_name(self, name: str) -> tuple[Symbol, ...]:
        """All symbols of that name, by address."""
        return tuple(self._by_name.get(name, ()))

    def lookup(self, address: int) -> Location | None:
        """The symbol that an address is in: of several at one address the first in the table.

        Mirrors: kernel/kallsyms.c:get_symbol_pos (v6.1)
        """
        if not self.start <= address < self.end:
            return None
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        first = bisect_right(self._addresses, self._addresses[index] - 1)
        symbol = self.symbols[first]
        return Location(symbol, address - symbol.address)

    def kallsyms_text(self, zero_addresses: bool = False) -> str:
        """The text of /proc/kallsyms; readers without CAP_SYSLOG see zeros for addresses.

        Mirrors: kernel/kallsyms.c:s_show (v6.1)
        """
        return "".join(
            f"{0 if zero_addresses else symbol.address:0{self.digits}x} {symbol.type} {symbol.name}\n"
            for symbol in self.symbols
        )


def elf_symbols(elf: ElfFile) -> Iterator[Symbol]:
    """The symbols of a linked kernel that belong into kallsyms; sizes are not set.

    Mapping symbols, the compiler's local labels, file and section names are left out.
    Per-CPU variables are linked at their offsets and are absolute, as in Linux.
    """
    sections = {section.index: section for section in elf.sections.values()}
    percpu = elf.sections.get(".data..percpu")
    for symbol in elf.symbols:
        if not _is_kallsyms_symbol(symbol):
            continue
        section = sections.get(symbol.section)
        if section is not None:
            letter = "A" if section is percpu else _type_letter(symbol, section)
            yield Symbol(symbol.name, symbol.value, letter)


def _is_kallsyms_symbol(symbol: ElfSymbol) -> bool:
    """Mirrors: scripts/kallsyms.c:is_ignored_symbol (v6.1)"""
    if not symbol.name or symbol.section in (SHN_UNDEF, SHN_ABS):
        return False
    if symbol.type in (STT_SECTION, STT_FILE) or symbol.name in _OWN_TABLES:
        return False
    return not symbol.name.startswith(("$", ".L"))


def _type_letter(symbol: ElfSymbol, section: SectionHeader) -> str:
    """nm's letter. Mirrors: binutils bfd_decode_symclass"""
    if symbol.binding == STB_WEAK:
        return "V" if symbol.type == STT_OBJECT else "W"
    if section.flags & SHF_EXECINSTR:
        letter = "T"
    elif section.type == SHT_NOBITS:
        letter = "B"
    elif section.flags & SHF_WRITE:
        letter = "D"
    elif section.flags & SHF_ALLOC:
        letter = "R"
    else:
        letter = "N"
    return letter.lower() if symbol.binding == STB_LOCAL else letter


def _order(symbol: Symbol) -> tuple[int, bool, bool, int, str]:
    """Among aliases: weak ones last, then linker-made ones, then by leading underscores.

    Mirrors: scripts/kallsyms.c:compare_symbols (v6.1)
    """
    name = symbol.name
    underscores = len(name) - len(name.lstrip("_"))
    return symbol.address, symbol.type in "wW", _is_linker_made(name), underscores, name


def _is_linker_made(name: str) -> bool:
    """Mirrors: scripts/kallsyms.c:may_be_linker_script_provide_symbol (v6.1)"""
    if len(name) < 8 or not name.startswith("__"):
        return False
    return name.startswith(("__start_", "__stop_", "__end_")) or name.endswith(("_start", "_end"))


def _with_sizes(symbols: list[Symbol], end: int) -> Iterator[Symbol]:
    next_address, last = end, end
    sized = []
    for symbol in reversed(symbols):
        if symbol.address != last:
            next_address, last = last, symbol.address
        sized.append(Symbol(symbol.name, symbol.address, symbol.type, max(next_address - symbol.address, 0)))
    return reversed(sized)


def address_of(symbols: Kallsyms, name: str) -> int:
    """Address of a symbol that the host cannot do without. Raises: KernelError ENOEXEC."""
    address = symbols.lookup_name(name)
    if address is None:
        raise KernelError(errno.ENOEXEC, f"the kernel image has no symbol {name}")
    return address
