"""The guest's memory, read from its page allocator and its slab caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from emulated_kernel.image.kallsyms import Kallsyms, address_of
from emulated_kernel.machine.guest_info import MemoryInfo, SlabCache
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.util.abi import PAGE_SIZE

_MAX_CACHES = 1 << 12
"""Maximum number of list entries that are read; a longer list is corrupted."""
_MAX_ORDER = 63
_MAX_NAME = 64


def read_memory(memory: Memory, symbols: Kallsyms, abi: Mapping[str, int]) -> MemoryInfo:
    """Return the memory counters of a stopped guest.

    Raises: MemoryFault (the guest has corrupted its lists).
    """
    zone = address_of(symbols, "contig_zone")
    word = memory.read_word
    u32 = memory.read_u32
    return MemoryInfo(
        total=word(zone + abi["zone.managed_pages"]),
        free=word(zone + abi["zone.nr_free"]),
        reserve=word(address_of(symbols, "totalreserve_pages")),
        file=u32(address_of(symbols, "nr_file_pages")),
        slab=sum(cache.pages for cache in read_slabs(memory, symbols, abi)),
        kernel_stack=u32(address_of(symbols, "nr_threads")) * (abi["thread.size"] // PAGE_SIZE),
    )


def read_slabs(memory: Memory, symbols: Kallsyms, abi: Mapping[str, int]) -> Iterator[SlabCache]:
    """Yield all slab caches, oldest first. Raises: MemoryFault (the guest has corrupted its lists)."""
    head = address_of(symbols, "slab_caches")
    word = memory.read_word
    entry = word(head)
    for _ in range(_MAX_CACHES):
        if entry == head:
            return
        cache = entry - abi["kmem_cache.list"]
        name = memory.read_cstring(word(cache + abi["kmem_cache.name"]), _MAX_NAME)
        slabs = word(cache + abi["kmem_cache.nr_slabs"])
        # Hazard: a shift by a corrupted order could give a number of half a gigabyte.
        order = min(memory.read_u32(cache + abi["kmem_cache.order"]), _MAX_ORDER)
        objects = word(cache + abi["kmem_cache.nr_objects"])
        yield SlabCache(name.decode("ascii", "replace"), objects, pages=slabs << order)
        entry = word(entry)
