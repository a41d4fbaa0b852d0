"""PageReporting: the host's pages behind the guest's free ones, given back when the guest has freed many.

The guest isn't told: what it allocates it writes before it reads it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice

from emulated_kernel.guests.linux.boot.boot_protocol import HOST_SIZE
from emulated_kernel.guests.linux.kernel_offsets import KEEPING, ORDERS, KernelOffsets
from emulated_kernel.guests.linux.pc.ram import PAGE, LinuxMemory

MANY = 512
"""Pages that the guest has freed since it had the fewest, when they are given back: 2 MiB."""
_LIMIT = 4096
"""Blocks that are given back at once, larger ones first: so long a request may wait."""
_WORD = (1 << 64) - 1


class PageReporting:
    """Free pages of a kernel with one node; `most` is out of reach where they are to be left alone.

    Needs a CPU that is in no allocation: its tasks are in user mode, or sleep. Mirrors: mm/page_reporting.c:
    page_reporting_process (v6.1)
    """

    def __init__(self, memory: LinuxMemory, root: int, facts: KernelOffsets) -> None:
        """`root`: page tables that the kernel's half is in."""
        self._memory = memory
        self._root = root
        self._offsets = facts.offsets
        self._frames: dict[int, int] = {}
        """Where pages of the kernel's own structures lie, which stay there."""
        self.words = memory.words
        self.counter = 0
        """Number of the word that counts the free pages of the largest zone."""
        self.fewest, self.most = 0, _WORD
        """While there are from these to these there is nothing to do."""
        self._zones: list[int] = []
        self._pages = 0
        symbols = facts.symbols
        with suppress(LookupError):
            if not any(self._word(symbols[name]) & 0xFFFFFFFF for name in KEEPING if name in symbols):
                self._find(symbols)

    def _find(self, symbols: Mapping[str, int]) -> None:
        """Raises: LookupError (a kernel that doesn't tell)."""
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
        self.fewest = self.words[self.counter]
        self.most = self.fewest + MANY

    def _word(self, va: int) -> int:
        page = va & -PAGE
        frame = self._frames.get(page)
        if frame is None:
            frame = self._frames[page] = self._memory.translate(self._root, page)
        return self.words[frame + va - page >> 3]

    def look(self) -> None:
        """For who has found that there are fewer or more than these."""
        free = self.words[self.counter]
        if free > self.most:
            self.give_back()
        self.fewest = free
        self.most = free + MANY

    def give_back(self) -> None:
        """What is behind them is from now on what RAM was mapped from.

        Hazard: the emulator has addresses of the host's, which stay valid, and code that it translated:
        the guest writes there before it runs there, and that is seen.
        """
        blocks = sorted(islice(self._blocks(), _LIMIT))
        while blocks:
            start, size = blocks.pop()
            while blocks and sum(blocks[-1]) == start:
                start, before = blocks.pop()
                size += before
            self._memory.ram.madvise(mmap.MADV_DONTNEED, start, size)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Physical address and size, as long as the buddy allocator's structures agree with each other."""
        offsets = self._offsets
        size_of_area = offsets["free_area"]
        size_of_page = offsets["page"]
        linked = offsets["page.lru"]
        order_at = offsets["page.private"]
        end = len(self._memory.ram) - HOST_SIZE
        with suppress(LookupError):
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
