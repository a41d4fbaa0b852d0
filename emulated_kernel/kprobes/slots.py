"""Insn slots: where copies of probed instructions are run out of line."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from emulated_kernel.abi import PAGE_SIZE, GuestAddr
from emulated_kernel.errors import KernelError
from emulated_kernel.machine.traps import HardwareError

_ALIGN = 16


class SlotText(Protocol):
    """What slots need of the machine's text; freed memory is filled with breakpoints."""

    def alloc_text(self, size: int) -> int: ...

    def free_text(self, va: int) -> None: ...

    def poke(self, va: int, data: bytes, /) -> None: ...


@dataclass(eq=False)
class SlotPage:
    """A page of slots. Mirrors: kernel/kprobes.c:struct kprobe_insn_page (v6.1)."""

    address: int
    clean: list[int]
    """Addresses of slots that nothing uses."""
    dirty: list[int] = field(default_factory=list)
    """Given back, but somebody may still be on his way through."""


class InsnSlots:
    """Slots of one size in pages of executable memory, and the collector of their garbage.

    Mirrors: kernel/kprobes.c:struct kprobe_insn_cache (v6.1).
    """

    def __init__(self, text: SlotText, size: int, breakpoint_: bytes) -> None:
        """`size`: bytes of a slot, at least."""
        self._text = text
        self._size = -(-size // _ALIGN) * _ALIGN
        self._empty = breakpoint_ * (self._size // len(breakpoint_))
        self.slots_per_page = PAGE_SIZE // self._size
        self._pages: dict[SlotPage, None] = {}
        self._page_of: dict[int, SlotPage] = {}
        self._garbage = 0
        self.is_quiescent: Callable[[Sequence[tuple[int, int]]], bool] = lambda _spans: True
        """Whether no task was interrupted, or comes back, within the ranges."""
        self.on_the_way: Callable[[], Sequence[tuple[int, int]]] = lambda: ()
        """Where a CPU may stand that goes on to a slot."""

    @property
    def used(self) -> int:
        """Slots that hold a copy."""
        return len(self._page_of) - self._garbage

    @property
    def garbage(self) -> int:
        """Slots that wait for the collector."""
        return self._garbage

    @property
    def pages(self) -> int:
        """Pages of executable memory."""
        return len(self._pages)

    def get(self) -> GuestAddr:
        """Reserve a slot. Raises: KernelError ENOMEM.

        Mirrors: kernel/kprobes.c:__get_insn_slot (v6.1).
        """
        page = self._page_with_room()
        if page is None and self._garbage and self.collect():
            page = self._page_with_room()
        if page is None:
            page = self._new_page()
        slot = page.clean.pop()
        self._page_of[slot] = page
        return GuestAddr(slot)

    def put(self, slot: int, *, dirty: bool = False) -> None:
        """Give a slot back; a `dirty` one is used again only when nobody can be in it.

        Mirrors: kernel/kprobes.c:__free_insn_slot (v6.1).
        """
        page = self._page_of[slot]
        if not dirty:
            self._reclaim(page, slot)
            return
        page.dirty.append(slot)
        self._garbage += 1
        if self._garbage > self.slots_per_page:
            self.collect()

    def collect(self) -> bool:
        """Reclaim the garbage; False while somebody may be in it.

        Mirrors: kernel/kprobes.c:collect_garbage_slots (v6.1), which waits instead.
        """
        pages = [page for page in self._pages if page.dirty]
        spans = [(slot, slot + self._size) for page in pages for slot in page.dirty]
        if not self.is_quiescent([*spans, *self.on_the_way()]):
            return False
        for page in pages:
            dirty, page.dirty = page.dirty, []
            self._garbage -= len(dirty)
            for slot in dirty:
                self._reclaim(page, slot)
        return True

    def _page_with_room(self) -> SlotPage | None:
        return next((page for page in reversed(self._pages) if page.clean), None)

    def _new_page(self) -> SlotPage:
        try:
            address = self._text.alloc_text(PAGE_SIZE)
        except HardwareError as error:
            raise KernelError(errno.ENOMEM, "no executable memory left for insn slots") from error
        slots = range(address, address + self.slots_per_page * self._size, self._size)
        page = SlotPage(address, [*reversed(slots)])
        self._pages[page] = None
        return page

    def _reclaim(self, page: SlotPage, slot: int) -> None:
        """Mirrors: kernel/kprobes.c:collect_one_slot (v6.1): one empty page is kept."""
        del self._page_of[slot]
        self._text.poke(slot, self._empty)
        page.clean.append(slot)
        if len(page.clean) == self.slots_per_page and len(self._pages) > 1:
            del self._pages[page]
            self._text.free_text(page.address)
