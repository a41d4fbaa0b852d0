"""Kallsyms: look-up of a kernel's symbols by name and by address, as /proc/kallsyms and %pS do."""

from __future__ import annotations

import errno
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field, fields

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
"""Names of the kallsyms tables themselves, which are not listed in kallsyms."""
TEXT_TYPES = "tTwW"
"""Type letters (as nm prints them) of symbols that are code."""
_LINES_AT_ONCE = 256
"""Number of lines of /proc/kallsyms whose names are decoded together."""
_REMEMBERED = 8192
"""Maximum number of Symbol objects in the cache: all symbols of a kernel would take tens of MiB."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A kernel symbol. `type` is the letter that nm prints.

    `size` is the distance in bytes to the next higher symbol.
    """

    name: str
    address: int = field(metadata=ADDRESS)
    type: str
    size: int = field(default=0, metadata=ADDRESS)

    def __str__(self) -> str:
        return self.name

    @property
    def is_text(self) -> bool:
        """Whether the symbol is code."""
        return self.type in TEXT_TYPES


def is_mapping_symbol(name: str) -> bool:
    """Return True if a symbol called `name` only marks an address in a function, and names no function.

    Assemblers for RISC-V and ARM create symbols of this kind, and some linkers keep them.
    Mirrors: include/linux/module_symbol.h:is_mapping_symbol (v6.12).
    """
    return name.startswith((".L", "L0", "$"))


@dataclass(frozen=True, slots=True)
class Location:
    """A kernel address, as a symbol and an offset in bytes from it."""

    symbol: Symbol
    offset: int = field(metadata=ADDRESS)
    module: str | None = None
    """Name of the symbol's module; None for the kernel itself."""

    @property
    def name(self) -> str:
        """The symbol's name."""
        return self.symbol.name

    def __str__(self) -> str:
        module = f" [{self.module}]" if self.module else ""
        return f"{self.symbol.name}+{self.offset:#x}/{self.symbol.size:#x}{module}"


@dataclass(frozen=True, slots=True)
class SymbolTable:
    """Table of symbols, sorted by address, in a few arrays that can be mapped from a file.

    Arrays save memory: a distribution's kernel has more than a hundred thousand symbols.
    """

    addresses: Sequence[int]
    types: Sequence[int]
    """The letter that nm prints for each symbol, as one byte."""
    starts: Sequence[int]
    """Offset of each symbol's name in `names`, and as the last item the offset after the last name."""
    names: bytes | memoryview
    """All names, each followed by a zero byte."""
    by_name: Sequence[int]
    """Indices of the symbols, sorted by name and then by address."""

    @classmethod
    def of(cls, symbols: Sequence[Symbol]) -> Self:
        """Return the table of symbols that are already sorted by address."""
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
        """Return the table whose arrays are `parts`, a result of parts().

        Raises: KeyError, TypeError, ValueError (an array is missing or damaged).
        """
        found = cls(
            parts["addresses"].cast("Q"),
            parts["types"],
            parts["starts"].cast("I"),
            parts["names"],
            parts["by_name"].cast("I"),
        )
        count = len(found.addresses)
        if {len(found.types), len(found.starts) - 1, len(found.by_name)} != {count}:
            raise ValueError("symbol table: the lengths of its parts differ")
        return found

    def parts(self) -> dict[str, bytes]:
        """Return the table's arrays as bytes: field name -> array."""
        return {field.name: bytes(memoryview(getattr(self, field.name))) for field in fields(self)}

    def name(self, index: int) -> bytes:
        """Return the name of the symbol with the index `index` in the table."""
        return bytes(self.names[self.starts[index] : self.starts[index + 1] - 1])

    def named(self, name: str) -> Sequence[int]:
        """Return the indices in the table of all symbols called `name`, sorted by address."""
        wanted = name.encode("utf-8", "replace")
        last = bisect_left(self.by_name, wanted, key=self.name)
        first = last
        while last < len(self.by_name) and self.name(self.by_name[last]) == wanted:
            last += 1
        return self.by_name[first:last]

    def ending(self, pattern: str) -> Iterator[int]:
        """Yield, in ascending order, the indices of symbols whose names end with a match of `pattern`.

        `pattern` is a regular expression.
        """
        for match in re.finditer(pattern.encode() + b"(?=\\0)", self.names):
            yield bisect_right(self.starts, match.start()) - 1


class Kallsyms:
    """The symbols of one kernel.

    lookup() finds addresses from `start` (_stext) up to `end` (_end), exclusive.

    Mirrors: kernel/kallsyms.c (v6.1).
    """

    _last: tuple[int, Location | None] = (-1, None)
    """Cache: address and result of the last lookup(). The checks of one probe look up the same address."""

    def __init__(
        self, symbols: Iterable[Symbol], start: int = 0, end: int = 1 << 64, word_size: int = 8
    ) -> None:
        self.digits = 2 * word_size
        """Number of hexadecimal digits of an address."""
        self.start = start
        self.end = end
        self._table = SymbolTable.of(sorted(symbols, key=_order))
        self._met: dict[int, Symbol] = {}
        """Cache of symbols that were looked up: index in the table -> symbol."""
        self._numbers: dict[str, Sequence[int]] = {}
        """Cache of names that were looked up: name -> indices in the table."""

    @classmethod
    def of_table(cls, table: SymbolTable, start: int, end: int) -> Self:
        """Return a Kallsyms object that uses an existing table; `start` and `end` as for the constructor."""
        found = cls((), start, end)
        found._table = table
        return found

    @property
    def table(self) -> SymbolTable:
        """The table of all symbols, which can be stored in a file."""
        return self._table

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """All symbols, sorted by address. Each access makes new Symbol objects."""
        return tuple(self._each())

    def _each(self) -> Iterator[Symbol]:
        table = self._table
        # One pass over all symbols takes a third of the time of a _make() for each.
        names = self._names_of(slice(0, len(self)))
        ends = self._ends()
        for name, address, letter, end in zip(names, table.addresses, table.types, ends, strict=True):
            yield Symbol(name, address, chr(letter), max(end - address, 0))

    def _names_of(self, part: slice) -> list[str]:
        """Return the names of the symbols whose indices are in the slice `part`."""
        table = self._table
        names = table.names[table.starts[part.start] : table.starts[part.stop]]
        return bytes(names).decode("utf-8", "replace").split("\0")[:-1]

    def _ends(self) -> list[int]:
        """Return for each symbol the address of the next higher symbol, or `end` if there is none."""
        ends: list[int] = []
        following = self.end
        higher = self.end
        for address in reversed(self._table.addresses):
            if address != following:
                higher = following
                following = address
            ends.append(higher)
        ends.reverse()
        return ends

    def _symbol(self, index: int) -> Symbol:
        found = self._met.get(index)
        if found is None:
            if len(self._met) == _REMEMBERED:
                self._met.clear()
            found = self._make(index)
            self._met[index] = found
        return found

    def _named(self, name: str) -> Sequence[int]:
        found = self._numbers.get(name, ())
        if not found and (found := self._table.named(name)):
            self._numbers[name] = found
        return found

    def _make(self, index: int) -> Symbol:
        addresses = self._table.addresses
        address = addresses[index]
        following = bisect_right(addresses, address, index)
        end = addresses[following] if following < len(addresses) else self.end
        return Symbol(
            self._table.name(index).decode("utf-8", "replace"),
            address,
            chr(self._table.types[index]),
            max(end - address, 0),
        )

    def __len__(self) -> int:
        return len(self._table.addresses)

    def lookup_name(self, name: str) -> int | None:
        """Return the address of the first symbol called `name`, or None if there is none.

        Mirrors: kernel/kallsyms.c:kallsyms_lookup_name (v6.1).
        """
        found = self._named(name)
        if found:
            return self._table.addresses[found[0]]
        of_modules = self._of_modules(name)
        return of_modules[0].address if of_modules else None

    def ending(self, pattern: str) -> Iterator[int]:
        """Return the addresses of symbols whose names end with a match of `pattern`, a regular expression."""
        return (self._table.addresses[index] for index in self._table.ending(pattern))

    def has_module(self, name: str) -> bool:  # noqa: ARG002 - this class has no modules
        """Return True if a module called `name` is loaded.

        This class knows no modules and returns False; LiveKallsyms knows them.
        """
        return False

    def count_name(self, name: str) -> int:
        """Return the number of symbols called `name`, in the kernel and its modules."""
        return len(self._named(name)) + len(self._of_modules(name))

    def count_in_kernel(self, name: str) -> int:
        """Return the number of symbols called `name` in the kernel itself, without modules."""
        return len(self._named(name))

    def by_name(self, name: str) -> tuple[Symbol, ...]:
        """Return all symbols called `name`: the kernel's, sorted by address, and then those of modules."""
        own = [self._symbol(index) for index in self._named(name)]
        return (*own, *self._of_modules(name))

    def names_at(self, address: int) -> list[str]:
        """Return the names of the kernel's symbols at `address`, in the order of the table."""
        addresses = self._table.addresses
        first = bisect_left(addresses, address)
        found = range(first, bisect_right(addresses, address, first))
        return [self._table.name(index).decode("utf-8", "replace") for index in found]

    def lookup(self, address: int) -> Location | None:
        """Return the symbol that contains `address`, and the offset in this symbol; None if there is none.

        If several symbols have one address, return the first in the table.

        Mirrors: kernel/kallsyms.c:get_symbol_pos (v6.1).
        """
        if not self.start <= address < self.end:
            return self._in_modules(address)
        last, found = self._last
        if address == last:
            return found
        addresses = self._table.addresses
        index = bisect_right(addresses, address) - 1
        if index < 0:
            return None
        first = bisect_left(addresses, addresses[index])
        symbol = self._met.get(first) or self._symbol(first)
        found = Location(symbol, address - symbol.address)
        self._last = address, found
        return found

    def locate_each(self, addresses: Iterable[int]) -> Iterator[tuple[str, int, str | None] | None]:
        """Yield name, offset and module of each address, as lookup() finds them; `addresses` must ascend.

        Yield None for an address in no symbol. The module is None for a symbol of the kernel itself. One pass
        over the table takes a tenth of the time of a lookup() for each function of a kernel.
        """
        symbols = zip(self._names_of(slice(0, len(self))), self._table.addresses, strict=True)
        following = next(symbols, None)
        name = ""
        start = -1
        for address in addresses:
            while following is not None and following[1] <= address:
                # The first of several symbols at one address counts.
                if following[1] != start:
                    name, start = following
                following = next(symbols, None)
            if not self.start <= address < self.end:
                where = self._in_modules(address)
                yield None if where is None else (where.name, where.offset, where.module)
            else:
                yield None if start < 0 else (name, address - start, None)

    # Overridden by LiveKallsyms, which knows modules.

    def _of_modules(self, name: str) -> tuple[Symbol, ...]:  # noqa: ARG002 - this class has no modules
        return ()

    def _in_modules(self, address: int) -> Location | None:  # noqa: ARG002 - this class has no modules
        return None

    def kallsyms_text(self, zero_addresses: bool = False) -> str:
        """Return the whole text of /proc/kallsyms: all lines of kallsyms_lines().

        `zero_addresses`: show 0 in place of addresses, because the reader has no CAP_SYSLOG.
        """
        return "".join(self.kallsyms_lines(0, zero_addresses=zero_addresses))

    @property
    def line_count(self) -> int:
        """Number of lines of /proc/kallsyms."""
        return len(self)

    def kallsyms_lines(self, start: int, *, zero_addresses: bool) -> Iterator[str]:
        """Yield the lines of /proc/kallsyms, from the line with index `start` on.

        `zero_addresses`: show 0 in place of addresses, because the reader has no CAP_SYSLOG.
        Mirrors: kernel/kallsyms.c:s_show (v6.1).
        """
        table = self._table
        count = len(table.addresses)
        for first in range(start, count, _LINES_AT_ONCE):
            part = slice(first, min(first + _LINES_AT_ONCE, count))
            names = self._names_of(part)
            for address, letter, name in zip(table.addresses[part], table.types[part], names, strict=True):
                shown = 0 if zero_addresses else address
                yield f"{shown:0{self.digits}x} {chr(letter)} {name}\n"


def elf_symbols(elf: ElfFile) -> Iterator[Symbol]:
    """Yield those symbols in a linked kernel's ELF file that kallsyms lists; their sizes are not set.

    Mapping symbols, the compiler's local labels, and file and section symbols are left out.
    Per-CPU variables have their offset in the per-CPU area as address and are absolute, as in Linux.
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
    """Return True if kallsyms lists `symbol`. Mirrors: scripts/kallsyms.c:is_ignored_symbol (v6.1)."""
    if not symbol.name or symbol.section in (SHN_UNDEF, SHN_ABS):
        return False
    if symbol.type in (STT_SECTION, STT_FILE) or symbol.name in _OWN_TABLES:
        return False
    return not symbol.name.startswith(("$", ".L"))


def _order(symbol: Symbol) -> tuple[int, bool, bool, int, str]:
    """Return the key by which symbols are sorted: first the address.

    At one address, symbols that are not weak come first. After that, symbols that the linker script doesn't
    define come first, and then names with fewer underscores.

    Mirrors: scripts/kallsyms.c:compare_symbols (v6.1).
    """
    name = symbol.name
    underscores = len(name) - len(name.lstrip("_"))
    return symbol.address, symbol.type in "wW", _is_linker_made(name), underscores, name


def _is_linker_made(name: str) -> bool:
    """Return True if the linker script may define the symbol `name`.

    Mirrors: scripts/kallsyms.c:may_be_linker_script_provide_symbol (v6.1).
    """
    if len(name) < 8 or not name.startswith("__"):
        return False
    return name.startswith(("__start_", "__stop_", "__end_")) or name.endswith(("_start", "_end"))


def address_of(symbols: Kallsyms, name: str) -> int:
    """Return the address of the symbol `name`. Raises: KernelError ENOEXEC (no such symbol)."""
    address = symbols.lookup_name(name)
    if address is None:
        raise KernelError(errno.ENOEXEC, f"the kernel image has no symbol {name}")
    return address
