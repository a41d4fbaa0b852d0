"""Arm64Memory: the RAM of an arm64 guest, in which kernel and user addresses have separate page tables."""

from __future__ import annotations

import ctypes
import mmap

from emulated_kernel.guests.linux.pc.ram import PRESENT, LinuxMemory
from emulated_kernel.machine.memory.paging import Arm64PageTables

_READ_ONLY = 1 << 7
_NO_KERNEL_EXEC = 1 << 53
_OWNED = 1 << 51
"""Bit of a page table entry by which Linux marks a page that its task may write: PTE_WRITE."""
_TABLE = 2
_SHIFTS = (39, 30, 21, 12)
_HALF = 1 << 48
_WORD = 1 << 64
_FRAME = 0x0000FFFFFFFFF000


class Arm64Memory(LinuxMemory):
    """Reads and writes RAM by virtual addresses of 48 bits; see LinuxMemory.

    The methods' parameter `root` is the physical address of the page tables for user addresses. Kernel
    addresses are looked up in the page tables to which the CPU's register ttbr1_el1 points.
    """

    tables = Arm64PageTables
    owned = PRESENT | _OWNED
    frame = _FRAME
    shifts = _SHIFTS

    def __init__(self, ram: mmap.mmap) -> None:
        super().__init__(ram)
        self.kernel_tables = memoryview(ctypes.c_uint64()).cast("B").cast("Q")
        """View of ttbr1_el1, which contains the physical address of the kernel's page tables.

        At first it is a view of the value 0. The machine replaces it by a view of the CPU's register.
        """

    def kernel_root(self, root: int) -> int:  # noqa: ARG002 - both halves of other processors share a root
        """Return the physical address of the kernel's page tables, from ttbr1_el1; `root` is ignored."""
        return self.kernel_tables[0] & _FRAME

    def is_writable(self, entry: int) -> bool:
        """Return True if the page that the page table entry `entry` maps can be written."""
        return not entry & _READ_ONLY

    def is_executable(self, entry: int) -> bool:
        """Return True if the kernel can execute code in the page that the page table entry `entry` maps."""
        return not entry & _NO_KERNEL_EXEC

    def walk(self, root: int, va: int) -> tuple[int, int, int] | None:
        """Return (physical address, last page table entry, page size) of address `va`; see LinuxMemory."""
        if _HALF <= va < _WORD - _HALF or not 0 <= va < _WORD:
            return None
        table = (self.kernel_tables[0] if va >> 63 else root) & _FRAME
        for shift in _SHIFTS:
            slot = table + (va >> shift & 511) * 8 >> 3
            entry = self.words[slot] if slot < len(self.words) else 0
            if not entry & PRESENT:
                return None
            table = entry & _FRAME
            if shift == 12 or not entry & _TABLE:
                inside = (1 << shift) - 1
                pa = table & ~inside | va & inside
                return (pa, entry, inside + 1) if pa < len(self.ram) else None
        return None

    def top_table(self, root: int, va: int) -> int:
        return (self.kernel_tables[0] if va >> 63 else root) & _FRAME

    def maps_page(self, entry: int, shift: int) -> bool:  # noqa: ARG002 - equal at all levels
        return not entry & _TABLE
