"""The guest's memory, read from its page allocator and its slab caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.host.cells import SymbolNames, address_of

_MAX_CACHES = 1 << 12
"""Where a corrupted list is given up."""
_MAX_NAME = 64


class GuestMemory(Protocol):
    word_size: int

    def read(self, va: int, size: int) -> bytes: ...

    def read_word(self, va: int) -> int: ...

    def read_u32(self, va: int) -> int: ...

    def read_cstring(self, va: int, limit: int = ...) -> bytes: ...


@dataclass(frozen=True)
class SlabCache:
    """One kmem_cache; sizes in bytes."""

    name: str
    object_size: int
    """What an object takes, with its padding."""
    objects: int
    """In use now."""
    slabs: int
    objects_per_slab: int
    pages_per_slab: int

    @property
    def pages(self) -> int:
        """Pages that it holds now."""
        return self.slabs * self.pages_per_slab


@dataclass(frozen=True)
class MemoryInfo:
    """What the guest's counters say, in pages."""

    total: int
    free: int
    reserve: int
    """Free pages that files don't get."""
    file: int
    """In ramfs files."""
    slab: int
    kernel_stack: int

    @property
    def available(self) -> int:
        """What files could still take."""
        return max(self.free - self.reserve, 0)

    def text(self) -> Iterator[str]:
        """Lines of /proc/meminfo. Mirrors: fs/proc/meminfo.c:meminfo_proc_show (v6.1)."""
        fields = (
            ("MemTotal", self.total),
            ("MemFree", self.free),
            ("MemAvailable", self.available),
            ("Cached", self.file),
            ("Unevictable", self.file),
            ("Slab", self.slab),
            ("SReclaimable", 0),
            ("SUnreclaim", self.slab),
            ("KernelStack", self.kernel_stack),
        )
        for name, pages in fields:
            yield f"{name + ':':<16}{pages * PAGE_SIZE >> 10:>8} kB\n"


class MemoryReader:
    """Reads the counters of a guest that stands still. Callers hold the control lock."""

    def __init__(self, memory: GuestMemory, symbols: SymbolNames, abi: Mapping[str, int]) -> None:
        self._memory = memory
        self._symbols = symbols
        self._abi = abi

    def info(self) -> MemoryInfo:
        """Raises: MemoryFault where the guest has corrupted its lists."""
        zone, word = self._address("contig_zone"), self._memory.read_word
        stack_pages = self._abi["thread.size"] // PAGE_SIZE
        return MemoryInfo(
            total=word(zone + self._abi["zone.managed_pages"]),
            free=word(zone + self._abi["zone.nr_free"]),
            reserve=word(self._address("totalreserve_pages")),
            file=self._memory.read_u32(self._address("nr_file_pages")),
            slab=sum(cache.pages for cache in self.slabs()),
            kernel_stack=self._memory.read_u32(self._address("nr_threads")) * stack_pages,
        )

    def slabs(self) -> Iterator[SlabCache]:
        """All slab caches, oldest first. Raises: MemoryFault."""
        head, link = self._address("slab_caches"), self._abi["kmem_cache.list"]
        entry = self._memory.read_word(head)
        for _ in range(_MAX_CACHES):
            if entry == head:
                return
            yield self._slab(entry - link)
            entry = self._memory.read_word(entry)

    def _slab(self, cache: int) -> SlabCache:
        word, u32 = self._memory.read_word, self._memory.read_u32

        def field(name: str) -> int:
            return cache + self._abi[f"kmem_cache.{name}"]

        return SlabCache(
            name=self._memory.read_cstring(word(field("name")), _MAX_NAME).decode("ascii", "replace"),
            object_size=u32(field("size")),
            objects=word(field("nr_objects")),
            slabs=word(field("nr_slabs")),
            objects_per_slab=u32(field("objects")),
            pages_per_slab=1 << u32(field("order")),
        )

    def _address(self, name: str) -> int:
        return address_of(self._symbols, name)
