"""The symbol table as each layer asks for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Protocol

from emulated_kernel.arch.analysed import Symbols
from emulated_kernel.trace.ports import SymbolLocation

TRAMPOLINE_NAME = "arch_rethook_trampoline"


class ImageKallsyms(Symbols, Protocol):
    def count_name(self, name: str) -> int: ...

    def has_module(self, name: str) -> bool: ...


class FentrySites(Protocol):
    @property
    def mcount(self) -> Collection[int]: ...


class ReturnTrampoline(Protocol):
    """What hooked functions return to."""

    def is_one(self, address: int, /) -> bool: ...

    def locate(self, address: int, /) -> tuple[int, int] | None: ...


class KernelSymbols:
    """kallsyms for trace events and for the printing of addresses."""

    def __init__(self, kallsyms: ImageKallsyms, image: FentrySites, trampoline: ReturnTrampoline) -> None:
        self._kallsyms = kallsyms
        self._image = image
        self._trampoline = trampoline
        self._freed: dict[str, list[SymbolLocation]] = {}
        self.tables_changed()

    def tables_changed(self) -> None:
        """A module came or went."""
        self._fentry_sites = sorted(self._image.mcount)

    def lookup_name(self, name: str) -> int | None:
        """The address of a symbol; of MODULE:NAME too."""
        return self._kallsyms.lookup_name(name)

    def count_name(self, name: str) -> int:
        return self._kallsyms.count_name(name)

    def lookup(self, address: int) -> SymbolLocation | None:
        where = self._kallsyms.lookup(address)
        if where is None:
            return self._lookup_trampoline(address) or self._lookup_freed(address)
        symbol = where.symbol
        return SymbolLocation(symbol.name, symbol.address, symbol.size, where.offset, where.module)

    def _lookup_trampoline(self, address: int) -> SymbolLocation | None:
        found = self._trampoline.locate(address)
        if found is None:
            return None
        start, size = found
        return SymbolLocation(TRAMPOLINE_NAME, start, size, address - start)

    def remember(self, module: str, functions: Iterable[SymbolLocation]) -> None:
        """Functions of a module's init text, which was traced and is freed: their addresses keep these names.

        Mirrors: kernel/trace/ftrace.c:save_ftrace_mod_rec (v6.1).
        """
        self._freed[module] = list(functions)

    def forget(self, module: str) -> None:
        """The module goes."""
        self._freed.pop(module, None)

    def _lookup_freed(self, address: int) -> SymbolLocation | None:
        """Mirrors: kernel/trace/ftrace.c:ftrace_mod_address_lookup (v6.1)."""
        for functions in self._freed.values():
            for each in functions:
                if each.start <= address < each.start + each.size:
                    return replace(each, offset=address - each.start)
        return None

    def has_module(self, name: str) -> bool:
        return self._kallsyms.has_module(name)

    def has_fentry(self, start: int, end: int) -> bool:
        at = bisect_left(self._fentry_sites, start)
        return at < len(self._fentry_sites) and self._fentry_sites[at] <= end

    def is_return_trampoline(self, address: int) -> bool:
        """Whether it is where hooked functions return to."""
        return self._trampoline.is_one(address)
