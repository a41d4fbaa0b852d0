"""What the machine needs of a kernel image, as protocols: any loader will do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class SymbolTable(Protocol):
    """Symbols by name."""

    def lookup_name(self, name: str) -> int | None:
        """Address of a symbol, None if there is none."""


class GuestImage(Protocol):
    """A linked kernel."""

    @property
    def arch(self) -> str:
        """As in MachineConfig.arch."""

    @property
    def entry(self) -> int:
        """Where the CPU starts."""

    @property
    def segments(self) -> Sequence[tuple[int, bytes, int, int]]:
        """(virtual address, data, size in memory, rights as paging.Prot)."""

    @property
    def kallsyms(self) -> SymbolTable:
        """Its symbols."""

    @property
    def abi(self) -> Mapping[str, int]:
        """The guest's __guest_abi."""

    @property
    def ex_table(self) -> Iterable[tuple[int, int]]:
        """(instruction that may fault, where to go on then)."""
