"""Symbols of a kernel by name and by address, with the rules that /proc/kallsyms and %pS follow."""

from __future__ import annotations

import errno
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Self

from emulated_kernel.image.elf import (
    SHN_ABS,
    SHN_UNDEF,
    STT_FILE,
    STT_SECTION,
    ElfFile,
    ElfSymbol,
    nm_letter,
)
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

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
_REMEMBERED = 8192
"""Symbols that are kept; of a whole kernel's they would take tens of MiB."""


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


@dataclass(frozen=True, slots=True)
class SymbolTable:
    """Symbols by address in a few arrays, which may lie in a file: a kernel has a hundred thousand."""

    addresses: Sequence[int]
    types: Sequence[int]
    """Letters as bytes."""
    starts: Sequence[int]
    """Where each name begins in `names`, and where the last one ends."""
    names: bytes
    """Each with a zero byte behind it."""
    by_name: Sequence[int]
    """Numbers of the symbols, by name and then by address."""

    @classmethod
    def of(cls, symbols: Sequence[Symbol]) -> Self:
        """A table of these symbols, which are sorted by address."""
        names = [symbol.name.encode("utf-8", "replace") for symbol in symbols]
        starts = accumulate((len(name) + 1 for name in names), initial=0)
        return cls(
            array("Q", [symbol.address for symbol in symbols]),
            bytes(ord(symbol.type) for symbol in symbols),
            array("I", starts),
            b"".join([name + b"\0" for name in names]),
            array("I", sorted(range(len(names)), key=names.__getitem__)),
        )

    @classmethod
    def of_parts(cls, parts: Mapping[str, memoryview]) -> Self:
        """What `parts()` returned. Raises: KeyError, TypeError, ValueError."""
        found = cls(
            parts["addresses"].cast("Q"),
            parts["types"],
            parts["starts"].cast("I"),
            bytes(parts["names"]),
            parts["by_name"].cast("I"),
        )
        count = len(found.addresses)
        if {len(found.types), len(found.starts) - 1, len(found.by_name)} != {count}:
            raise ValueError("a symbol table whose parts don't fit")
        return found

    def parts(self) -> dict[str, bytes]:
        """Its arrays by name."""
        return {field.name: bytes(memoryview(getattr(self, field.name))) for field in fields(self)}

    def name(self, index: int) -> bytes:
        """Of one symbol."""
        return self.names[self.starts[index] : self.starts[index + 1] - 1]

    def named(self, name: str) -> Sequence[int]:
        """Indices of all symbols of that name, by ascending address."""
        wanted = name.encode("utf-8", "replace")
        first = last = bisect_left(self.by_name, wanted, key=self.name)
        while last < len(self.by_name) and self.name(self.by_name[last]) == wanted:
            last += 1
        return self.by_name[first:last]

    def ending(self, pattern: str) -> Iterator[int]:
        """Numbers of the symbols whose names end in what an expression matches, by address."""
        for match in re.finditer(pattern.encode() + b"(?=\\0)", self.names):
            yield bisect_right(self.starts, match.start()) - 1


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
        self._table = SymbolTable.of(sorted(symbols, key=_order))
        self._met: dict[int, Symbol] = {}
        """Symbols by number, of addresses and names that were looked up."""
        self._numbers: dict[str, Sequence[int]] = {}
        """And numbers by name."""

    @classmethod
    def of_table(cls, table: SymbolTable, start: int, end: int) -> Self:
        """Of a table that stands ready."""
        found = cls((), start, end)
        found._table = table
        return found

    @property
    def table(self) -> SymbolTable:
        """All symbols, as they can be kept."""
        return self._table

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """By address; made anew at each time."""
        return tuple(self._each())

    def _each(self) -> Iterator[Symbol]:
        return map(self._make, range(len(self)))

    def _symbol(self, index: int) -> Symbol:
        found = self._met.get(index)
        if found is None:
            if len(self._met) == _REMEMBERED:
                self._met.clear()
            found = self._met[index] = self._make(index)
        return found

    def _named(self, name: str) -> Sequence[int]:
        found = self._numbers.get(name, ())
        if not found and (found := self._table.named(name)):
            self._numbers[name] = found
        return found

    def _make(self, index: int) -> Symbol:
        addresses = self._table.addresses
        address = addresses[index]
        behind = bisect_right(addresses, address, index)
        end = addresses[behind] if behind < len(addresses) else self.end
        return Symbol(
            self._table.name(index).decode("utf-8", "replace"),
            address,
            chr(self._table.types[index]),
            max(end - address, 0),
        )

    def __len__(self) -> int:
        return len(self._table.addresses)

    def lookup_name(self, name: str) -> int | None:
        """The address of the first symbol of that name.

        Mirrors: kernel/kallsyms.c:kallsyms_lookup_name (v6.1)
        """
        found = self._named(name)
        if found:
            return self._table.addresses[found[0]]
        of_modules = self._of_modules(name)
        return of_modules[0].address if of_modules else None

    def ending(self, pattern: str) -> Iterator[int]:
        """The addresses of symbols whose names end in what an expression matches."""
        return (self._table.addresses[index] for index in self._table.ending(pattern))

    def has_module(self, name: str) -> bool:  # noqa: ARG002 - it has the kernel's symbols alone
        """Whether a module of that name is loaded."""
        return False

    def count_name(self, name: str) -> int:
        """How many symbols have that name."""
        return len(self._named(name)) + len(self._of_modules(name))

    def by_name(self, name: str) -> tuple[Symbol, ...]:
        """All symbols of that name, by address; those of the kernel before those of modules."""
        return (*map(self._symbol, self._named(name)), *self._of_modules(name))

    def lookup(self, address: int) -> Location | None:
        """The symbol that an address is in: of several at one address the first in the table.

        Mirrors: kernel/kallsyms.c:get_symbol_pos (v6.1)
        """
        if not self.start <= address < self.end:
            return self._in_modules(address)
        addresses = self._table.addresses
        index = bisect_right(addresses, address) - 1
        if index < 0:
            return None
        first = bisect_left(addresses, addresses[index])
        symbol = self._met.get(first) or self._symbol(first)
        return Location(symbol, address - symbol.address)

    # What it has of modules

    def _of_modules(self, name: str) -> tuple[Symbol, ...]:  # noqa: ARG002 - it has none
        return ()

    def _in_modules(self, address: int) -> Location | None:  # noqa: ARG002 - it has none
        return None

    def kallsyms_text(self, zero_addresses: bool = False) -> str:
        """The text of /proc/kallsyms; readers without CAP_SYSLOG see zeros for addresses.

        Mirrors: kernel/kallsyms.c:s_show (v6.1)
        """
        return "".join(
            f"{0 if zero_addresses else symbol.address:0{self.digits}x} {symbol.type} {symbol.name}\n"
            for symbol in self._each()
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
            letter = (
                "A"
                if section is percpu
                else nm_letter(symbol.binding, symbol.type, section.flags, section.type)
            )
            yield Symbol(symbol.name, symbol.value, letter)


def _is_kallsyms_symbol(symbol: ElfSymbol) -> bool:
    """Mirrors: scripts/kallsyms.c:is_ignored_symbol (v6.1)"""
    if not symbol.name or symbol.section in (SHN_UNDEF, SHN_ABS):
        return False
    if symbol.type in (STT_SECTION, STT_FILE) or symbol.name in _OWN_TABLES:
        return False
    return not symbol.name.startswith(("$", ".L"))


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


def address_of(symbols: Kallsyms, name: str) -> int:
    """Address of a symbol that the host cannot do without. Raises: KernelError ENOEXEC."""
    address = symbols.lookup_name(name)
    if address is None:
        raise KernelError(errno.ENOEXEC, f"the kernel image has no symbol {name}")
    return address
