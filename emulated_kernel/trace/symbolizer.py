"""Symbols for printing many records: the kernel's table, with remembered answers."""

from __future__ import annotations

from functools import cache

from emulated_kernel.trace.ports import SymbolLocation, TraceSymbols


class CachedSymbols:
    """TraceSymbols that looks an address up once; good as long as no symbol comes or goes."""

    def __init__(self, symbols: TraceSymbols) -> None:
        self._symbols = symbols
        self._lookup = cache(symbols.lookup)

    def lookup(self, address: int) -> SymbolLocation | None:
        """The symbol that `address` lies in."""
        return self._lookup(address)

    def lookup_name(self, name: str) -> int | None:
        """The address of a symbol."""
        return self._symbols.lookup_name(name)

    def count_name(self, name: str) -> int:
        """How many symbols are called `name`."""
        return self._symbols.count_name(name)

    def has_module(self, name: str) -> bool:
        """Whether a module of that name is loaded."""
        return self._symbols.has_module(name)

    def has_fentry(self, start: int, end: int) -> bool:
        """Whether an fentry site lies in [start, end]."""
        return self._symbols.has_fentry(start, end)

    def is_return_trampoline(self, address: int) -> bool:
        """Whether it is where hooked functions return to."""
        return self._symbols.is_return_trampoline(address)
