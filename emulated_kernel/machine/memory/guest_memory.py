"""GuestMemory: the interface of a guest's virtual memory, and GuestPool, an allocator of mapped memory."""

from __future__ import annotations

import mmap
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import PAGE_SIZE, Prot
from emulated_kernel.util.fast_dataclass import dataclass

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_CHUNK = 64 << 10
_ROAMED = 1 << 20
"""Number of bytes of its window that a GuestPool allocates in order before it reuses freed memory.

If more of the window is mapped, the pool first allocates all of the mapped part in order.
"""


@dataclass(frozen=True, slots=True)
class MappedRange:
    """A virtual range [start, end), which is mapped to physical memory that begins at `pa`."""

    start: int
    end: int
    pa: int
    prot: Prot


class GuestMemory(ABC):
    """Virtual memory of a guest; `host_pages` allocates physical pages that the guest doesn't use."""

    ram: mmap.mmap
    """All physical memory of the guest, from physical address 0 on."""
    ram_size: int
    """Size of RAM in bytes; physical memory that the guest doesn't use as RAM can follow."""
    host_pages: UnitPool

    def __init__(self, word_size: int = 8) -> None:
        self.word_size = word_size
        """Size of a pointer and of `unsigned long` in bytes."""
        self._word = _U64 if word_size == 8 else _U32

    @abstractmethod
    def map(self, va: int, pa: int, size: int, prot: Prot) -> None:
        """Map [va, va + size) to [pa, pa + size) with the rights `prot`.

        Raises: MemoryFault (not page-aligned, or a page is already mapped).
        """

    def prepare(self, va: int, size: int) -> None:  # noqa: B027
        """Ensure that later calls of map() in [va, va + size) change no memory that the guest owns.

        Then a rollback of the guest's memory does not remove a later mapping. The default does nothing,
        because only a guest with its own page tables needs this preparation.
        Raises: HardwareError (no host page is left).
        """

    @abstractmethod
    def unmap(self, va: int, size: int) -> None:
        """Unmap the pages of [va, va + size). Raises: MemoryFault (a part isn't mapped)."""

    @abstractmethod
    def is_mapped(self, va: int) -> bool:
        """Return True if the address `va` is mapped."""

    @abstractmethod
    def translate(self, va: int) -> int:
        """Return the physical address of `va`. Raises: MemoryFault (not mapped)."""

    @abstractmethod
    def mapped_ranges(self) -> Iterator[MappedRange]:
        """Yield the ranges of the kernel's address space that are mapped to `ram`, in any order."""

    def data_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (start, size) of each part of `ram` that can contain data; all other bytes are zero."""
        yield 0, len(self.ram)

    def overlaid(self, start: int, size: int, file: BinaryIO, offset: int) -> None:  # noqa: B027
        """Tell data_ranges() that [start, start + size) of `ram` is now mapped from `file` at `offset`."""

    @abstractmethod
    def locate_text(self, va: int, size: int) -> int | None:
        """Return the physical address of [va, va + size) if this is physically contiguous text, else None."""

    @abstractmethod
    def pieces(self, va: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield (pa, length) of the physically contiguous parts of [va, va + size), in order.

        Raises: MemoryFault (with the first address that isn't mapped).
        """

    @abstractmethod
    def read(self, va: int, size: int) -> bytes:
        """Return the bytes at `va` as the guest sees them.

        Raises: MemoryFault (with the first address that isn't mapped).
        """

    @abstractmethod
    def write(self, va: int, data: bytes) -> None:
        """Write `data` to memory that the guest can write. If the write fails, no byte is written.

        A write to text fails: only `Text.poke` writes text, because a plain store would leave translated code
        stale.

        Raises: MemoryFault (with the first address that isn't mapped writable).
        """

    @abstractmethod
    def view(self, va: int, size: int) -> memoryview:
        """Return a memoryview that shows and changes [va, va + size) of the guest; never use it for text.

        Raises: MemoryFault (not mapped writable to physically contiguous memory).
        """

    def read_u32(self, va: int) -> int:
        """Read a little-endian 32-bit number. Raises: MemoryFault (not mapped)."""
        return int(_U32.unpack(self.read(va, 4))[0])

    def read_u64(self, va: int) -> int:
        """Read a little-endian 64-bit number. Raises: MemoryFault (not mapped)."""
        return int(_U64.unpack(self.read(va, 8))[0])

    def read_word(self, va: int) -> int:
        """Read a pointer or an `unsigned long`. Raises: MemoryFault (not mapped)."""
        return int(self._word.unpack(self.read(va, self.word_size))[0])

    def write_word(self, va: int, value: int) -> None:
        """Write a pointer or an `unsigned long`. Raises: MemoryFault (not mapped writable)."""
        self.write(va, (value & (1 << 8 * self.word_size) - 1).to_bytes(self.word_size, "little"))

    def write_u32(self, va: int, value: int) -> None:
        """Write a 32-bit number. Raises: MemoryFault (not mapped writable)."""
        self.write(va, _U32.pack(value & 0xFFFFFFFF))

    def give_back(self, pages: Iterable[int]) -> None:  # noqa: B027
        """Release private copies of pages that have their original contents again.

        `pages`: virtual addresses of the pages. Only memory that is mapped from a file has private copies;
        the default does nothing.
        """

    def read_cstring(self, va: int, limit: int = PAGE_SIZE) -> bytes:
        """Read bytes up to a NUL (excluded) or up to `limit`, whichever comes first.

        Raises: MemoryFault (the bytes up to there are not all mapped).
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
    """Allocator of a window of the guest's address space, whose pages are mapped on demand.

    The window is [base, base + size). The pool maps it to physical pages of the guest's memory that the
    guest itself doesn't use. Allocations are multiples of `unit` bytes.
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
        """Allocate `size` bytes and return their virtual address.

        Newly mapped memory contains the constructor's `fill`; reused memory keeps its old contents.

        Raises: HardwareError (no room in the window, or no host page left).
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
        """Free the allocation at `va`; return its size in bytes. The memory stays mapped.

        Raises: HardwareError (not allocated).
        """
        return self._pool.free(va)

    @property
    def used(self) -> int:
        """Number of bytes of the window that are allocated now."""
        return self._pool.used

    @property
    def mapped(self) -> range:
        """Address range of the mapped part of the pool's window."""
        return range(self._pool.base, self._mapped)

    def __contains__(self, va: int) -> bool:
        return self._pool.base <= va < self._mapped

    def _extend(self, missing: int) -> None:
        size = -(-missing // _CHUNK) * _CHUNK
        pa = self._memory.host_pages.alloc(size)
        self._memory.ram[pa : pa + size] = self._fill * (size // len(self._fill))
        self._memory.map(self._mapped, pa, size, self._prot)
        self._mapped += size
