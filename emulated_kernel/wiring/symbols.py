"""The symbol table as each layer asks for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from emulated_kernel.trace.ports import SymbolLocation


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


class ImageKallsyms(Protocol):
    def lookup_name(self, name: str) -> int | None: ...

    def count_name(self, name: str) -> int: ...

    def lookup(self, address: int) -> ImageLocation | None: ...


class KernelSymbols:
    """kallsyms for trace events and for the printing of addresses."""

    def __init__(self, kallsyms: ImageKallsyms, fentry_sites: Collection[int]) -> None:
        self._kallsyms = kallsyms
        self._fentry_sites = sorted(fentry_sites)

    def lookup_name(self, name: str) -> int | None:
        """The address of a symbol; of MODULE:NAME too."""
        return self._kallsyms.lookup_name(name)

    def count_name(self, name: str) -> int:
        return self._kallsyms.count_name(name)

    def lookup(self, address: int) -> SymbolLocation | None:
        where = self._kallsyms.lookup(address)
        if where is None:
            return None
        symbol = where.symbol
        return SymbolLocation(symbol.name, symbol.address, symbol.size, where.offset)

    def has_module(self, name: str) -> bool:  # noqa: ARG002
        """No module can be loaded into this kernel."""
        return False

    def has_fentry(self, start: int, end: int) -> bool:
        return any(start <= site <= end for site in self._fentry_sites)

    def is_return_trampoline(self, address: int) -> bool:  # noqa: ARG002
        """This kernel has no return hooks."""
        return False
