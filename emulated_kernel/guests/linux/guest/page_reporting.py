"""PageReporting: gives the memory of the guest's free pages back to the host, after many were freed.

The guest is not informed. Free pages may lose their content, because the guest writes each page that it
allocates before it reads the page.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice

from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.kernel_offsets import KEEPING, ORDERS, KernelOffsets
from emulated_kernel.guests.linux.pc.ram import PAGE, LinuxMemory
from emulated_kernel.machine.traps.trap import MemoryFault

MANY = 512
"""Number of pages (2 MiB) that must have been freed before memory is given back to the host."""
_LIMIT = 4096
"""Maximum number of blocks that are given back at once, larger blocks first.

The limit bounds the delay of a request.
"""
_WORD = (1 << 64) - 1


class PageReporting:
    """Gives the memory of free pages back to the host, for a kernel with one NUMA node.

    It gives back nothing if this is unsafe for the kernel. In this case `high` keeps a value that no number
    of free pages reaches, and look() is never called.
    Precondition: no CPU is allocating memory; all tasks are in user mode or sleep.
    Mirrors: mm/page_reporting.c:page_reporting_process (v6.1).
    """

    def __init__(self, memory: LinuxMemory, root: int, facts: KernelOffsets) -> None:
        """Find the zones of a kernel. `root`: physical address of page tables that map the kernel's half."""
        self._memory = memory
        self._root = root
        self._offsets = facts.offsets
        self._frames: dict[int, int] = {}
        """Virtual address -> physical address of pages with the allocator's structures, which never move."""
        self.words = memory.words
        self.counter = 0
        """Index, among the 8-byte words of RAM, of the guest's counter of free pages in its largest zone."""
        self.low = 0
        """Minimum number of free pages at which look() has nothing to do."""
        self.high = _WORD
        """Maximum number of free pages at which look() has nothing to do."""
        self._zones: list[int] = []
        self._pages = 0
        symbols = facts.symbols
        with suppress(LookupError, MemoryFault):
            if not any(self._word(symbols[name]) & 0xFFFFFFFF for name in KEEPING if name in symbols):
                self._find(symbols)

    def _find(self, symbols: Mapping[str, int]) -> None:
        """Find the zones and their counters of free pages; set `counter`, `low` and `high`.

        Raises: LookupError (the kernel's structures are unknown), MemoryFault (the structures are damaged).
        """
        offsets = self._offsets
        node = symbols.get("contig_page_data") or self._word(symbols["node_data"])
        self._pages = self._word(symbols["vmemmap_base"])
        count = self._word(node + offsets["pglist_data.nr_zones"]) & 0xFF
        first = node + offsets["pglist_data.node_zones"]
        size = offsets["zone"]
        zones = range(first, first + count * size, size)
        present = {zone: self._word(zone + offsets["zone.present_pages"]) for zone in zones}
        self._zones = [zone for zone in zones if present[zone]]
        largest = max(self._zones, key=present.__getitem__, default=0)
        self.counter = self._memory.translate(self._root, largest + offsets["zone.vm_stat"]) >> 3
        self.low = self.words[self.counter]
        self.high = self.low + MANY

    def _word(self, va: int) -> int:
        page = va & -PAGE
        frame = self._frames.get(page)
        if frame is None:
            frame = self._memory.translate(self._root, page)
            self._frames[page] = frame
        return self.words[frame + va - page >> 3]

    def look(self) -> None:
        """Give memory back to the host if many pages were freed, and set `low` and `high`.

        The caller checks first that the number of free pages is outside of the range from `low` to `high`.
        """
        free = self.words[self.counter]
        if free > self.high:
            self.give_back()
        self.low = free
        self.high = free + MANY

    def give_back(self) -> None:
        """Give the memory of free pages back to the host.

        RAM is a private mapping of a file, the boot snapshot, so the pages then have the file's content.

        Hazard: the emulator keeps host addresses of these pages, and code that it translated from them. The
        addresses stay valid. The code is never executed again: the guest writes to a page before it runs code
        there, and the emulator drops the page's code at the write.
        """
        blocks = sorted(islice(self._blocks(), _LIMIT))
        while blocks:
            start, size = blocks.pop()
            while blocks and sum(blocks[-1]) == start:
                start, before = blocks.pop()
                size += before
            self._memory.ram.madvise(mmap.MADV_DONTNEED, start, size)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the physical address and size in bytes of each free block.

        End at the first block that contradicts the buddy allocator's structures.
        """
        offsets = self._offsets
        size_of_area = offsets["free_area"]
        size_of_page = offsets["page"]
        linked = offsets["page.lru"]
        order_at = offsets["page.private"]
        end = len(self._memory.ram) - HOST_SIZE
        with suppress(LookupError, MemoryFault):
            for order in reversed(range(offsets[ORDERS])):
                for zone in self._zones:
                    lists = zone + offsets["zone.free_area"] + order * size_of_area
                    size = PAGE << order
                    for head in range(lists, lists + size_of_area - 8, 16):
                        at = self._word(head)
                        while at != head:
                            page = at - linked
                            start = (page - self._pages) // size_of_page * PAGE
                            is_block = 0 <= start <= end - size and not start % size
                            if not is_block or self._word(page + order_at) != order:
                                return
                            yield start, size
                            at = self._word(at)
