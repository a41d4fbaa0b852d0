"""One CPU's ring buffer, in Linux's layout, over memory that guest code can write too.

The memory (ring_layout.py) is the truth; nothing is kept in Python.

Mirrors: kernel/trace/ring_buffer.c (v6.1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.trace.ring_layout import (
    ANCHOR_SLOT,
    COMMIT_OVERRUN,
    DROPPED,
    ENTRIES,
    ENTRIES_BYTES,
    FLAGS,
    HEAD_SLOT,
    LAST_OVERRUN,
    LOST_EVENTS,
    MIN_PAGES,
    NR_PAGES,
    OVERRUN,
    READ,
    READ_BYTES,
    READ_STAMP,
    READER_PAGE,
    READER_READ,
    SLOTS,
    TAIL_PAGE,
    TAIL_SLOT,
    WRITE_STAMP,
    RingFlag,
    data_start,
    memory_size,
)
from emulated_kernel.trace.ring_page import (
    COMMIT_MASK,
    DELTA_BITS,
    DELTA_MASK,
    MAX_DATA_SIZE,
    MAX_SMALL_DATA,
    MISSED_EVENTS,
    MISSED_STORED,
    PADDING,
    PAGE_DATA_SIZE,
    PAGE_HEADER_SIZE,
    STAMP_MASK,
    TIME_EVENT_SIZE,
    TIME_EXTEND,
    TIME_STAMP,
    PageReader,
    event_size,
)

_OVERWRITE = RingFlag.OVERWRITE.value
_DISABLED = RingFlag.DISABLED.value
_TWO_WORDS = Struct("<II")
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


class RingBuffer:
    """A per-CPU ring buffer; one writer at a time, callers serialise readers against it."""

    __slots__ = ("_entries_at", "_memory", "_nr_pages", "_pages", "_reader", "_start", "_words", "_words32")

    def __init__(self, memory: memoryview, nr_pages: int, *, overwrite: bool = True) -> None:
        """Format `memory` (at least memory_size(nr_pages) writable bytes) as an empty buffer."""
        self._format(memory, nr_pages, RingFlag.OVERWRITE.value if overwrite else 0)

    def _format(self, memory: memoryview, nr_pages: int, flags: int) -> None:
        if nr_pages < MIN_PAGES:
            raise ValueError(f"a ring buffer has at least {MIN_PAGES} pages")
        self._attach(memory, nr_pages)
        words = self._words
        used = SLOTS + 2 * nr_pages + 1
        words[:used] = memoryview(bytes(used * 8)).cast("Q")
        words[NR_PAGES] = nr_pages
        words[FLAGS] = flags
        words[READER_PAGE] = nr_pages
        for slot in range(nr_pages):
            words[SLOTS + slot] = slot
        for page in range(nr_pages + 1):
            words[self._page_word(page)] = 0
            words[self._page_word(page) + 1] = 0

    def _attach(self, memory: memoryview, nr_pages: int) -> None:
        memory = memory.cast("B")[: memory_size(nr_pages)]
        self._memory = memory
        self._words = memory.cast("Q")
        self._words32 = memory.cast("I")
        self._nr_pages = nr_pages
        self._start = data_start(nr_pages)
        self._entries_at = SLOTS + nr_pages
        self._reader = PageReader(memory, self._words32)

    def _page_word(self, page: int) -> int:
        return (self._start + page * PAGE_SIZE) >> 3

    def _data(self, page: int) -> int:
        return self._start + page * PAGE_SIZE + PAGE_HEADER_SIZE

    def _commit(self, page: int) -> int:
        return self._words[self._page_word(page) + 1] & COMMIT_MASK

    # -- writing

    def write(self, payload: bytes, time_stamp: int) -> bool:
        """Append one event; False when it was dropped, is too large or recording is off.

        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_write (v6.1)
        """
        words = self._words
        size = len(payload)
        if size > MAX_DATA_SIZE or words[FLAGS] & _DISABLED:
            return False
        length = event_size(size)
        page = words[TAIL_PAGE]
        base = self._start + page * PAGE_SIZE
        tail = words[(base >> 3) + 1] & COMMIT_MASK
        delta = time_stamp - words[WRITE_STAMP] if tail else 0
        extra = TIME_EVENT_SIZE if delta >> DELTA_BITS else 0
        if tail + length + extra > PAGE_DATA_SIZE:
            if not self.move_tail():
                return False
            page = words[TAIL_PAGE]
            base = self._start + page * PAGE_SIZE
            tail = delta = extra = 0
        if not tail:
            words[base >> 3] = time_stamp
        at = base + PAGE_HEADER_SIZE + tail
        if extra:
            self._put_time(at, delta, time_stamp)
            at += TIME_EVENT_SIZE
            delta = 0
        self._put_event(at, length, delta, payload)
        words[(base >> 3) + 1] = tail + length + extra
        words[WRITE_STAMP] = time_stamp
        words[ENTRIES] += 1
        words[ENTRIES_BYTES] += length + extra
        words[self._entries_at + page] += 1
        return True

    def _put_event(self, at: int, length: int, delta: int, payload: bytes) -> None:
        memory, size = self._memory, len(payload)
        self._words32[(at + length - 4) >> 2] = 0
        if size > MAX_SMALL_DATA:
            _TWO_WORDS.pack_into(memory, at, delta << 5, length - 4)
            memory[at + 8 : at + 8 + size] = payload
        else:
            self._words32[at >> 2] = delta << 5 | (length - 4) >> 2
            memory[at + 4 : at + 4 + size] = payload

    def _put_time(self, at: int, delta: int, time_stamp: int) -> None:
        # Deviates: a clock that went back (a task that moved to a vCPU behind) is stored as an absolute
        # time; Linux stores that only for events that interrupt one another.
        kind, value = (TIME_EXTEND, delta) if delta > 0 else (TIME_STAMP, time_stamp & STAMP_MASK)
        _TWO_WORDS.pack_into(self._memory, at, kind | (value & DELTA_MASK) << 5, value >> DELTA_BITS)

    def move_tail(self) -> bool:
        """Close the tail page and go to the next one; False (one more dropped) when there is none to take.

        Mirrors: kernel/trace/ring_buffer.c:rb_move_tail (v6.1)
        """
        words, count = self._words, self._nr_pages
        page, head = words[TAIL_PAGE], words[HEAD_SLOT]
        slot = (words[TAIL_SLOT] + 1) % count
        target = words[SLOTS + slot]
        # A tail on the reader page means that the ring is empty: its head can be written at once.
        full = slot == head and page != words[READER_PAGE]
        self._close_page(page)
        if full:
            if not words[FLAGS] & _OVERWRITE:
                words[DROPPED] += 1
                return False
            words[HEAD_SLOT] = (head + 1) % count
            self._overrun_page(target)
        self._clear_page(target)
        words[TAIL_SLOT] = slot
        words[TAIL_PAGE] = target
        return True

    def _close_page(self, page: int) -> None:
        words, word = self._words, self._page_word(page)
        tail = words[word + 1] & COMMIT_MASK
        room, at = PAGE_DATA_SIZE - tail, self._data(page) + tail
        if room >= TIME_EVENT_SIZE:
            _TWO_WORDS.pack_into(self._memory, at, PADDING | 1 << 5, room - 4)
            words[word + 1] = PAGE_DATA_SIZE
            words[ENTRIES_BYTES] += room
        elif room:
            self._words32[at >> 2] = PADDING

    def _overrun_page(self, page: int) -> None:
        words = self._words
        words[OVERRUN] += words[self._entries_at + page]
        words[ENTRIES_BYTES] -= self._commit(page)

    def _clear_page(self, page: int) -> None:
        self._words[self._page_word(page) + 1] = 0
        self._words[self._entries_at + page] = 0

    # -- reading

    def __len__(self) -> int:
        """Events that can still be read."""
        words = self._words
        return words[ENTRIES] - words[OVERRUN] - words[READ]

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
        words, count = self._words, self._nr_pages
        reader = words[READER_PAGE]
        if words[READER_READ] < self._commit(reader):
            return True
        if not len(self) or reader == words[TAIL_PAGE]:
            return False
        head = words[HEAD_SLOT]
        taken = words[SLOTS + head]
        self._clear_page(reader)
        words[SLOTS + head] = reader
        words[READER_PAGE] = taken
        words[READER_READ] = 0
        words[READ_STAMP] = words[self._page_word(taken)]
        words[HEAD_SLOT] = (head + 1) % count
        words[ANCHOR_SLOT] = (head - 1) % count
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
            stamp = words[self._page_word(page)]
            for event in decode(self._data(page), 0, self._commit(page), stamp):
                yield event[0], event[1]

    def _unread_pages(self) -> list[int]:
        """Sub-buffers of the ring that were written and not read, oldest first."""
        words, count = self._words, self._nr_pages
        if words[TAIL_PAGE] == words[READER_PAGE]:
            return []
        head = words[HEAD_SLOT]
        used = (words[TAIL_SLOT] - head) % count + 1
        return [words[SLOTS + (head + i) % count] for i in range(used)]

    def read_page(self) -> bytes | None:
        """Consume what is left of one sub-buffer as a page of 4096 bytes; None when nothing is there.

        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_read_page (v6.1)
        """
        if not self._take_reader_page():
            return None
        words = self._words
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
        words[READ] += len(taken)
        words[READ_BYTES] += size
        words[READER_READ] = end
        words[READ_STAMP] = taken[-1] if taken else stamp
        return bytes(image)

    # -- control

    @property
    def size(self) -> int:
        """Bytes of events that the ring holds, the reader page left out."""
        return self._nr_pages * PAGE_DATA_SIZE

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

    def _set_flag(self, flag: RingFlag, value: bool) -> None:
        flags = self._words[FLAGS]
        self._words[FLAGS] = flags | flag.value if value else flags & ~flag.value

    @property
    def overrun(self) -> int:
        """Events overwritten before they were read."""
        return self._words[OVERRUN]

    @property
    def dirty_pages(self) -> int:
        """Full sub-buffers that nobody read yet; poll(2) with buffer_percent looks at it."""
        return max(0, len(self._unread_pages()) - 1)

    @property
    def nr_pages(self) -> int:
        """Sub-buffers in the ring."""
        return self._nr_pages

    def stats(self) -> RingStats:
        """The counters; `oldest_event_ts` outlives a reset, as in Linux."""
        words = self._words
        page = words[TAIL_PAGE]
        if page != words[READER_PAGE]:
            page = words[SLOTS + words[HEAD_SLOT]]
        return RingStats(
            entries=len(self),
            overrun=words[OVERRUN],
            commit_overrun=words[COMMIT_OVERRUN],
            size=words[ENTRIES_BYTES] - words[READ_BYTES],
            oldest_event_ts=words[self._page_word(page)],
            dropped_events=words[DROPPED],
            read_events=words[READ],
        )

    def reset(self) -> None:
        """Forget all events and counters.

        Mirrors: kernel/trace/ring_buffer.c:rb_reset_cpu (v6.1)
        """
        words = self._words
        for page in range(self._nr_pages + 1):
            self._clear_page(page)
        anchor = words[ANCHOR_SLOT]
        words[HEAD_SLOT] = words[TAIL_SLOT] = anchor
        words[TAIL_PAGE] = words[SLOTS + anchor]
        words[READER_READ] = 0
        for word in range(WRITE_STAMP, LOST_EVENTS + 1):
            words[word] = 0

    def resize(self, memory: memoryview, nr_pages: int) -> None:
        """Move into other memory with `nr_pages` sub-buffers; the oldest that don't fit are overrun.

        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_resize (v6.1)
        """
        unread = self._unread_pages()
        for page in unread[:-nr_pages]:
            self._overrun_page(page)
        unread = unread[-nr_pages:]
        kept = [*unread, self._words[READER_PAGE]]
        images = [self._memory[self._data(page) - PAGE_HEADER_SIZE :][:PAGE_SIZE] for page in kept]
        entries = [self._words[self._entries_at + page] for page in kept]
        counters = self._words[:SLOTS].tolist()
        self._format(memory, nr_pages, counters[FLAGS])
        words = self._words
        for word in (READER_READ, *range(WRITE_STAMP, LOST_EVENTS + 1)):
            words[word] = counters[word]
        numbers = [*range(len(unread)), nr_pages]
        for page, image, count in zip(numbers, images, entries, strict=True):
            at = self._data(page) - PAGE_HEADER_SIZE
            self._memory[at : at + PAGE_SIZE] = image
            words[self._entries_at + page] = count
        # Without an unread page the tail is the reader page, and the next slot is the head.
        words[TAIL_PAGE] = len(unread) - 1 if unread else nr_pages
        words[TAIL_SLOT] = (len(unread) - 1) % nr_pages
