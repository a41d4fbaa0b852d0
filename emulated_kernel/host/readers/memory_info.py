"""The guest's memory, read from its page allocator and its slab caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.image.kallsyms import Kallsyms, address_of
from emulated_kernel.machine.guest_info import MemoryInfo, SlabCache
from emulated_kernel.machine.memory.memory import Memory

_MAX_CACHES = 1 << 12
"""Where a corrupted list is given up."""
_MAX_NAME = 64


class MemoryReader:
    """Reads the counters of a guest that stands still."""

    def __init__(self, memory: Memory, symbols: Kallsyms, abi: Mapping[str, int]) -> None:
        self._memory = memory
        self._symbols = symbols
        self._abi = abi

    def info(self) -> MemoryInfo:
        """Raises: MemoryFault (the guest has corrupted its lists)."""
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
            objects=word(field("nr_objects")),
            slabs=word(field("nr_slabs")),
            pages_per_slab=1 << u32(field("order")),
        )

    def _address(self, name: str) -> int:
        return address_of(self._symbols, name)
