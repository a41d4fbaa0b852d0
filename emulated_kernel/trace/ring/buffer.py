"""One CPU's ring buffer, in Linux's layout, over memory that guest code writes too.

The memory (layout.py) is the truth; nothing is kept in Python.

Mirrors: kernel/trace/ring_buffer.c (v6.1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.dataclass import dataclass
from emulated_kernel.trace.ring.layout import (
    ANCHOR_SLOT,
    ASIDE,
    CHANGING,
    COMMIT_OVERRUN,
    CONTROL_SIZE,
    CONTROL_WORDS,
    COUNTERS,
    DROPPED,
    ENTRIES,
    ENTRIES_BYTES,
    FLAGS,
    HEAD_SLOT,
    LAST_OVERRUN,
    LOST_EVENTS,
    OVERRUN,
    READ,
    READ_BYTES,
    READ_STAMP,
    READER_PAGE,
    READER_READ,
    SLOTS,
    TAIL_ENTRIES,
    TAIL_PAGE,
    TAIL_SLOT,
    RingFlag,
    RingMemory,
)
from emulated_kernel.trace.ring.page import MISSED_EVENTS, MISSED_STORED, PAGE_DATA_SIZE, PAGE_HEADER_SIZE
from emulated_kernel.trace.ring.writer import RingWriter

_DISABLED = RingFlag.DISABLED.value
_MISSED_COUNT_SIZE = 8


class Consumed(NamedTuple):
    """An event that the reader took or looks at; time in clock units."""

    time_stamp: int
    record: bytes
    lost_events: int


@dataclass(frozen=True)
class RingStats:
    """Counters of a ring buffer as per_cpu/cpuN/stats names them; `size` in bytes."""

    entries: int
    overrun: int
    commit_overrun: int
    size: int
    oldest_event_ts: int
    dropped_events: int
    read_events: int


class RingBuffer(RingWriter):
    """A per-CPU ring buffer; one writer at a time, callers serialise readers against it."""

    __slots__ = ()

    # -- reading

    def __len__(self) -> int:
        """Events that can still be read."""
        words = self._words
        return words[ENTRIES] + words[TAIL_ENTRIES] - words[OVERRUN] - words[READ]

    def peek(self) -> Consumed | None:
        """The event that consume() would take; it can move the reader to the next sub-buffer.

        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_peek (v6.1)
        """
        found = self._next_event()
        return None if found is None else Consumed(found[0], found[1], self._words[LOST_EVENTS])

    def consume(self) -> Consumed | None:
        """Take the oldest event out; `lost_events` counts those overwritten just before it.

        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_consume (v6.1)
        """
        found = self._next_event()
        if found is None:
            return None
        words = self._words
        event = Consumed(found[0], found[1], words[LOST_EVENTS])
        words[LOST_EVENTS] = 0
        words[READ] += 1
        words[READ_BYTES] += found[2] - words[READER_READ]
        words[READER_READ] = found[2]
        words[READ_STAMP] = found[0]
        return event

    def _next_event(self) -> tuple[int, bytes, int] | None:
        words = self._words
        while self._take_reader_page():
            page, offset = words[READER_PAGE], words[READER_READ]
            end = self._commit(page)
            for found in self._reader.events(self._data(page), offset, end, words[READ_STAMP]):
                return found
            # Only padding is left on it.
            words[READ_BYTES] += end - offset
            words[READER_READ] = end
        return None

    def _take_reader_page(self) -> bool:
        """Have unread data on the reader page, swapping it with the head page; False: nothing to read.

        Mirrors: kernel/trace/ring_buffer.c:rb_get_reader_page (v6.1)
        """
        words, table, count = self._words, self._table, self.nr_pages
        reader = words[READER_PAGE]
        if words[READER_READ] < self._commit(reader):
            return True
        if not len(self) or reader == words[TAIL_PAGE]:
            return False
        head = words[HEAD_SLOT]
        taken = table[SLOTS + head]
        words[CHANGING] = 1
        self._clear_page(reader)
        # In this order: salvage.py can tell how far it came, if the process ends here.
        table[SLOTS + head] = reader
        words[READER_READ] = 0
        words[READER_PAGE] = taken
        words[READ_STAMP] = table[self._page_word(taken)]
        words[HEAD_SLOT] = (head + 1) % count
        words[ANCHOR_SLOT] = (head - 1) % count
        words[CHANGING] = 0
        if words[OVERRUN] != words[LAST_OVERRUN]:
            words[LOST_EVENTS] = words[OVERRUN] - words[LAST_OVERRUN]
            words[LAST_OVERRUN] = words[OVERRUN]
        return True

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield (time stamp, record) of every unread event, oldest first, consuming nothing."""
        words = self._words
        reader = words[READER_PAGE]
        decode = self._reader.events
        events = decode(self._data(reader), words[READER_READ], self._commit(reader), words[READ_STAMP])
        for stamp, record, _ in events:
            yield stamp, record
        for page in self._unread_pages():
            stamp = self._table[self._page_word(page)]
            for event in decode(self._data(page), 0, self._commit(page), stamp):
                yield event[0], event[1]

    def _unread_pages(self) -> list[int]:
        """Sub-buffers of the ring that were written and not read, oldest first."""
        words, count = self._words, self.nr_pages
        if words[TAIL_PAGE] == words[READER_PAGE]:
            return []
        head = words[HEAD_SLOT]
        used = (words[TAIL_SLOT] - head) % count + 1
        return [self._table[SLOTS + (head + i) % count] for i in range(used)]

    def read_page(self, *, full: bool = False) -> bytes | None:
        """Consume what is left of one sub-buffer as a page of 4096 bytes; None when nothing is there.

        `full`: a sub-buffer that is still written to doesn't count.
        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_read_page (v6.1)
        """
        if not self._take_reader_page():
            return None
        words = self._words
        if full and words[READER_PAGE] == words[TAIL_PAGE]:
            return None
        page, offset = words[READER_PAGE], words[READER_READ]
        end, stamp, data = self._commit(page), words[READ_STAMP], self._data(page)
        taken = [event[0] for event in self._reader.events(data, offset, end, stamp)]
        size = end - offset
        image = bytearray(PAGE_SIZE)
        image[PAGE_HEADER_SIZE : PAGE_HEADER_SIZE + size] = self._memory[data + offset : data + end]
        commit = size
        if lost := words[LOST_EVENTS]:
            commit |= MISSED_EVENTS
            if PAGE_DATA_SIZE - size >= _MISSED_COUNT_SIZE:
                commit |= MISSED_STORED
                at = PAGE_HEADER_SIZE + size
                image[at : at + _MISSED_COUNT_SIZE] = lost.to_bytes(_MISSED_COUNT_SIZE, "little")
            words[LOST_EVENTS] = 0
        image[:PAGE_HEADER_SIZE] = stamp.to_bytes(8, "little") + commit.to_bytes(8, "little")
        words[CHANGING] = 1
        words[READ] += len(taken)
        words[READ_BYTES] += size
        words[READER_READ] = end
        words[READ_STAMP] = taken[-1] if taken else stamp
        words[CHANGING] = 0
        return bytes(image)

    # -- control

    @property
    def size(self) -> int:
        """Bytes of events that the ring holds, the reader page left out."""
        return self.nr_pages * PAGE_DATA_SIZE

    @property
    def overwrite(self) -> bool:
        """Whether a full buffer loses its oldest events (else new ones are dropped)."""
        return bool(self._words[FLAGS] & RingFlag.OVERWRITE)

    @overwrite.setter
    def overwrite(self, value: bool) -> None:
        self._set_flag(RingFlag.OVERWRITE, value)

    @property
    def disabled(self) -> bool:
        """Whether write() refuses everything."""
        return bool(self._words[FLAGS] & RingFlag.DISABLED)

    @disabled.setter
    def disabled(self, value: bool) -> None:
        self._set_flag(RingFlag.DISABLED, value)
        if value:
            self._park(self._tail())
        elif self._tail():
            self._open_tail()

    def _set_flag(self, flag: RingFlag, value: bool) -> None:
        flags = self._words[FLAGS]
        self._words[FLAGS] = flags | flag.value if value else flags & ~flag.value

    @property
    def overrun(self) -> int:
        """Events overwritten before they were read."""
        return self._words[OVERRUN]

    @property
    def written(self) -> int:
        """Events written since it was emptied."""
        return self._words[ENTRIES] + self._words[TAIL_ENTRIES]

    @property
    def dirty_pages(self) -> int:
        """Full sub-buffers that nobody read yet; poll(2) with buffer_percent looks at it."""
        return max(0, len(self._unread_pages()) - 1)

    def stats(self) -> RingStats:
        """The counters; `oldest_event_ts` outlives a reset, as in Linux."""
        words = self._words
        page = words[TAIL_PAGE]
        if page != words[READER_PAGE]:
            page = self._table[SLOTS + words[HEAD_SLOT]]
        return RingStats(
            entries=len(self),
            overrun=words[OVERRUN],
            commit_overrun=words[COMMIT_OVERRUN],
            size=words[ENTRIES_BYTES] + self._tail() - words[READ_BYTES],
            oldest_event_ts=self._table[self._page_word(page)],
            dropped_events=words[DROPPED],
            read_events=words[READ],
        )

    def reset(self) -> None:
        """Forget all events and counters.

        Mirrors: kernel/trace/ring_buffer.c:rb_reset_cpu (v6.1)
        """
        words = self._words
        anchor = words[ANCHOR_SLOT]
        words[CHANGING] = 1
        words[HEAD_SLOT] = words[TAIL_SLOT] = anchor
        words[TAIL_PAGE] = self._table[SLOTS + anchor]
        self._clear_page(words[TAIL_PAGE])
        self._clear_page(words[READER_PAGE])
        words[READER_READ] = words[TAIL_ENTRIES] = 0
        for word in COUNTERS:
            words[word] = 0
        self._park(0)
        words[CHANGING] = 0

    def resize(self, memory: RingMemory | memoryview, nr_pages: int) -> None:
        """Move into other pages, under the same control block or another, with `nr_pages` sub-buffers.

        The oldest that don't fit are overrun. The pages so far are the caller's to release, when no guest
        code writes to them any more.
        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_resize (v6.1)
        """
        tail, old, table = self._tail(), self._words, self._table
        tail_entries = old[TAIL_ENTRIES]
        unread = self._unread_pages()
        for page in unread[:-nr_pages]:
            self._overrun_page(page)
        unread = unread[-nr_pages:]
        kept = [*unread, old[READER_PAGE]]
        images = [self._memory[self._data(page) - PAGE_HEADER_SIZE :][:PAGE_SIZE] for page in kept]
        entries = [table[self._entries_at + page] for page in kept]
        counters = old[:CONTROL_WORDS].tolist()
        # Guest code that knows another control block must come to the host.
        self._park(tail)
        old[FLAGS] = counters[FLAGS] | _DISABLED
        place = memory if isinstance(memory, RingMemory) else RingMemory(memory)
        control = place.control or place.pages[:CONTROL_SIZE]
        # The old pages count until the new ones are whole, even if the process ends here.
        draft = replace(place, control=memoryview(bytearray(CONTROL_SIZE)))
        self._format(draft, nr_pages, counters[FLAGS])
        words = self._words
        for word in (READER_READ, ASIDE, *COUNTERS):
            words[word] = counters[word]
        numbers = [*range(len(unread)), nr_pages]
        for page, image, count in zip(numbers, images, entries, strict=True):
            at = self._data(page) - PAGE_HEADER_SIZE
            self._memory[at : at + PAGE_SIZE] = image
            self._table[self._entries_at + page] = count
        # Without an unread page the tail is the reader page, and the next slot is the head.
        words[TAIL_PAGE] = len(unread) - 1 if unread else nr_pages
        words[TAIL_SLOT] = (len(unread) - 1) % nr_pages
        words[TAIL_ENTRIES] = tail_entries
        self._park(tail)
        if tail and not counters[FLAGS] & _DISABLED:
            self._open_tail()
        control.cast("B")[:CONTROL_SIZE] = words.cast("B")[:CONTROL_SIZE]
        self._attach(place, nr_pages)
