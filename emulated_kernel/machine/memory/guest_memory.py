"""A guest's virtual memory as the engine and tracing use it, whoever made its page tables; windows in it."""

from __future__ import annotations

import mmap
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import PAGE_SIZE, Prot

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_CHUNK = 64 << 10
_ROAMED = 1 << 20
"""Bytes that allocations walk through until freed ones are used again; what is full is extended."""


class GuestMemory(ABC):
    """Virtual memory, by `read` and `write`; `host_pages` are physical pages that the guest doesn't use."""

    ram: mmap.mmap
    """All physical memory."""
    ram_size: int
    """Bytes; behind them may follow physical memory that is no RAM to anybody."""
    host_pages: UnitPool

    def __init__(self, word_size: int = 8) -> None:
        self.word_size = word_size
        """Bytes of a pointer and of `unsigned long`."""
        self._word = _U64 if word_size == 8 else _U32

    @abstractmethod
    def map(self, va: int, pa: int, size: int, prot: Prot) -> None:
        """Map pages that are not mapped yet. Raises: MemoryFault (not page-aligned, or mapped already)."""

    @abstractmethod
    def is_mapped(self, va: int) -> bool:
        """Whether anything is there."""

    @abstractmethod
    def translate(self, va: int) -> int:
        """Physical address of `va`. Raises: MemoryFault (not mapped)."""

    @abstractmethod
    def locate_text(self, va: int, size: int) -> int | None:
        """Physical address of [va, va + size) if that is executable and contiguous."""

    @abstractmethod
    def pieces(self, va: int, size: int) -> Iterator[tuple[int, int]]:
        """(pa, length) of the physically contiguous parts of [va, va + size), in order.

        Raises: MemoryFault (with the first address that isn't mapped).
        """

    @abstractmethod
    def read(self, va: int, size: int) -> bytes:
        """Bytes at `va`, as the guest sees them now.

        Raises: MemoryFault (with the first address that isn't mapped).
        """

    @abstractmethod
    def write(self, va: int, data: bytes) -> None:
        """Store bytes where the guest could store them too; all or nothing.

        Text is refused: `Text.poke` is its only writer, as a plain store leaves translated code stale.

        Raises: MemoryFault (with the first address that isn't mapped writable).
        """

    @abstractmethod
    def view(self, va: int, size: int) -> memoryview:
        """Live bytes of a physically contiguous part, for ring buffers and shared cells; never for text.

        Raises: MemoryFault (not mapped writable in one piece).
        """

    def read_u32(self, va: int) -> int:
        """A little-endian 32-bit number. Raises: MemoryFault."""
        return int(_U32.unpack(self.read(va, 4))[0])

    def read_u64(self, va: int) -> int:
        """A little-endian 64-bit number. Raises: MemoryFault."""
        return int(_U64.unpack(self.read(va, 8))[0])

    def read_word(self, va: int) -> int:
        """A pointer or an `unsigned long`. Raises: MemoryFault."""
        return int(self._word.unpack(self.read(va, self.word_size))[0])

    def write_word(self, va: int, value: int) -> None:
        """Store a pointer or an `unsigned long`. Raises: MemoryFault."""
        self.write(va, (value & (1 << 8 * self.word_size) - 1).to_bytes(self.word_size, "little"))

    def write_u32(self, va: int, value: int) -> None:
        """Store a 32-bit number. Raises: MemoryFault."""
        self.write(va, _U32.pack(value & 0xFFFFFFFF))

    def give_back(self, pages: Iterable[int]) -> None:  # noqa: B027
        """Pages that are as they were once: who maps RAM from a file needs no copy of them."""

    def read_cstring(self, va: int, limit: int = PAGE_SIZE) -> bytes:
        """Bytes up to a NUL (not included) or up to `limit`, whatever comes first.

        Raises: MemoryFault (unmapped memory comes before the NUL and the limit).
        """
        parts: list[bytes] = []
        while limit > 0:
            size = min(limit, PAGE_SIZE - va % PAGE_SIZE)
            head, nul, _ = self.read(va, size).partition(b"\0")
            parts.append(head)
            if nul:
                break
            va += size
            limit -= size
        return b"".join(parts)


class GuestPool:
    """A window of the guest's address space whose pages appear as they are allocated.

    Allocations are of `unit` granularity in [base, base + size), backed by the host's physical pages.
    """

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

        Raises: HardwareError (the window or the host's pages are exhausted).
        """
        va = self._pool.alloc(size, max(self._mapped, self._pool.base + _ROAMED))
        try:
            if self._mapped < va + size:
                self._extend(va + size - self._mapped)
        except HardwareError:
            self._pool.free(va)
            raise
        return va

    def free(self, va: int) -> int:
        """Give back what `alloc` returned; returns its size. The bytes stay mapped.

        Raises: HardwareError (not allocated).
        """
        return self._pool.free(va)

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._pool.used

    def _extend(self, missing: int) -> None:
        size = -(-missing // _CHUNK) * _CHUNK
        pa = self._memory.host_pages.alloc(size)
        self._memory.ram[pa : pa + size] = self._fill * (size // len(self._fill))
        self._memory.map(self._mapped, pa, size, self._prot)
        self._mapped += size
