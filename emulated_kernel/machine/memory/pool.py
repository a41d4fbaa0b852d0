"""UnitPool: hands out pieces of an address space; used for physical pages and for text."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.machine.traps.trap import HardwareError


class UnitPool:
    """Next-fit allocator over [base, base + size) in units of `unit` bytes.

    Next fit rather than first fit: freed text is reused as late as possible. `first_fit` gives the lowest
    free address instead: what is loaded again comes to where it was.
    """

    def __init__(self, base: int, size: int, unit: int, *, first_fit: bool = False) -> None:
        self.base = base
        self.end = base + size
        self.unit = unit
        self._used = bytearray(size // unit)
        self._lengths: dict[int, int] = {}
        self._next = 0
        self._first_fit = first_fit
        self.used = 0
        """Bytes handed out."""

    def alloc(self, size: int, limit: int | None = None) -> int:
        """Address of `size` free bytes, aligned to the unit; below address `limit` if they are free there.

        Raises: HardwareError (nothing is left).
        """
        count = max(1, -(-size // self.unit))
        free = bytes(count)
        last = len(self._used) if limit is None else (limit - self.base) // self.unit
        index = self._used.find(free, self._next, last)
        if index < 0:
            index = self._used.find(free, 0, last)
        if index < 0:
            index = self._used.find(free)
        if index < 0:
            raise HardwareError(f"no {size} bytes left in [{self.base:#x}, {self.end:#x})")
        self._used[index : index + count] = b"\1" * count
        self._next = 0 if self._first_fit else index + count
        address = self.base + index * self.unit
        self._lengths[address] = count
        self.used += count * self.unit
        return address

    def free(self, address: int) -> int:
        """Give back what `alloc` returned; returns its size in bytes.

        Raises: HardwareError (`address` was not allocated).
        """
        count = self._lengths.pop(address, 0)
        if not count:
            raise HardwareError(f"{address:#x} is not allocated")
        index = (address - self.base) // self.unit
        self._used[index : index + count] = bytes(count)
        self.used -= count * self.unit
        return count * self.unit

    def extents(self) -> Iterator[tuple[int, int]]:
        """Address and size in bytes of all that is handed out."""
        return ((address, count * self.unit) for address, count in self._lengths.items())
