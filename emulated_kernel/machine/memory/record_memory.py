"""RecordMemory: the memory to which compiled handlers write: per-CPU cells, and pages for records."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import BinaryIO

from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.memory.persistent import PersistentLayout, map_over, put_into
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.memory_layout import MemoryLayout
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import PAGE_SIZE, Prot

CELL_UNIT = 8
"""Unit in bytes of the size and alignment of cells, the per-CPU variables of compiled handlers."""


def extra_size(layout: MemoryLayout) -> int:
    """Return the size in bytes of the physical memory after RAM that RecordMemory needs.

    This memory costs little until it is used: the host allocates a page at the first access.
    """
    return layout.record_pages_size


class RecordMemory:
    """Per-CPU variables (cells) in a reserved part of the per-CPU area, and pages in a separate window.

    A cell has the same offset in the area of each CPU. The guest's allocators don't manage this memory.
    """

    def __init__(
        self,
        memory: GuestMemory,
        layout: MemoryLayout,
        abi: Mapping[str, int],
        bases: Callable[[], Sequence[int]],
    ) -> None:
        """Map the window for pages, and prepare the allocation of pages and cells.

        `memory`: guest memory with extra_size(layout) bytes after its RAM. `bases`: returns the addresses of
        the per-CPU areas, in the order of the CPUs. `abi`: offsets in the image. Its items `percpu.reserved`
        and `percpu.reserved_size` are the offset and the size in bytes of the part of a per-CPU area that the
        cells use. Without these items, no cell can be allocated.
        """
        self._memory = memory
        self._bases = bases
        pages = layout.record_pages
        pages_size = layout.record_pages_size
        memory.map(pages, memory.ram_size, pages_size, Prot.READ | Prot.WRITE)
        self._pages = UnitPool(pages, pages_size, PAGE_SIZE)
        reserved = abi.get("percpu.reserved", 0)
        self._size = abi.get("percpu.reserved_size", 0)
        self._cells = UnitPool(reserved, self._size, CELL_UNIT)
        self._file: BinaryIO | None = None

    @property
    def pages_size(self) -> int:
        """Size, in bytes, of the window for pages."""
        return self._pages.end - self._pages.base

    @property
    def pages_used(self) -> int:
        """Size of all allocated pages in bytes."""
        return self._pages.used

    def room_for(self, pages: int, cells: int) -> int:
        """Return the number of further users, such as tracing instances, for which memory is left.

        `pages`: size in bytes of the pages that each user needs. `cells`: size in bytes of the cells that
        each user needs on each CPU.
        """
        free_cells = self._cells.end - self._cells.base - self._cells.used
        return min((self.pages_size - self.pages_used) // pages, free_cells // cells)

    def alloc_percpu(self, size: int) -> int:
        """Allocate `size` zeroed bytes on each CPU; return their offset in the per-CPU areas.

        Raises: HardwareError (not enough is left).
        """
        offset = self._cells.alloc(size)
        for view in self.cells(offset, size):
            view[:] = bytes(size)
        return offset

    def free_percpu(self, offset: int) -> None:
        """Free the cells at `offset`, a result of alloc_percpu(). Raises: HardwareError (not allocated)."""
        self._cells.free(offset)

    def cells(self, offset: int, size: int) -> list[memoryview]:
        """Return live views of the cells at `offset`, one view for each CPU."""
        start = offset - self._cells.base
        return [reserved[start : start + size] for reserved in self._reserved]

    def address(self, offset: int, cpu: int = 0) -> int:
        """Return the address of the cell at `offset` in the per-CPU area of CPU `cpu`."""
        return self._bases()[cpu] + offset

    @cached_property
    def _reserved(self) -> list[memoryview]:
        return [self._memory.view(base + self._cells.base, self._size) for base in self._bases()]

    @cached_property
    def words(self) -> list[memoryview]:
        """View of each CPU's memory for cells as unsigned 64-bit words, in the order of the CPUs."""
        return [reserved.cast("Q") for reserved in self._reserved]

    def word_index(self, offset: int) -> int:
        """Return the index of the cell at `offset` (in a per-CPU area) in each view of `words`."""
        return (offset - self._cells.base) // 8

    def alloc_pages(self, size: int) -> int:
        """Allocate `size` bytes of pages, which aren't cleared; return their virtual address.

        Raises: HardwareError (no memory or disk space left).
        """
        with self.exchanged_pages((), (size,)) as (va,):
            return va

    @contextmanager
    def exchanged_pages(self, old: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
        """Free the pages at addresses `old`, allocate pages of `sizes` bytes, and yield the new addresses.

        The new pages are not cleared, and may overlap the old ones. The old data is intact at the start of
        the `with` block, and gone after its end. An exception in the block undoes the exchange.

        Raises: HardwareError (no memory or disk space left).
        """
        before = [(va, self._pages.size_of(va)) for va in old]
        with self._pages.exchanged(old, sizes) as new:
            for va, size in zip(new, sizes, strict=True):
                self._take_disk_space(va, size)
            yield new
        for va, size in before:
            for start, free in self._pages.free_parts(va, size):
                self._give_back(start, free)

    def _take_disk_space(self, va: int, size: int) -> None:
        if self._file is None:
            return
        try:
            os.posix_fallocate(self._file.fileno(), self.persistent_layout.pages(va, size), size)
        except OSError as error:
            raise HardwareError(f"{self._file.name}: {error.strerror}") from error

    def _give_back(self, va: int, size: int) -> None:
        """Return the memory of pages to the host."""
        # Not every host supports MADV_REMOVE for shared mappings; the memory stays allocated then.
        with suppress(OSError, AttributeError):
            self._memory.ram.madvise(mmap.MADV_REMOVE, self._memory.translate(va), size)

    def free_pages(self, va: int) -> None:
        """Free pages from `alloc_pages`, and return their memory to the host.

        Raises: HardwareError (not allocated).
        """
        self._give_back(va, self._pages.free(va))

    def view(self, va: int, size: int) -> memoryview:
        """Return a live view of `size` bytes of pages at `va`."""
        return self._memory.view(va, size)

    # Persistence in a file

    @cached_property
    def persistent_layout(self) -> PersistentLayout:
        """Layout of a file with a header page, all cells and all pages."""
        spans = [self._span(base) for base in self._bases()]
        starts = [PAGE_SIZE + sum(size for _, size in spans[:cpu]) for cpu in range(len(spans))]
        first = [base + self._cells.base for base in self._bases()]
        return PersistentLayout(
            tuple(start + at - va for start, at, (va, _) in zip(starts, first, spans, strict=True)),
            self._cells.base,
            self._size,
            PAGE_SIZE + sum(size for _, size in spans),
            self._pages.base,
            self._pages.end - self._pages.base,
        )

    def _span(self, base: int) -> tuple[int, int]:
        """Return address and size in bytes of the whole pages that contain all cells of one CPU.

        `base`: address of the CPU's per-CPU area.
        """
        start = base + self._cells.base
        end = base + self._cells.base + self._size
        va = start - start % PAGE_SIZE
        return va, -(-end // PAGE_SIZE) * PAGE_SIZE - va

    def keep_in(self, file: BinaryIO) -> None:
        """Move all cells and pages to the new file `file`, so that their contents outlive this process.

        Raises: OSError (all contents remain intact; a part of them may already be in the new file).
        """
        layout = self.persistent_layout
        memory = self._memory
        descriptor = file.fileno()
        os.ftruncate(descriptor, layout.size)
        ranges = [(memory.translate(layout.pages_base), layout.pages_size, layout.pages_at)]
        for address, size in self._pages.extents():
            put_into(descriptor, layout.pages(address, size), memory.read(address, size))
        at = PAGE_SIZE
        for base in self._bases():
            va, size = self._span(base)
            put_into(descriptor, at, memory.read(va, size))
            ranges.append((memory.translate(va), size, at))
            at += size
        for physical, size, offset in ranges:
            map_over(memory.ram, physical, size, descriptor, offset)
            memory.overlaid(physical, size, file, offset)
            # Hazard: once the pages, which come first, are mapped, further allocations need disk space in the
            # file.
            self._file = file
