"""Memory: the built-in machine's RAM in one mmap, and the virtual ranges that are mapped to it."""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import BinaryIO

from emulated_kernel.machine.memory.guest_memory import GuestMemory, MappedRange
from emulated_kernel.machine.memory.paging import PageTables
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.memory.sparse import data_ranges
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE, Prot


def _memory_file(size: int) -> int | None:
    """Return the descriptor of an unnamed file in memory; data_ranges() can find the holes of this file.

    Return None if the host offers no such file.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create("guest-ram", os.MFD_CLOEXEC)
    except OSError:
        return None
    try:
        os.ftruncate(file, size)
    except OSError:
        # RLIMIT_FSIZE limits the file, but not anonymous memory.
        os.close(file)
        return None
    return file


class Memory(GuestMemory):
    """RAM at physical address 0 with page tables; `read` and `write` take virtual addresses.

    `host_pages` allocates the physical pages at the top of RAM, which the guest's memory map excludes. After
    RAM, there are `extra_size` bytes of physical memory, which the guest doesn't know.
    """

    def __init__(
        self,
        ram_size: int,
        host_size: int,
        tables: type[PageTables],
        on_remap: Callable[[], None],
        word_size: int = 8,
        extra_size: int = 0,
    ) -> None:
        """Create RAM of `ram_size` bytes with empty page tables of the class `tables`.

        `host_size`: size in bytes of `host_pages`. `on_remap` is called after a mapping was changed or
        removed, and must flush the TLB. `word_size`: size of a pointer in bytes. `extra_size`: see the
        class.
        """
        super().__init__(word_size)
        self.ram_size = ram_size
        self._file = _memory_file(ram_size + extra_size)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0)
        if self._file is None:
            self.ram = mmap.mmap(-1, ram_size + extra_size, flags=flags | mmap.MAP_ANONYMOUS)
        else:
            weakref.finalize(self, os.close, self._file)
            self.ram = mmap.mmap(self._file, ram_size + extra_size, flags=flags)
        self._overlays: list[tuple[int, int, BinaryIO, int]] = []
        """Ranges of `ram` that are mapped from another file: start, size, the file, offset in the file."""
        self.host_pages = UnitPool(ram_size - host_size, host_size, PAGE_SIZE)
        self.tables = tables(self.ram, self.host_pages)
        self._on_remap = on_remap
        self.ranges: list[MappedRange] = []
        self.on_change: Callable[[], object] | None = None
        """Function to call after a change of `ranges`, before the guest runs; None if no function is set."""
        self._index()

    def _index(self) -> None:
        """Call `on_change`, and rebuild the look-up lists: starts, ends, offsets and rights of the ranges."""
        if self.on_change is not None:
            self.on_change()
        self._starts = [r.start for r in self.ranges]
        self._ends = [r.end for r in self.ranges]
        self._deltas = [r.pa - r.start for r in self.ranges]
        self._writable = [bool(r.prot & Prot.WRITE) for r in self.ranges]
        self._executable = [bool(r.prot & Prot.EXEC) for r in self.ranges]

    def map(self, va: int, pa: int, size: int, prot: Prot) -> None:
        if (va | pa | size) % PAGE_SIZE:
            raise MemoryFault(va, "not page-aligned")
        if any(r.start < va + size and va < r.end for r in self.ranges):
            raise MemoryFault(va, "already mapped")
        self.tables.map(va, pa, size, prot)
        self._insert(MappedRange(va, va + size, pa, prot))
        self._index()

    def unmap(self, va: int, size: int) -> None:
        self._cut(va, va + size)
        self.tables.unmap(va, size)
        self._index()
        self._on_remap()

    def _insert(self, new: MappedRange) -> None:
        """Add the range `new`; if it continues the range below it, merge the two ranges."""
        at = bisect_right([r.start for r in self.ranges], new.start)
        below = self.ranges[at - 1] if at else None
        if (
            below
            and (below.end, below.prot) == (new.start, new.prot)
            and new.pa - new.start == below.pa - below.start
        ):
            self.ranges[at - 1] = MappedRange(below.start, new.end, below.pa, new.prot)
        else:
            self.ranges.insert(at, new)

    def _cut(self, start: int, end: int) -> list[MappedRange]:
        """Remove [start, end) from `ranges`; return the removed pieces.

        Raises: MemoryFault (a part isn't mapped).
        """
        taken = []
        kept = []
        for r in self.ranges:
            low = max(r.start, start)
            high = min(r.end, end)
            if low >= high:
                kept.append(r)
                continue
            taken.append(MappedRange(low, high, r.pa + low - r.start, r.prot))
            if r.start < low:
                kept.append(MappedRange(r.start, low, r.pa, r.prot))
            if high < r.end:
                kept.append(MappedRange(high, r.end, r.pa + high - r.start, r.prot))
        if sum(r.end - r.start for r in taken) != end - start:
            raise MemoryFault(start, "not wholly mapped")
        self.ranges = kept
        return taken

    def mapped_ranges(self) -> Iterator[MappedRange]:
        return iter(self.ranges)

    def overlaid(self, start: int, size: int, file: BinaryIO, offset: int) -> None:
        self._overlays.append((start, size, file, offset))

    def data_ranges(self) -> Iterator[tuple[int, int]]:
        if self._file is None:
            yield 0, len(self.ram)
        else:
            yield from data_ranges(self._file, 0, len(self.ram))
        for start, size, file, offset in self._overlays:
            for at, length in data_ranges(file.fileno(), offset, size):
                yield start + at - offset, length

    def find(self, va: int) -> MappedRange | None:
        """Return the range that contains `va`, or None if `va` is not mapped."""
        i = bisect_right(self._starts, va) - 1
        return self.ranges[i] if i >= 0 and va < self._ends[i] else None

    def is_mapped(self, va: int) -> bool:
        return self.find(va) is not None

    def translate(self, va: int) -> int:
        i = bisect_right(self._starts, va) - 1
        if i < 0 or va >= self._ends[i]:
            raise MemoryFault(va)
        return va + self._deltas[i]

    def locate_text(self, va: int, size: int) -> int | None:
        i = bisect_right(self._starts, va) - 1
        if i < 0 or va + size > self._ends[i] or not self._executable[i]:
            return None
        return va + self._deltas[i]

    def pieces(self, va: int, size: int) -> Iterator[tuple[int, int]]:
        end = va + size
        while va < end:
            i = bisect_right(self._starts, va) - 1
            if i < 0 or va >= self._ends[i]:
                raise MemoryFault(va)
            length = min(end, self._ends[i]) - va
            yield va + self._deltas[i], length
            va += length

    def read(self, va: int, size: int) -> bytes:
        i = bisect_right(self._starts, va) - 1
        if i >= 0 and va + size <= self._ends[i]:
            pa = va + self._deltas[i]
            return self.ram[pa : pa + size]
        return b"".join([self.ram[pa : pa + length] for pa, length in self.pieces(va, size)])

    def write(self, va: int, data: bytes) -> None:
        size = len(data)
        i = bisect_right(self._starts, va) - 1
        if i >= 0 and va + size <= self._ends[i] and self._writable[i]:
            pa = va + self._deltas[i]
            self.ram[pa : pa + size] = data
            return
        self._write_across(va, data)

    def _write_across(self, va: int, data: bytes) -> None:
        for address in (va, *range(va - va % PAGE_SIZE + PAGE_SIZE, va + len(data), PAGE_SIZE)):
            where = self.find(address)
            if where is None or not where.prot & Prot.WRITE:
                raise MemoryFault(address, "not mapped" if where is None else "not writable", write=True)
        done = 0
        for pa, length in self.pieces(va, len(data)):
            self.ram[pa : pa + length] = data[done : done + length]
            done += length

    def view(self, va: int, size: int) -> memoryview:
        where = self.find(va)
        if where is None or va + size > where.end or not where.prot & Prot.WRITE:
            raise MemoryFault(va, "not writable in one piece")
        pa = where.pa + va - where.start
        return memoryview(self.ram)[pa : pa + size]
