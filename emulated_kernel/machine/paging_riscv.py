"""Sv39 page tables of riscv64."""

from __future__ import annotations

from emulated_kernel.machine.paging import PageTables, Prot


class Sv39PageTables(PageTables):
    """3 levels, 39-bit addresses. Accessed and dirty are preset: the walker then never writes entries."""

    shifts = (30, 21, 12)
    page_step = 1 << 10
    _VALID, _READ, _WRITE, _EXEC, _USER, _ACCESSED_DIRTY = 1, 2, 4, 8, 16, 0xC0
    _RIGHTS = _READ | _WRITE | _EXEC

    def leaf(self, pa: int, prot: Prot, large: bool) -> int:  # noqa: ARG002 - the level says it
        """Entry that maps a page."""
        bits = self._VALID | self._ACCESSED_DIRTY
        bits |= self._READ if prot & Prot.READ else 0
        bits |= self._WRITE if prot & Prot.WRITE else 0
        bits |= self._EXEC if prot & Prot.EXEC else 0
        bits |= self._USER if prot & Prot.USER else 0
        return pa >> 2 | bits

    def branch(self, pa: int, shift: int) -> int:  # noqa: ARG002 - all levels are alike
        """Entry that points to the next table: one without rights."""
        return pa >> 2 | self._VALID

    def target(self, entry: int) -> int:
        """Physical address in an entry."""
        return entry >> 10 << 12

    def is_leaf(self, entry: int, shift: int) -> bool:  # noqa: ARG002 - all levels are alike
        """Whether the entry maps a page."""
        return bool(entry & self._RIGHTS)

    def shrink(self, entry: int) -> int:
        """The 4 KiB leaf for the first page of a 2 MiB leaf: the same entry, a level below."""
        return entry
