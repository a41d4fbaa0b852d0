"""SparsePool: an allocator for callers that restrict the address. The pool maps single pages on demand."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE, Prot

_SHARE = 4
"""Divisor for the maximum number of pages that the pool maps: one in _SHARE pages of memory.host_pages.

Thus the pool leaves enough of these pages for other allocations.
"""


class SparsePool:
    """Allocator of memory in the address ranges `spaces`. It maps only the pages that contain an allocation.

    Newly mapped pages contain `fill`, repeated.
    """

    def __init__(self, memory: GuestMemory, spaces: Sequence[range], *, prot: Prot, fill: bytes) -> None:
        self._memory = memory
        self._spaces = spaces
        self._prot = prot
        self._page = fill * (PAGE_SIZE // len(fill))
        host = memory.host_pages
        self._limit = (host.end - host.base) // PAGE_SIZE // _SHARE
        self._is_prepared = False
        self._starts: list[int] = []
        """Addresses of the allocations, sorted."""
        self._ends: list[int] = []
        """End of each allocation of `_starts`."""
        self._pages: dict[int, tuple[int, int]] = {}
        """Address of each mapped page -> its physical address, and the number of allocations in it."""

    def __contains__(self, va: int) -> bool:
        """Return True if the address `va` is in a mapped page of the pool."""
        return va & -PAGE_SIZE in self._pages

    @property
    def mapped(self) -> Iterator[range]:
        """Address range of each mapped page, in ascending order."""
        return (range(page, page + PAGE_SIZE) for page in sorted(self._pages))

    def alloc(self, size: int, starts: range) -> int:
        """Allocate `size` bytes at the lowest free address in `starts`; return the address.

        Raises: HardwareError (no address in `starts` is free, too many pages are mapped, or a page can't be
        mapped).
        """
        va = self._lowest_free(size, starts)
        if not self._is_prepared:
            for space in self._spaces:
                self._memory.prepare(space.start, len(space))
            self._is_prepared = True
        pages = self._pages_of(va, va + size)
        new = [page for page in pages if page not in self._pages]
        if len(self._pages) + len(new) > self._limit:
            raise HardwareError(f"more than {self._limit} pages at {va:#x} and such addresses")
        done: list[int] = []
        try:
            for page in new:
                self._map(page)
                done.append(page)
        except HardwareError:
            for page in done:
                self._unmap(page)
            raise
        for page in pages:
            pa, users = self._pages[page]
            self._pages[page] = pa, users + 1
        at = bisect_right(self._starts, va)
        self._starts.insert(at, va)
        self._ends.insert(at, va + size)
        return va

    def size_of(self, va: int) -> int:
        """Return the size in bytes of the allocation at `va`. Raises: HardwareError (not allocated)."""
        at = self._index(va)
        return self._ends[at] - va

    def free(self, va: int) -> None:
        """Free the allocation at `va`, and unmap pages that contain no other allocation.

        Raises: HardwareError (not allocated).
        """
        at = self._index(va)
        end = self._ends.pop(at)
        self._starts.pop(at)
        for page in self._pages_of(va, end):
            pa, users = self._pages[page]
            self._pages[page] = pa, users - 1
            if users == 1:
                self._unmap(page)

    def _index(self, va: int) -> int:
        at = bisect_right(self._starts, va) - 1
        if at < 0 or self._starts[at] != va:
            raise HardwareError(f"{va:#x} is not allocated")
        return at

    def _lowest_free(self, size: int, starts: range) -> int:
        for space in self._spaces:
            va = max(starts.start, space.start)
            last = min(starts.stop - 1, space.stop - size)
            at = bisect_right(self._ends, va)
            while va <= last:
                if at == len(self._starts) or va + size <= self._starts[at]:
                    return va
                va = self._ends[at]
                at += 1
        raise HardwareError(f"no {size} bytes left from [{starts.start:#x}, {starts.stop:#x}) on")

    @staticmethod
    def _pages_of(start: int, end: int) -> range:
        return range(start & -PAGE_SIZE, end, PAGE_SIZE)

    def _map(self, page: int) -> None:
        memory = self._memory
        pa = memory.host_pages.alloc(PAGE_SIZE)
        memory.ram[pa : pa + PAGE_SIZE] = self._page
        try:
            memory.map(page, pa, PAGE_SIZE, self._prot)
        except (MemoryFault, HardwareError) as error:
            memory.host_pages.free(pa)
            raise HardwareError(f"the page at {page:#x} can't be mapped: {error}") from error
        self._pages[page] = pa, 0

    def _unmap(self, page: int) -> None:
        pa, _ = self._pages.pop(page)
        self._memory.unmap(page, PAGE_SIZE)
        self._memory.host_pages.free(pa)
