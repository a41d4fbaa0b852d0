"""GuestPool: a window of the guest's address space whose pages appear as they are allocated."""

from __future__ import annotations

from emulated_kernel.abi import Prot
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.traps.trap import HardwareError

_CHUNK = 64 << 10
_ROAMED = 1 << 20
"""Bytes that allocations walk through until freed ones are used again; what is full is extended."""


class GuestPool:
    """Allocations of `unit` granularity in [base, base + size), backed by the host's physical pages."""

    def __init__(
        self, memory: GuestMemory, base: int, size: int, *, unit: int, prot: Prot, fill: bytes = b"\0"
    ) -> None:
        self._memory = memory
        self._pool = UnitPool(base, size, unit)
        self._prot = prot
        self._fill = fill
        self._mapped = base

    def alloc(self, size: int) -> int:
        """Virtual address of `size` bytes, each holding the fill byte if never used before.

        Raises: HardwareError: the window or the host's pages are exhausted.
        """
        va = self._pool.alloc(size, max(self._mapped, self._pool.base + _ROAMED))
        try:
            while self._mapped < va + size:
                self._extend()
        except HardwareError:
            self._pool.free(va)
            raise
        return va

    def free(self, va: int) -> int:
        """Give back what `alloc` returned; returns its size. The bytes stay mapped.

        Raises: HardwareError: not allocated.
        """
        return self._pool.free(va)

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._pool.used

    def _extend(self) -> None:
        pa = self._memory.host_pages.alloc(_CHUNK)
        self._memory.ram[pa : pa + _CHUNK] = self._fill * (_CHUNK // len(self._fill))
        self._memory.map(self._mapped, pa, _CHUNK, self._prot)
        self._mapped += _CHUNK
