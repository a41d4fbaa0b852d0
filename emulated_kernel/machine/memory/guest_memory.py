"""GuestMemory: a guest's virtual memory as the engine and tracing use it, whoever made its page tables."""

from __future__ import annotations

import mmap
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator

from emulated_kernel.abi import PAGE_SIZE, Prot
from emulated_kernel.machine.memory.pool import UnitPool

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


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
        """Map pages that are not mapped yet. Raises: MemoryFault: not page-aligned, or mapped already."""

    @abstractmethod
    def is_mapped(self, va: int) -> bool:
        """Whether anything is there."""

    @abstractmethod
    def translate(self, va: int) -> int:
        """Physical address of `va`. Raises: MemoryFault: not mapped."""

    @abstractmethod
    def locate_text(self, va: int, size: int) -> int | None:
        """Physical address of [va, va + size) if that is executable and contiguous."""

    @abstractmethod
    def pieces(self, va: int, size: int) -> Iterator[tuple[int, int]]:
        """(pa, length) of the physically contiguous parts of [va, va + size), in order.

        Raises: MemoryFault: with the first address that isn't mapped.
        """

    @abstractmethod
    def read(self, va: int, size: int) -> bytes:
        """Bytes at `va`, as the guest sees them now.

        Raises: MemoryFault: with the first address that isn't mapped.
        """

    @abstractmethod
    def write(self, va: int, data: bytes) -> None:
        """Store bytes where the guest could store them too; all or nothing.

        Text is refused: `Text.poke` is its only writer, as a plain store leaves translated code stale.

        Raises: MemoryFault: with the first address that isn't mapped writable.
        """

    @abstractmethod
    def view(self, va: int, size: int) -> memoryview:
        """Live bytes of a physically contiguous part, for ring buffers and shared cells; never for text.

        Raises: MemoryFault: not mapped writable in one piece.
        """

    def read_u32(self, va: int) -> int:
        """A little-endian 32-bit number. Raises MemoryFault."""
        return int(_U32.unpack(self.read(va, 4))[0])

    def read_u64(self, va: int) -> int:
        """A little-endian 64-bit number. Raises MemoryFault."""
        return int(_U64.unpack(self.read(va, 8))[0])

    def read_word(self, va: int) -> int:
        """A pointer or an `unsigned long`. Raises MemoryFault."""
        return int(self._word.unpack(self.read(va, self.word_size))[0])

    def write_word(self, va: int, value: int) -> None:
        """Store a pointer or an `unsigned long`. Raises MemoryFault."""
        self.write(va, (value & (1 << 8 * self.word_size) - 1).to_bytes(self.word_size, "little"))

    def write_u32(self, va: int, value: int) -> None:
        """Store a 32-bit number. Raises MemoryFault."""
        self.write(va, _U32.pack(value & 0xFFFFFFFF))

    def read_cstring(self, va: int, limit: int = PAGE_SIZE) -> bytes:
        """Bytes up to a NUL (not included) or up to `limit`, whatever comes first.

        Raises: MemoryFault: unmapped memory comes before the NUL and the limit.
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
