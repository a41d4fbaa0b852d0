"""Sv39Memory: the RAM of a RISC-V guest, accessed through page tables of three levels."""

from __future__ import annotations

from emulated_kernel.guests.linux.pc.ram import FRAME, PRESENT, LinuxMemory
from emulated_kernel.machine.memory.paging import Sv39PageTables

_WRITE = 4
_EXECUTE = 8
_RIGHTS = 0xE
"""Mask of the rights in a page table entry that maps a page: read, write, execute."""
_SHIFTS = (30, 21, 12)
_HALF = 1 << 38
_WORD = 1 << 64


class Sv39Memory(LinuxMemory):
    """Reads and writes RAM by virtual addresses of 39 bits."""

    tables = Sv39PageTables
    owned = PRESENT | _WRITE
    shifts = _SHIFTS
    frame_shift = 2

    def is_writable(self, entry: int) -> bool:
        """Return True if the page that the page table entry `entry` maps can be written."""
        return bool(entry & _WRITE)

    def is_executable(self, entry: int) -> bool:
        """Return True if the code in the page that the page table entry `entry` maps can be executed."""
        return bool(entry & _EXECUTE)

    def walk(self, root: int, va: int) -> tuple[int, int, int] | None:
        """Return (physical address, last page table entry, page size) of address `va`; see LinuxMemory."""
        if _HALF <= va < _WORD - _HALF or not 0 <= va < _WORD:
            return None
        table = root
        for shift in _SHIFTS:
            slot = table + (va >> shift & 511) * 8 >> 3
            entry = self.words[slot] if slot < len(self.words) else 0
            if not entry & PRESENT:
                return None
            table = entry << 2 & FRAME
            if entry & _RIGHTS:
                inside = (1 << shift) - 1
                pa = table & ~inside | va & inside
                return (pa, entry, inside + 1) if pa < len(self.ram) else None
        return None

    def maps_page(self, entry: int, shift: int) -> bool:  # noqa: ARG002 - equal at all levels
        return bool(entry & _RIGHTS)
