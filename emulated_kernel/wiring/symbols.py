"""The symbol table as each layer asks for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import Protocol

from emulated_kernel.trace.ports import SymbolLocation

TRAMPOLINE_NAME = "arch_rethook_trampoline"


class ImageSymbol(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...


class ImageLocation(Protocol):
    @property
    def symbol(self) -> ImageSymbol: ...

    @property
    def offset(self) -> int: ...

    @property
    def module(self) -> str | None: ...


class ImageKallsyms(Protocol):
    def lookup_name(self, name: str) -> int | None: ...

    def count_name(self, name: str) -> int: ...

    def lookup(self, address: int) -> ImageLocation | None: ...

    def has_module(self, name: str) -> bool: ...


class FentrySites(Protocol):
    @property
    def mcount(self) -> Collection[int]: ...


class ReturnTrampoline(Protocol):
    """What hooked functions return to; all zero before any was hooked."""

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...


class KernelSymbols:
    """kallsyms for trace events and for the printing of addresses."""

    def __init__(self, kallsyms: ImageKallsyms, image: FentrySites, trampoline: ReturnTrampoline) -> None:
        self._kallsyms = kallsyms
        self._image = image
        self._trampoline = trampoline
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
            return self._lookup_trampoline(address)
        symbol = where.symbol
        return SymbolLocation(symbol.name, symbol.address, symbol.size, where.offset, where.module)

    def _lookup_trampoline(self, address: int) -> SymbolLocation | None:
        start, size = self._trampoline.address, self._trampoline.size
        if not start <= address < start + size:
            return None
        return SymbolLocation(TRAMPOLINE_NAME, start, size, address - start)

    def has_module(self, name: str) -> bool:
        return self._kallsyms.has_module(name)

    def has_fentry(self, start: int, end: int) -> bool:
        at = bisect_left(self._fentry_sites, start)
        return at < len(self._fentry_sites) and self._fentry_sites[at] <= end

    def is_return_trampoline(self, address: int) -> bool:
        """Whether it is where hooked functions return to."""
        return address != 0 and address == self._trampoline.address
