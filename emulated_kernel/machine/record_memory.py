"""RecordMemory: what handlers in guest code write to, beside RAM: small cells, and pages for records."""

from __future__ import annotations

import mmap
from contextlib import suppress

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.machine.layout import RECORD_CELLS_SIZE, Layout
from emulated_kernel.machine.memory import Memory
from emulated_kernel.machine.paging import Prot
from emulated_kernel.machine.pool import UnitPool

CELL_UNIT = 16
"""Bytes; allocations of cells are multiples of it, and aligned to it."""


def extra_size(layout: Layout) -> int:
    """Bytes of physical memory behind RAM that this needs; the host gives pages to what is touched alone."""
    return RECORD_CELLS_SIZE + layout.record_pages_size


class RecordMemory:
    """Two windows of the guest's address space, readable and writable, never executable.

    Cells lie within reach of a 32-bit displacement; pages need a pointer. The guest's page allocator is told
    of neither.
    """

    def __init__(self, memory: Memory, layout: Layout) -> None:
        """`memory` has extra_size(layout) bytes behind its RAM."""
        self._memory = memory
        rights = Prot.READ | Prot.WRITE
        cells, pages, pages_size = layout.record_cells, layout.record_pages, layout.record_pages_size
        memory.map(cells, memory.ram_size, RECORD_CELLS_SIZE, rights)
        memory.map(pages, memory.ram_size + RECORD_CELLS_SIZE, pages_size, rights)
        self._cells = UnitPool(cells, RECORD_CELLS_SIZE, CELL_UNIT)
        self._pages = UnitPool(pages, pages_size, PAGE_SIZE)

    def alloc_cells(self, size: int) -> int:
        """Address of `size` bytes, zeroed. Raises: HardwareError: none left."""
        va = self._cells.alloc(size)
        self._memory.write(va, bytes(size))
        return va

    def free_cells(self, va: int) -> None:
        """Give back what `alloc_cells` returned. Raises: HardwareError: not allocated."""
        self._cells.free(va)

    def alloc_pages(self, size: int) -> int:
        """Address of whole pages, of any content. Raises: HardwareError: none left."""
        return self._pages.alloc(size)

    def free_pages(self, va: int) -> None:
        """Give back what `alloc_pages` returned, and the host its memory.

        Raises: HardwareError: not allocated.
        """
        size = self._pages.free(va)
        # Not every host can take pages out of a shared mapping; they stay with us then.
        with suppress(OSError, AttributeError):
            self._memory.ram.madvise(mmap.MADV_REMOVE, self._memory.translate(va), size)

    def view(self, va: int, size: int) -> memoryview:
        """Live bytes of an allocation."""
        return self._memory.view(va, size)
