"""RingWriter: the writing half of a ring buffer, which adds events to the tail page and moves the tail.

Mirrors: kernel/trace/ring_buffer.c (v6.1).
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Self

from emulated_kernel.trace.ring.buffer_page import (
    COMMIT_MASK,
    DELTA_BITS,
    DELTA_MASK,
    MAX_DATA_SIZE,
    MAX_SMALL_DATA,
    PADDING,
    PAGE_HEADER_SIZE,
    STAMP_MASK,
    TIME_EVENT_SIZE,
    TIME_EXTEND,
    TIME_STAMP,
    capacity,
    event_size,
)
from emulated_kernel.trace.ring.ring_layout import (
    CONTROL_SIZE,
    MIN_PAGES,
    SLOTS,
    RingControl,
    RingFlag,
    RingMemory,
    data_start,
    memory_size,
    offset_of,
)
from emulated_kernel.util.abi import PAGE_SIZE

_OVERWRITE = RingFlag.OVERWRITE.value
_DISABLED = RingFlag.DISABLED.value
_TWO_WORDS = Struct("<II")
_WORD = (1 << 64) - 1

# Indexes of words in a control block, which are faster to use than the fields of RingControl.
_WRITE_PTR = offset_of("write_ptr") >> 3
_WRITE_STAMP = offset_of("write_stamp") >> 3
_TAIL_ENTRIES = offset_of("tail_entries") >> 3
_PARKED_PTR = offset_of("parked_ptr") >> 3
_FLAGS = offset_of("flags") >> 3
_TAIL_PAGE = offset_of("tail_page") >> 3
_TAIL_SLOT = offset_of("tail_slot") >> 3
_HEAD_SLOT = offset_of("head_slot") >> 3
_READER_PAGE = offset_of("reader_page") >> 3
_READER_READ = offset_of("reader_read") >> 3
_ENTRIES = offset_of("entries") >> 3
_OVERRUN = offset_of("overrun") >> 3
_DROPPED = offset_of("dropped") >> 3
_ENTRIES_BYTES = offset_of("entries_bytes") >> 3
_STATE = Struct(f"<{_ENTRIES_BYTES + 1}Q")
"""Format of the words at the start of a control block; they include all words that make_room() needs."""
_CHANGING = offset_of("changing") >> 3


class RingWriter:
    """The operations of a ring buffer's writer. The subclass RingBuffer adds the operations of readers."""

    __slots__ = (
        "_block",
        "_capacity",
        "_control",
        "_entries_at",
        "_has_recorded",
        "_memory",
        "_shift",
        "_start",
        "_table",
        "_words",
        "_words32",
        "generation",
        "held",
        "nr_pages",
        "order",
        "page_size",
        "place",
    )

    def __init__(self, place: RingMemory, nr_pages: int, *, overwrite: bool = True, order: int = 0) -> None:
        """Format the memory `place` as an empty buffer with `nr_pages` sub-buffers of 4096 << order bytes.

        `overwrite`: whether a full buffer overwrites its oldest events; if not, it drops new ones.
        """
        self._begin(order)
        self._format(place, nr_pages, RingFlag.OVERWRITE.value if overwrite else 0)

    @classmethod
    def over(cls, place: RingMemory, nr_pages: int, order: int) -> Self:
        """Return an object for the buffer that the memory `place` already contains.

        The buffer has `nr_pages` sub-buffers of `order`.
        """
        buffer = cls.__new__(cls)
        buffer._begin(order)
        buffer._attach(place, nr_pages)
        return buffer

    def _begin(self, order: int) -> None:
        self.order = order
        self.page_size = PAGE_SIZE << order
        """Size of a sub-buffer in bytes, with its header."""
        self._capacity = capacity(order)
        self.generation = 0
        """Number of times that the buffer was emptied or its memory was freed."""
        self._has_recorded = False
        """Whether the buffer had events before it was last emptied."""
        self.held = 0
        """Number of open trace files that read the buffer. While it is not 0, the buffer must not be resized.

        Mirrors: kernel/trace/ring_buffer.c:struct ring_buffer_per_cpu.resize_disabled (v6.1).
        """

    def _format(self, place: RingMemory, nr_pages: int, flags: int) -> None:
        """Format the control block, the first page and the reader page.

        _move_tail() formats each other page when the tail reaches it. `flags`: the RingFlag bits.
        """
        if nr_pages < MIN_PAGES:
            raise ValueError(f"ring buffer: {nr_pages} pages; it needs at least {MIN_PAGES}")
        place.control_block[:] = bytes(CONTROL_SIZE)
        self._attach(place, nr_pages)
        control = self._control
        table = self._table
        control.nr_pages = nr_pages
        control.order = self.order
        control.flags = flags
        control.base = place.address
        control.reader_page = nr_pages
        table[SLOTS : SLOTS + nr_pages] = memoryview(array("Q", range(nr_pages)))
        for page in (0, nr_pages):
            table[self._page_word(page)] = 0
            self._clear_page(page)
        control.parked_ptr = self._shift + self._data(0)

    def _attach(self, place: RingMemory, nr_pages: int) -> None:
        memory = place.pages.cast("B")[: memory_size(nr_pages, self.order)]
        self.place = place
        """The memory of the buffer; each resize replaces the object."""
        self._memory = memory
        self._table = memory.cast("Q")
        self._control = RingControl.from_buffer(place.control_block)
        self._block = place.control_block
        self._words = self._block.cast("Q")
        self._words32 = memory.cast("I")
        self.nr_pages = nr_pages
        """Number of sub-buffers in the ring."""
        self._start = data_start(nr_pages, self.order, place.address)
        self._shift = place.address
        self._control.first_page = self._shift + self._start
        self._entries_at = SLOTS + nr_pages

    @property
    def is_aside(self) -> bool:
        """Whether the buffer belongs to a trace array's snapshot instead of the trace array itself.

        The flag is stored in the control block, so that it can be recovered after the process has ended.
        """
        return bool(self._control.aside)

    @is_aside.setter
    def is_aside(self, value: bool) -> None:
        self._control.aside = value

    def _page_word(self, page: int) -> int:
        return (self._start + page * self.page_size) >> 3

    def _data(self, page: int) -> int:
        return self._start + page * self.page_size + PAGE_HEADER_SIZE

    def _commit(self, page: int) -> int:
        if page == self._control.tail_page:
            return self._tail()
        return min(self._table[self._page_word(page) + 1] & COMMIT_MASK, self._capacity)

    def _page_in(self, slot: int) -> int:
        """Return the number of the sub-buffer in a ring slot.

        Hazard: guest code may have written any number, so the result is limited to valid numbers.
        """
        return min(self._table[SLOTS + slot], self.nr_pages)

    def check(self) -> tuple[int, ...]:
        """Check the control block. If guest code has made it invalid, empty the buffer.

        Return the words of the control block (RingControl), from its start up to and including
        `entries_bytes`.
        """
        state = _STATE.unpack_from(self._block)
        last = self.nr_pages
        if (
            state[_TAIL_PAGE] <= last
            and state[_READER_PAGE] <= last
            and state[_HEAD_SLOT] < last
            and state[_TAIL_SLOT] < last
            and state[_READER_READ] <= self._capacity
        ):
            tail = (state[_WRITE_PTR] or state[_PARKED_PTR]) - self._shift - self._data(state[_TAIL_PAGE])
            if 0 <= tail <= self._capacity and not tail % 4:
                return state
        self.empty_damaged()
        return _STATE.unpack_from(self._block)

    def empty_damaged(self) -> None:
        """Report that guest code has damaged the buffer, and empty the buffer.

        In Linux, recording stops instead, and a warning is logged.
        Mirrors: kernel/trace/ring_buffer.c:RB_WARN_ON (v6.1).
        """
        self.place.report("ring buffer", "its control block does not describe its pages")
        control = self._control
        aside = control.aside
        self.generation += 1
        self._format(self.place, self.nr_pages, control.flags & (_OVERWRITE | _DISABLED))
        self.is_aside = bool(aside)

    def _tail(self) -> int:
        """Return the number of bytes of data on the tail page."""
        control = self._control
        return (control.write_ptr or control.parked_ptr) - self._shift - self._data(control.tail_page)

    def write(self, payload: bytes, time_stamp: int) -> bool:
        """Append an event. Return False if the buffer is full, the event is too large, or recording is off.

        Mirrors: kernel/trace/ring_buffer.c:ring_buffer_write (v6.1).
        """
        size = len(payload)
        length = event_size(size)
        if size > MAX_DATA_SIZE or not self.make_room(length, time_stamp):
            return False
        control = self._control
        pointer = control.write_ptr
        self._put_event(pointer - self._shift, length, time_stamp - control.write_stamp, payload)
        control.write_ptr = pointer + length
        control.write_stamp = time_stamp
        control.tail_entries += 1
        return True

    def make_room(self, length: int, time_stamp: int) -> bool:
        """Make room for an event of `length` bytes at write_ptr. If necessary, move to the next page.

        Set write_stamp so that the event's time delta fits into its header. Return False if recording is off.
        If the buffer is full, count a dropped event and return False.
        """
        if self._words[_FLAGS] & _DISABLED:
            return False
        state = self.check()
        page = state[_TAIL_PAGE]
        pointer = state[_WRITE_PTR] or state[_PARKED_PTR]
        tail = pointer - self._shift - self._data(page)
        delta = time_stamp - state[_WRITE_STAMP] if tail else 0
        extra = TIME_EVENT_SIZE if delta >> DELTA_BITS else 0
        if tail + length + extra > self._capacity:
            return self._move_tail(state, tail, time_stamp)
        words = self._words
        if not tail:
            self._table[self._page_word(page)] = time_stamp
            words[_WRITE_STAMP] = time_stamp
        elif extra:
            self._put_time(pointer - self._shift, delta, time_stamp)
            pointer += TIME_EVENT_SIZE
            words[_WRITE_STAMP] = time_stamp
        words[_WRITE_PTR] = pointer
        return True

    def _put_event(self, at: int, length: int, delta: int, payload: bytes) -> None:
        memory = self._memory
        size = len(payload)
        self._words32[(at + length - 4) >> 2] = 0
        if size > MAX_SMALL_DATA:
            _TWO_WORDS.pack_into(memory, at, delta << 5, length - 4)
            memory[at + 8 : at + 8 + size] = payload
        else:
            self._words32[at >> 2] = delta << 5 | (length - 4) >> 2
            memory[at + 4 : at + 4 + size] = payload

    def _put_time(self, at: int, delta: int, time_stamp: int) -> None:
        # Deviates: if the clock went back (the task moved to a vCPU whose time is earlier), an absolute time
        # is stored. Linux stores an absolute time only for events that interrupt one another.
        kind, value = (TIME_EXTEND, delta) if delta > 0 else (TIME_STAMP, time_stamp & STAMP_MASK)
        _TWO_WORDS.pack_into(self._memory, at, kind | (value & DELTA_MASK) << 5, value >> DELTA_BITS)

    def _open_tail(self) -> None:
        """Allow guest code to write events without calling the host."""
        control = self._control
        control.write_ptr = control.write_ptr or control.parked_ptr

    def _park(self, tail: int) -> None:
        """Make guest code call the host for the next event.

        `tail` is the offset of the next event in the tail page's data, in bytes.
        """
        control = self._control
        control.parked_ptr = self._shift + self._data(control.tail_page) + tail
        control.write_ptr = 0

    def _move_tail(self, state: tuple[int, ...], tail: int, time_stamp: int) -> bool:
        """Close the tail page, and make the ring's next page the tail page. Return True if this is done.

        `state`: result of check(). `tail`: bytes of data on the old tail page. `time_stamp`: time of the new
        page's first event. If the buffer is full and must not overwrite events, count a dropped event and
        return False.

        For speed, this is one long function: the guest's recording code calls it for each page.
        Mirrors: kernel/trace/ring_buffer.c:rb_move_tail (v6.1).
        """
        words = self._words
        table = self._table
        count = self.nr_pages
        entries_at = self._entries_at
        page = state[_TAIL_PAGE]
        capacity_of_page = self._capacity
        tail_entries = state[_TAIL_ENTRIES]
        header = self._page_word(page)
        slot = (state[_TAIL_SLOT] + 1) % count
        # If the tail is the reader page, the ring is empty, so its head page can be written.
        full = slot == state[_HEAD_SLOT] and page != state[_READER_PAGE]
        room = capacity_of_page - tail
        if room >= TIME_EVENT_SIZE:
            at = (header << 3) + PAGE_HEADER_SIZE + tail
            _TWO_WORDS.pack_into(self._memory, at, PADDING | 1 << 5, room - 4)
            tail = capacity_of_page
        elif room:
            self._words32[(header << 1) + (PAGE_HEADER_SIZE + tail >> 2)] = PADDING
        if full and not state[_FLAGS] & _OVERWRITE:
            self._park(tail)
            words[_DROPPED] = state[_DROPPED] + 1 & _WORD
            return False
        target = min(table[SLOTS + slot], count)
        next_header = self._page_word(target)
        words[_CHANGING] = 1
        # Hazard: the words of a damaged buffer have any value, so the sums are truncated.
        size = state[_ENTRIES_BYTES] + tail
        table[header + 1] = tail
        table[entries_at + page] = tail_entries
        if full:
            words[_HEAD_SLOT] = (slot + 1) % count
            words[_OVERRUN] = state[_OVERRUN] + table[entries_at + target] & _WORD
            size -= min(table[next_header + 1] & COMMIT_MASK, capacity_of_page)
        words[_ENTRIES] = state[_ENTRIES] + tail_entries & _WORD
        words[_ENTRIES_BYTES] = size & _WORD
        words[_TAIL_ENTRIES] = 0
        table[next_header] = time_stamp
        table[next_header + 1] = 0
        table[entries_at + target] = 0
        words[_TAIL_SLOT] = slot
        words[_TAIL_PAGE] = target
        pointer = self._shift + (next_header << 3) + PAGE_HEADER_SIZE
        words[_PARKED_PTR] = pointer
        words[_WRITE_STAMP] = time_stamp
        words[_WRITE_PTR] = pointer
        words[_CHANGING] = 0
        return True

    def _overrun_page(self, page: int) -> None:
        control = self._control
        control.overrun += self._table[self._entries_at + page]
        control.entries_bytes -= self._commit(page)

    def _clear_page(self, page: int) -> None:
        self._table[self._page_word(page) + 1] = 0
        self._table[self._entries_at + page] = 0
