"""UnitPool: an allocator of address ranges, for physical pages, text and other windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from emulated_kernel.machine.traps.trap import HardwareError

_FIRST_UNITS = 4096
"""Number of units for which a new pool has bytes in `_used`; further bytes are added when needed."""


class UnitPool:
    """Next-fit allocator over [base, base + size) in units of `unit` bytes.

    Next fit reuses freed text as late as possible. With `first_fit`, the pool takes the lowest free address
    instead, so that a module that is loaded again gets its old address.
    """

    def __init__(self, base: int, size: int, unit: int, *, first_fit: bool = False) -> None:
        self.base = base
        self.end = base + size
        self.unit = unit
        self._count = size // unit
        self._used = bytearray(min(self._count, _FIRST_UNITS))
        """A byte for each unit up to the highest one that was searched: 1 if it is allocated, else 0.

        All later units are free.
        """
        self._lengths: dict[int, int] = {}
        self._next = 0
        self._first_fit = first_fit
        self.used = 0
        """Number of bytes that are allocated now."""

    def alloc(self, size: int, limit: int | None = None) -> int:
        """Allocate `size` bytes, aligned to the unit, and return their address.

        `limit`: address below which the allocation shall end; if there is no room below it, the allocation is
        anywhere. None: no limit. Raises: HardwareError (no free range is large enough).
        """
        count = max(1, -(-size // self.unit))
        # Hazard: the guest names sizes up to 2^64, and the host must not allocate so much for the search.
        if count > self._count:
            raise HardwareError(f"no {size} bytes left in [{self.base:#x}, {self.end:#x})")
        free = bytes(count)
        last = self._count if limit is None else (limit - self.base) // self.unit
        index = self._find(free, self._next, last)
        if index < 0:
            index = self._find(free, 0, last)
        if index < 0:
            index = self._find(free, 0, self._count)
        if index < 0:
            raise HardwareError(f"no {size} bytes left in [{self.base:#x}, {self.end:#x})")
        self._used[index : index + count] = b"\1" * count
        self._next = 0 if self._first_fit else index + count
        address = self.base + index * self.unit
        self._lengths[address] = count
        self.used += count * self.unit
        return address

    def _find(self, free: bytes, start: int, end: int) -> int:
        """Return the index of the first run of free units in [start, end), or -1 if there is none.

        `free`: as many zero bytes as the run has units.
        """
        while (index := self._used.find(free, start, end)) < 0 and len(self._used) < min(end, self._count):
            self._cover(len(self._used) + max(len(self._used), len(free)))
        return index

    def _cover(self, end: int) -> None:
        """Extend `_used` to `end` units, or to all units of the window if it has fewer."""
        self._used.extend(bytes(max(0, min(end, self._count) - len(self._used))))

    def free(self, address: int) -> int:
        """Free an allocation; return its size in bytes.

        Raises: HardwareError (`address` was not allocated).
        """
        count = self._lengths.pop(address, 0)
        if not count:
            raise HardwareError(f"{address:#x} is not allocated")
        index = (address - self.base) // self.unit
        self._used[index : index + count] = bytes(count)
        self.used -= count * self.unit
        return count * self.unit

    def size_of(self, address: int) -> int:
        """Return the size of an allocation in bytes; 0 if `address` is not allocated."""
        return self._lengths.get(address, 0) * self.unit

    @contextmanager
    def exchanged(self, addresses: Iterable[int], sizes: Iterable[int]) -> Iterator[list[int]]:
        """Free the allocations at `addresses`, make new ones of `sizes` bytes, and yield the new addresses.

        The new ranges may overlap the freed ones. An exception in the `with` block undoes the exchange.
        Raises: HardwareError (no free range is large enough, or an address was not allocated; in both cases
        the pool is unchanged).
        """
        before = self._used[:], self._lengths.copy(), self.used
        try:
            for address in addresses:
                self.free(address)
            yield [self.alloc(size) for size in sizes]
        except BaseException:
            self._used, self._lengths, self.used = before
            raise

    def free_parts(self, address: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield address and size in bytes of each free part of [address, address + size).

        This range consists of whole units.
        """
        at = (address - self.base) // self.unit
        end = at + size // self.unit
        self._cover(end)
        while (start := self._used.find(0, at, end)) >= 0:
            used = self._used.find(1, start, end)
            at = end if used < 0 else used
            yield self.base + start * self.unit, (at - start) * self.unit

    def extents(self) -> Iterator[tuple[int, int]]:
        """Yield address and size in bytes of each allocation."""
        return ((address, count * self.unit) for address, count in self._lengths.items())
