"""LinuxMemory: the guest's RAM, accessed through the page tables that a CPU would walk."""

from __future__ import annotations

import mmap
import struct

from emulated_kernel.machine.memory.paging import LARGE_PAGE_SIZE, PageTables, X86PageTables
from emulated_kernel.machine.traps.trap import MemoryFault

PAGE = 4096
FRAME = 0x000FFFFFFFFFF000
PRESENT = 1
WRITABLE = 2
_LARGE = 0x80
_NO_EXECUTE = 1 << 63
_SHIFTS = (39, 30, 21, 12)
_HALF = 1 << 47
_WORD = 1 << 64
_CANONICAL = _WORD - _HALF
"""Lowest address of the kernel's half of the address space.

Addresses in range(_HALF, _CANONICAL) are not canonical.
"""
_KERNEL_DATA = slice(273, 508)
"""Indexes of the root table's entries for the kernel's data: direct map, vmalloc's memory, struct pages.

Page tables of user mode have only one of these entries: that of the direct map, for the per-CPU TSS.
"""


class LinuxMemory:
    """Reads and writes the guest's RAM, which is one mapping in the host, by virtual addresses.

    In the methods, `root` is the physical address of page tables, and `va` a virtual address. If a page table
    entry leads outside of RAM, its pages count as not mapped.
    Raises: MemoryFault (the address is not mapped).
    """

    tables: type[PageTables] = X86PageTables
    """Subclass of PageTables for the format of the guest's page tables."""
    owned = PRESENT | WRITABLE
    """Mask of bits. If all are set in the page table entry of a user page, no other task shares the page."""
    shifts: tuple[int, ...] = _SHIFTS
    """For each level of page tables, from the top: binary logarithm of the size that an entry maps."""
    frame_shift = 0
    """Number of bits by which a page table entry is shifted left before it is masked to an address."""
    frame = FRAME
    """Mask of the physical address in a page table entry, after the shift by `frame_shift`."""

    def __init__(self, ram: mmap.mmap) -> None:
        self.ram = ram
        self.words = memoryview(ram).cast("Q")

    def walk(self, root: int, va: int) -> tuple[int, int, int] | None:
        """Return (physical address, last page table entry, size in bytes of the page) of the address `va`.

        Return None if `va` is not mapped.
        """
        if _HALF <= va < _CANONICAL or not 0 <= va < _WORD:
            return None
        table = root & FRAME
        for shift in _SHIFTS:
            slot = table + (va >> shift & 511) * 8 >> 3
            entry = self.words[slot] if slot < len(self.words) else 0
            if not entry & PRESENT:
                return None
            if shift == 12 or (shift < 39 and entry & _LARGE):
                inside = (1 << shift) - 1
                pa = entry & FRAME & ~inside | va & inside
                return (pa, entry, inside + 1) if pa < len(self.ram) else None
            table = entry & FRAME
        return None

    def kernel_root(self, root: int) -> int:
        """Return the physical address of the page tables that map kernel addresses.

        `root`: physical address of any task's page tables. On x86 and RISC-V these tables map the kernel
        too, so the result is `root`.
        """
        return root

    def is_writable(self, entry: int) -> bool:
        """Return True if the page that the page table entry `entry` maps can be written."""
        return bool(entry & WRITABLE)

    def is_executable(self, entry: int) -> bool:
        """Return True if the code in the page that the page table entry `entry` maps can be executed."""
        return not entry & _NO_EXECUTE

    def forbid_execution(self, root: int, data: range) -> None:
        """Make the large pages that are completely in `data` not executable.

        `root`: physical address of the page tables. `data`: virtual addresses. The caller must drop the CPU's
        cached address translations afterwards.
        """
        start = -(-data.start // LARGE_PAGE_SIZE) * LARGE_PAGE_SIZE
        for va in range(start, data.stop - LARGE_PAGE_SIZE + 1, LARGE_PAGE_SIZE):
            slot, size = self.last(root, va)
            if size == LARGE_PAGE_SIZE and self.words[slot] & PRESENT:
                self.words[slot] |= _NO_EXECUTE

    def maps_kernel_data(self, root: int) -> bool:
        """Return True if the page tables at `root` map the kernel's data.

        Return False for tables that a task uses only in user mode (page table isolation).
        """
        return sum(map(bool, self.words[root >> 3 :][_KERNEL_DATA])) > 1

    def last(self, root: int, va: int) -> tuple[int, int]:
        """Return (index, size) of the last page table entry in a walk for `va`; it may be not present.

        index: index of the entry among the 8-byte words of RAM. size: bytes that the entry maps, or would map
        if it were present.
        """
        table = self.top_table(root, va)
        slot = 0
        size = 0
        for shift in self.shifts:
            slot = table + (va >> shift & 511) * 8 >> 3
            size = 1 << shift
            if slot >= len(self.words):
                raise MemoryFault(va, "page tables outside of RAM")
            entry = self.words[slot]
            if not entry & PRESENT or self.maps_page(entry, shift):
                break
            table = entry << self.frame_shift & self.frame
        return slot, size

    def top_table(self, root: int, va: int) -> int:  # noqa: ARG002 - used on arm64
        """Return the physical address of the table in which a walk for `va` begins."""
        return root & FRAME

    def maps_page(self, entry: int, shift: int) -> bool:
        """Return True if a present entry that covers 2**shift bytes maps a page and not another table."""
        return shift < _SHIFTS[0] and bool(entry & _LARGE)

    def translate(self, root: int, va: int) -> int:
        """Return the physical address of the virtual address `va`."""
        found = self.walk(root, va)
        if found is None:
            raise MemoryFault(va)
        return found[0]

    def read(self, root: int, va: int, size: int) -> bytes:
        """Return `size` bytes at the virtual address `va`."""
        parts = []
        while size:
            here = min(size, PAGE - va % PAGE)
            at = self.translate(root, va)
            parts.append(self.ram[at : at + here])
            va = va + here
            size = size - here
        return b"".join(parts)

    def write(self, root: int, va: int, data: bytes) -> None:
        """Write bytes to virtual memory, even to read-only pages."""
        while data:
            here = min(len(data), PAGE - va % PAGE)
            at = self.translate(root, va)
            self.ram[at : at + here] = data[:here]
            va = va + here
            data = data[here:]

    def read_word(self, root: int, va: int) -> int:
        """Return the u64 at the virtual address `va`, which need not be aligned."""
        return int(struct.unpack("<Q", self.read(root, va, 8))[0])

    def close(self) -> None:
        """Release the view of RAM's mapping, so that the mapping can be closed."""
        self.words.release()
