"""RecordMemory: what handlers in guest code write to: small cells of each CPU, and pages for records."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import BinaryIO

from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.memory.persistent import PersistentLayout, map_over, put_into
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.memory_layout import MemoryLayout
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import PAGE_SIZE, Prot

CELL_UNIT = 8
"""Bytes; allocations of cells are multiples of it, and aligned to it."""


def extra_size(layout: MemoryLayout) -> int:
    """Bytes of physical memory behind RAM that this needs; the host gives pages to what is touched alone."""
    return layout.record_pages_size


class RecordMemory:
    """Cells in what the image reserves of each CPU's area, and pages of a window of their own.

    A cell has the same offset from the base of every CPU. Neither is known to the guest's allocators.
    """

    def __init__(
        self,
        memory: GuestMemory,
        layout: MemoryLayout,
        abi: Mapping[str, int],
        bases: Callable[[], Sequence[int]],
    ) -> None:
        """`memory` has extra_size(layout) bytes behind its RAM; `bases` are those of the CPUs.

        An image that reserves nothing has no cells.
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

    def alloc_percpu(self, size: int) -> int:
        """Offset of `size` bytes of each CPU, zeroed. Raises: HardwareError (none left)."""
        offset = self._cells.alloc(size)
        for view in self.cells(offset, size):
            view[:] = bytes(size)
        return offset

    def free_percpu(self, offset: int) -> None:
        """Give back what `alloc_percpu` returned. Raises: HardwareError (not allocated)."""
        self._cells.free(offset)

    def cells(self, offset: int, size: int) -> list[memoryview]:
        """Live bytes of an allocation, of each CPU."""
        start = offset - self._cells.base
        return [reserved[start : start + size] for reserved in self._reserved]

    def address(self, offset: int, cpu: int = 0) -> int:
        """Where a CPU's cell is, for everybody."""
        return self._bases()[cpu] + offset

    @cached_property
    def _reserved(self) -> list[memoryview]:
        return [self._memory.view(base + self._cells.base, self._size) for base in self._bases()]

    @cached_property
    def words(self) -> list[memoryview]:
        """What is reserved of each CPU, as u64."""
        return [reserved.cast("Q") for reserved in self._reserved]

    def word_index(self, offset: int) -> int:
        """Of a cell, in `words`."""
        return (offset - self._cells.base) // 8

    def alloc_pages(self, size: int) -> int:
        """Address of whole pages, of any content. Raises: HardwareError (none left, here or on the disk)."""
        va = self._pages.alloc(size)
        if self._file is not None:
            try:
                os.posix_fallocate(self._file.fileno(), self.persistent_layout.pages(va, size), size)
            except OSError as error:
                self._pages.free(va)
                raise HardwareError(f"{self._file.name}: {error.strerror}") from error
        return va

    def free_pages(self, va: int) -> None:
        """Give back what `alloc_pages` returned, and the host its memory.

        Raises: HardwareError (not allocated).
        """
        size = self._pages.free(va)
        # Not every host can take pages out of a shared mapping; they stay with us then.
        with suppress(OSError, AttributeError):
            self._memory.ram.madvise(mmap.MADV_REMOVE, self._memory.translate(va), size)

    def view(self, va: int, size: int) -> memoryview:
        """Live bytes of pages."""
        return self._memory.view(va, size)

    # In a file

    @cached_property
    def persistent_layout(self) -> PersistentLayout:
        """Of a file that has all cells and pages, behind one page of its own."""
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
        """Address and size of the pages that the cells of a CPU lie in."""
        start = base + self._cells.base
        end = base + self._cells.base + self._size
        va = start - start % PAGE_SIZE
        return va, -(-end // PAGE_SIZE) * PAGE_SIZE - va

    def keep_in(self, file: BinaryIO) -> None:
        """Let a new file hold all cells and pages from now on: what is written there outlives this process.

        Raises: OSError (after which all of them have what they had, some in the file that they were in).
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
            # Hazard: once the pages, which come first, are the file's, those to come need room there.
            self._file = file
