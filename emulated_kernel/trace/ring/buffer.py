"""RingBuffer: a CPU's ring buffer in Linux's layout, in memory that guest code also writes.

All state of the buffer is in that memory, in the layout that ring_layout.py describes.

Mirrors: kernel/trace/ring_buffer.c (v6.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emulated_kernel.trace.ring.buffer_page import (
    DELTA_BITS,
    MAX_TYPE_LEN,
    MISSED_EVENTS,
    MISSED_STORED,
    PADDING,
    PAGE_HEADER_SIZE,
    STAMP_MASK,
    TIME_EVENT_SIZE,
    TIME_EXTEND,
)
from emulated_kernel.trace.ring.ring_layout import (
    CONTROL_SIZE,
    COUNTERS,
    SLOTS,
    RingControl,
    RingFlag,
    RingMemory,
    RingShape,
)
from emulated_kernel.trace.ring.writer import RingWriter
from emulated_kernel.util.fast_dataclass import dataclass, replace
from emulated_kernel.util.fast_named_tuple import NamedTuple

_DISABLED = RingFlag.DISABLED.value
_MISSED_COUNT_SIZE = 8
_SMALLEST = 4
"""Minimum size of an event in bytes, used to compute the maximum number of events in a buffer."""


class Consumed(NamedTuple):
    """An event that consume() or peek() has returned."""

    time_stamp: int
    """Time of the event, in units of the trace clock."""
    record: bytes
    """The entry: common fields and payload."""
    lost_events: int
    """Number of events that were overwritten just before this event."""


@dataclass(frozen=True)
class RingStats:
    """Counters of a ring buffer, named as in per_cpu/cpuN/stats, except `size`, which is `bytes` there."""

    entries: int
    overrun: int
    commit_overrun: int
    size: int
    oldest_event_ts: int
    dropped_events: int
    read_events: int


class RingBuffer(RingWriter):
    """A CPU's ring buffer. Callers ensure that only one reader or writer uses the buffer at a time."""

    __slots__ = ()

    # -- reading

    def __len__(self) -> int:
        """Return the number of unread events, at most the number that the pages can hold.

        Hazard: guest code may have damaged the counters, so the result is limited.
        """
        control = self._control
        count = control.entries + control.tail_entries - control.overrun - control.read
        return min(max(count, 0), (self.nr_pages + 1) * self._capacity // _SMALLEST)

    def peek(self) -> Consumed | None:
        """Return the event that consume() would return, or None if there is no event.

        The call may swap the reader page with the head page.
        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_peek (v6.1).
        """
        found = self._next_event()
        return None if found is None else Consumed(found[0], found[1], self._control.lost_events)

    def consume(self) -> Consumed | None:
        """Remove the oldest event and return it, or None if there is no event.

        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_consume (v6.1).
        """
        found = self._next_event()
        if found is None:
            return None
        control = self._control
        event = Consumed(found[0], found[1], control.lost_events)
        control.lost_events = 0
        control.read += 1
        control.read_bytes += found[2] - control.reader_read
        control.reader_read = found[2]
        control.read_stamp = found[0]
        return event

    def _next_event(self) -> tuple[int, bytes, int] | None:
        control = self._control
        for _ in range(self.nr_pages + 2):
            if not self._take_reader_page():
                break
            page = control.reader_page
            offset = control.reader_read
            end = self._commit(page)
            for found in self._events(page, offset, control.read_stamp):
                return found
            # Only padding is left on this page.
            control.read_bytes += end - offset
            control.reader_read = end
        return None

    def _take_reader_page(self) -> bool:
        """Swap the reader page with the head page if all data of the reader page was consumed.

        Return True if the reader page has unread data now, or False if the buffer has none.
        Mirrors: kernel/trace/ring_buffer.c:rb_get_reader_page (v6.1).
        """
        self.check()
        control = self._control
        table = self._table
        count = self.nr_pages
        reader = control.reader_page
        if control.reader_read < self._commit(reader):
            return True
        if not len(self) or reader == control.tail_page:
            return False
        head = control.head_slot
        taken = self._page_in(head)
        if taken == reader or (head == control.tail_slot) is not (taken == control.tail_page):
            self.empty_damaged()
            return False
        control.changing = 1
        self._clear_page(reader)
        # Hazard: the process may end here. The order of these assignments lets recover.py complete the swap.
        table[SLOTS + head] = reader
        control.reader_read = 0
        control.reader_page = taken
        control.read_stamp = table[self._page_word(taken)]
        control.head_slot = (head + 1) % count
        control.anchor_slot = (head - 1) % count
        control.changing = 0
        if control.overrun != control.last_overrun:
            control.lost_events = control.overrun - control.last_overrun
            control.last_overrun = control.overrun
        return True

    @property
    def oldest(self) -> int:
        """Sequence number of the oldest unread event. The first event after a reset has number 0."""
        control = self._control
        return control.overrun + control.read

    @property
    def reader_state(self) -> tuple[int, int, int]:
        """Count of overwritten events, count of consumed events, and number of the reader page.

        While the value is unchanged, each unread sub-buffer keeps its index (see unread_count()), and each
        unread event keeps its index in the sub-buffer.
        """
        control = self._control
        return control.overrun, control.read, control.reader_page

    def unread_count(self, index: int) -> int:
        """Return the number of unread events of a sub-buffer.

        Index 0 is the reader page, and index 1 is the oldest unread sub-buffer in the ring.
        """
        control = self._control
        if index == 0:
            return len(self.unread_events(0))
        page = self._unread_page(index)
        return control.tail_entries if page == control.tail_page else self._table[self._entries_at + page]

    def unread_events(self, index: int) -> list[tuple[int, bytes]]:
        """Return time stamp and record of each unread event of a sub-buffer.

        `index`: 0 for the reader page; see unread_count().
        """
        control = self._control
        if index == 0:
            events = self._events(control.reader_page, control.reader_read, control.read_stamp)
        else:
            page = self._unread_page(index)
            events = self._events(page, 0, self._table[self._page_word(page)])
        return [(stamp, record) for stamp, record, _ in events]

    def _unread_page(self, index: int) -> int:
        return self._page_in((self._control.head_slot + index - 1) % self.nr_pages)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield (time stamp, record) of each unread event, oldest first, without consuming the events."""
        self.check()
        control = self._control
        for stamp, record, _ in self._events(control.reader_page, control.reader_read, control.read_stamp):
            yield stamp, record
        for page in self._unread_pages():
            for stamp, record, _ in self._events(page, 0, self._table[self._page_word(page)]):
                yield stamp, record

    def _events(self, page: int, offset: int, stamp: int) -> Iterator[tuple[int, bytes, int]]:
        """Yield (time stamp, record, end offset) of each event of the sub-buffer `page`, from `offset` on.

        Both offsets are in bytes, from the start of the page's data. `stamp` is the time to which the first
        event's time delta is added. Records are padded to a multiple of four bytes, because the format stores
        lengths in units of four. An event that exceeds the page is damaged, and ends the iteration.
        """
        words = self._words32
        memory = self._memory
        data = self._data(page)
        end = self._commit(page)
        while offset < end:
            at = data + offset
            header = words[at >> 2]
            kind = header & 31
            if not 0 < kind < PADDING and offset + TIME_EVENT_SIZE > end:
                return
            if kind <= MAX_TYPE_LEN:
                stamp += header >> 5
                if kind:
                    start = at + 4
                    stop = start + kind * 4
                else:
                    start = at + 8
                    stop = at + 4 + words[(at + 4) >> 2]
                offset = stop - data
                if offset > end:
                    return
                yield stamp, bytes(memory[start:stop]), offset
            elif kind == PADDING:
                if not header >> 5:
                    return
                offset += 4 + words[(at + 4) >> 2]
            else:
                value = (header >> 5) | words[(at + 4) >> 2] << DELTA_BITS
                stamp = stamp + value if kind == TIME_EXTEND else (stamp & ~STAMP_MASK) | value
                offset += TIME_EVENT_SIZE

    def _unread_pages(self) -> list[int]:
        """Return the numbers of the ring's sub-buffers that hold unread events, oldest first."""
        control = self._control
        count = self.nr_pages
        if control.tail_page == control.reader_page:
            return []
        head = control.head_slot
        used = (control.tail_slot - head) % count + 1
        return [self._page_in((head + i) % count) for i in range(used)]

    def read_page(self, *, full: bool = False) -> bytes | None:
        """Consume the unread events of one sub-buffer, and return them as a page of 4096 << order bytes.

        Return None if there is no unread event, or if `full` is set and all unread events are on the tail
        page, which is not full.
        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_read_page (v6.1).
        """
        if not self._take_reader_page():
            return None
        control = self._control
        if full and control.reader_page == control.tail_page:
            return None
        page = control.reader_page
        offset = control.reader_read
        end = self._commit(page)
        stamp = control.read_stamp
        data = self._data(page)
        taken = [event[0] for event in self._events(page, offset, stamp)]
        size = end - offset
        image = bytearray(self.page_size)
        image[PAGE_HEADER_SIZE : PAGE_HEADER_SIZE + size] = self._memory[data + offset : data + end]
        commit = size
        if lost := control.lost_events:
            commit |= MISSED_EVENTS
            if self._capacity - size >= _MISSED_COUNT_SIZE:
                commit |= MISSED_STORED
                at = PAGE_HEADER_SIZE + size
                image[at : at + _MISSED_COUNT_SIZE] = lost.to_bytes(_MISSED_COUNT_SIZE, "little")
            control.lost_events = 0
        image[:PAGE_HEADER_SIZE] = stamp.to_bytes(8, "little") + commit.to_bytes(8, "little")
        control.changing = 1
        control.read += len(taken)
        control.read_bytes += size
        control.reader_read = end
        control.read_stamp = taken[-1] if taken else stamp
        control.changing = 0
        return bytes(image)

    # -- control

    @property
    def shape(self) -> RingShape:
        """Number and order of the sub-buffers."""
        return RingShape(self.nr_pages, self.order)

    @property
    def size(self) -> int:
        """Capacity of the ring in bytes, without the reader page."""
        return self.nr_pages * self._capacity

    @property
    def overwrite(self) -> bool:
        """Whether a full buffer overwrites its oldest events. If not, it drops new events."""
        return bool(self._control.flags & RingFlag.OVERWRITE)

    @overwrite.setter
    def overwrite(self, value: bool) -> None:
        self._set_flag(RingFlag.OVERWRITE, value)

    @property
    def disabled(self) -> bool:
        """Whether write() drops every event."""
        return bool(self._control.flags & RingFlag.DISABLED)

    @disabled.setter
    def disabled(self, value: bool) -> None:
        self.check()
        self._set_flag(RingFlag.DISABLED, value)
        if value:
            self._park(self._tail())
        elif self._tail():
            self._open_tail()

    def _set_flag(self, flag: RingFlag, value: bool) -> None:
        flags = self._control.flags
        self._control.flags = flags | flag.value if value else flags & ~flag.value

    @property
    def written(self) -> int:
        """Number of events written since the buffer was emptied."""
        return self._control.entries + self._control.tail_entries

    @property
    def has_recorded(self) -> bool:
        """Whether an event was written since the buffer's creation."""
        return self._has_recorded or self.written > 0

    @property
    def dirty_pages(self) -> int:
        """Number of full sub-buffers with unread events in the ring.

        poll(2) compares this number with buffer_percent.
        """
        self.check()
        return max(0, len(self._unread_pages()) - 1)

    def stats(self) -> RingStats:
        """Return the counters of the buffer. As in Linux, a reset does not change `oldest_event_ts`."""
        self.check()
        control = self._control
        page = control.tail_page
        if page != control.reader_page:
            page = self._page_in(control.head_slot)
        return RingStats(
            entries=len(self),
            overrun=control.overrun,
            commit_overrun=control.commit_overrun,
            size=control.entries_bytes + self._tail() - control.read_bytes,
            oldest_event_ts=self._table[self._page_word(page)],
            dropped_events=control.dropped,
            read_events=control.read,
        )

    def reset(self) -> None:
        """Empty the buffer and reset its counters.

        Mirrors: kernel/trace/ring_buffer.c:rb_reset_cpu (v6.1).
        """
        self.generation += 1
        self.check()
        self._has_recorded = self.has_recorded
        control = self._control
        anchor = control.anchor_slot % self.nr_pages
        control.changing = 1
        control.head_slot = anchor
        control.tail_slot = anchor
        control.tail_page = self._page_in(anchor)
        self._clear_page(control.tail_page)
        self._clear_page(control.reader_page)
        control.reader_read = 0
        control.tail_entries = 0
        for word in COUNTERS:
            setattr(control, word, 0)
        self._park(0)
        control.changing = 0

    def retire(self) -> None:
        """Mark all cursors on the buffer as stale, because the buffer's memory will get another use."""
        self.generation += 1

    def kept(self, nr_pages: int) -> list[bytes]:
        """Return copies of the newest `nr_pages` unread sub-buffers, and then of the reader page.

        They are what resize() keeps. The sub-buffers are in the order of their age, oldest first.
        """
        self.check()
        pages = [*self._unread_pages()[-nr_pages:], self._control.reader_page]
        return [bytes(self._image(page)) for page in pages]

    def _image(self, page: int) -> memoryview:
        """Return a live view of the sub-buffer with number `page`, including its header."""
        return self._memory[self._data(page) - PAGE_HEADER_SIZE :][: self.page_size]

    def resize(
        self, place: RingMemory, nr_pages: int, images: Sequence[bytes | memoryview] | None = None
    ) -> None:
        """Move the events to the memory `place`, which becomes a ring of `nr_pages` sub-buffers.

        `place` may have the same control block or another one. If not all events fit, those of the oldest
        sub-buffers are dropped, and count as overwritten. The caller must release the old pages after guest
        code has stopped writing to them.
        `images`: the result of kept(nr_pages) if `place` overlaps the old pages; otherwise None.
        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_resize (v6.1).
        """
        self.check()
        tail = self._tail()
        old = self._control
        table = self._table
        unread = self._unread_pages()
        for page in unread[:-nr_pages]:
            self._overrun_page(page)
        unread = unread[-nr_pages:]
        kept = [*unread, old.reader_page]
        entries = [table[self._entries_at + page] for page in kept]
        before = RingControl.from_buffer_copy(self.place.control_block)
        # From now on, guest code that uses the old control block must call the host, which drops its event.
        self._park(tail)
        old.flags = before.flags | _DISABLED
        if images is None:
            # Hazard: the process may end here. The old pages stay valid until the new pages are complete.
            images = [self._image(page) for page in kept]
        else:
            # Hazard: the process may end here. Recovery must not read the new pages as the old ones.
            self.place.control_block[:] = bytes(CONTROL_SIZE)
        draft = replace(place, control=memoryview(bytearray(CONTROL_SIZE)))
        self._format(draft, nr_pages, before.flags)
        control = self._control
        for word in ("reader_read", "aside", *COUNTERS):
            setattr(control, word, getattr(before, word))
        numbers = [*range(len(unread)), nr_pages]
        for page, image, count in zip(numbers, images, entries, strict=True):
            at = self._data(page) - PAGE_HEADER_SIZE
            self._memory[at : at + self.page_size] = image
            self._table[self._entries_at + page] = count
        # If no page of the ring is unread, the tail is the reader page, and the next slot is the head.
        control.tail_page = len(unread) - 1 if unread else nr_pages
        control.tail_slot = (len(unread) - 1) % nr_pages
        control.tail_entries = before.tail_entries
        self._park(tail)
        if tail and not before.flags & _DISABLED:
            self._open_tail()
        place.control_block[:] = draft.control_block
        self._attach(place, nr_pages)
