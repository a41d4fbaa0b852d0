"""Reads the memory counters of the guest's page allocator and slab caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from emulated_kernel.image.kallsyms import Kallsyms, address_of
from emulated_kernel.machine.guest_info import MemoryInfo, SlabCache
from emulated_kernel.machine.memory.guest_reader import GuestReader
from emulated_kernel.util.abi import PAGE_SIZE

_MAX_CACHES = 1 << 12
_MAX_ORDER = 63
_MAX_NAME = 64


def read_memory(reader: GuestReader, symbols: Kallsyms, abi: Mapping[str, int]) -> MemoryInfo:
    """Return the memory counters of a stopped guest; the pages of damaged slab caches are not counted."""
    zone = address_of(symbols, "contig_zone")
    word = reader.word
    u32 = reader.u32
    return MemoryInfo(
        total=word(zone + abi["zone.managed_pages"]),
        free=word(zone + abi["zone.nr_free"]),
        reserve=word(address_of(symbols, "totalreserve_pages")),
        file=u32(address_of(symbols, "nr_file_pages")),
        slab=sum(cache.pages for cache in read_slabs(reader, symbols, abi)),
        kernel_stack=u32(address_of(symbols, "nr_threads")) * (abi["thread.size"] // PAGE_SIZE),
    )


def read_slabs(reader: GuestReader, symbols: Kallsyms, abi: Mapping[str, int]) -> Iterator[SlabCache]:
    """Yield all slab caches, oldest first, except damaged ones."""
    word = reader.word

    def read(entry: int) -> SlabCache:
        cache = entry - abi["kmem_cache.list"]
        name = reader.cstring(word(cache + abi["kmem_cache.name"]), _MAX_NAME)
        slabs = word(cache + abi["kmem_cache.nr_slabs"])
        # Hazard: a shift by a corrupted order could give a number of half a gigabyte.
        order = min(reader.u32(cache + abi["kmem_cache.order"]), _MAX_ORDER)
        objects = word(cache + abi["kmem_cache.nr_objects"])
        return SlabCache(name.decode("ascii", "replace"), objects, pages=slabs << order)

    return reader.each(reader.nodes(address_of(symbols, "slab_caches"), _MAX_CACHES), read)
