"""Insn slots: executable memory for out-of-line copies of probed instructions."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

from emulated_kernel.kprobes.codegen.deferred_free import DeferredFree
from emulated_kernel.machine.text.text import Text
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import PAGE_SIZE, GuestAddr
from emulated_kernel.util.errors import KernelError

_ALIGN = 16


class InsnSlots:
    """Slots of one size in pages of executable memory.

    Mirrors: kernel/kprobes.c:struct kprobe_insn_cache (v6.1).
    """

    def __init__(
        self, text: Text, size: int, breakpoint_: bytes, garbage: DeferredFree, lead: bytes = b""
    ) -> None:
        """Create an empty cache. `size`: minimum size of a slot in bytes, without `lead`.

        `lead`: code that precedes the copy in each slot. The address of a slot is that of the copy.
        `breakpoint_`: instruction that fills freed slots. `garbage`: tells when no CPU can be in a freed
        slot.
        """
        self._text = text
        self._waiting = garbage
        self._lead = lead
        self._size = -(-(len(lead) + size) // _ALIGN) * _ALIGN
        self._empty = breakpoint_ * (self._size // len(breakpoint_))
        self.slots_per_page = PAGE_SIZE // self._size
        self._pages: dict[int, list[int]] = {}
        """Address of each page -> its unused slots.

        Mirrors: kernel/kprobes.c:struct kprobe_insn_page (v6.1).
        """
        self._page_of: dict[int, int] = {}
        self._garbage = 0

    @property
    def used(self) -> int:
        """Number of slots in use. Freed slots that wait until no CPU can be in them do not count."""
        return len(self._page_of) - self._garbage

    @property
    def garbage(self) -> int:
        """Number of freed slots that wait until no CPU can be in them."""
        return self._garbage

    @property
    def pages(self) -> int:
        """Number of pages of executable memory that contain slots."""
        return len(self._pages)

    def get(self) -> GuestAddr:
        """Reserve a slot and return its address. Raises: KernelError ENOMEM.

        Mirrors: kernel/kprobes.c:__get_insn_slot (v6.1).
        """
        page = self._page_with_free_slot()
        if page is None and self._garbage:
            self._waiting.collect()
            page = self._page_with_free_slot()
        if page is None:
            page = self._new_page()
        slot = self._pages[page].pop()
        self._page_of[slot] = page
        if self._lead:
            self._text.poke(slot - len(self._lead), self._lead)
        return GuestAddr(slot)

    def give_back(self, slot: int) -> None:
        """Free a slot to which no copy was written."""
        if self._lead:
            self.free(slot)
        else:
            self._put_back(slot)

    def free(self, slot: int, *, dirty: bool = False, on_free: Callable[[], None] = lambda: None) -> None:
        """Free a slot: at once, or as soon as no CPU can be in it any more.

        `dirty`: whether a CPU may be in the slot. If not, the slot can be reused at once. `on_free` is called
        when the slot can be reused.
        Mirrors: kernel/kprobes.c:__free_insn_slot (v6.1).
        """
        if not dirty:
            self._reclaim(slot, on_free)
            return
        self._garbage += 1
        start = slot - len(self._lead)
        self._waiting.add((start, start + self._size), partial(self._collect, slot, on_free))
        if self._garbage > self.slots_per_page:
            self._waiting.collect()

    def _collect(self, slot: int, on_free: Callable[[], None]) -> None:
        self._garbage -= 1
        self._reclaim(slot, on_free)

    def _page_with_free_slot(self) -> int | None:
        for page, clean in reversed(self._pages.items()):
            if clean:
                return page
        return None

    def _new_page(self) -> int:
        try:
            address = self._text.alloc_text(PAGE_SIZE)
        except HardwareError as error:
            raise KernelError(errno.ENOMEM, "no executable memory left for insn slots") from error
        first = address + len(self._lead)
        slots = range(first, first + self.slots_per_page * self._size, self._size)
        self._pages[address] = [*reversed(slots)]
        return address

    def _reclaim(self, slot: int, on_free: Callable[[], None]) -> None:
        """Empty a slot and make it available again. A page without used slots is freed, but not the last one.

        Mirrors: kernel/kprobes.c:collect_one_slot (v6.1).
        """
        on_free()
        self._text.poke(slot - len(self._lead), self._empty)
        self._put_back(slot)

    def _put_back(self, slot: int) -> None:
        page = self._page_of.pop(slot)
        clean = self._pages[page]
        clean.append(slot)
        if len(clean) == self.slots_per_page and len(self._pages) > 1:
            del self._pages[page]
            self._text.free_text(page)
