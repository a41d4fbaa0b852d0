"""Recovery of the ring buffers of a machine whose process ended at an arbitrary moment.

A record is complete if the write pointer is after the record. Each buffer has at most one incomplete record.
The control block may already count this record, or have its time.
If the process ended while the host was changing the control block, the pages count as right, and the counters
are corrected. Otherwise, a buffer whose counters and pages disagree counts as damaged.
"""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.buffer_page import (
    COMMIT_MASK,
    DELTA_BITS,
    MAX_ORDER,
    MAX_TYPE_LEN,
    PADDING,
    PAGE_HEADER_SIZE,
    STAMP_MASK,
    TIME_EVENT_SIZE,
    TIME_EXTEND,
    capacity,
)
from emulated_kernel.trace.ring.ring_layout import (
    MIN_PAGES,
    SLOTS,
    RingControl,
    RingFlag,
    RingMemory,
    data_start,
    memory_size,
    offset_of,
)
from emulated_kernel.trace.ring.trace_entry import TRACE_ENTRY
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import dataclass

MIN_SIZE = 4 + TRACE_ENTRY.size
"""Minimum size in bytes of an event with an entry: the u32 header and the entry's common fields."""
_LOST_LIMIT = 1 << 32
"""Exclusive upper bound of a plausible number of lost records: no machine has memory for more."""
_COUNT_LIMIT = 1 << 62
"""Exclusive upper bound of a plausible value of a counter."""


@dataclass(frozen=True)
class RecoveredBuffer:
    """A ring buffer that was copied to its own memory and repaired, and the findings of the repair."""

    buffer: RingBuffer
    torn: int
    """Number of records that are incomplete, or that the counters include but no page holds."""
    damage: str
    """Description of damage that the end of a process cannot cause, or "" if there is no such damage."""
    is_aside: bool
    """Whether the buffer belongs to a trace array's snapshot instead of the trace array itself."""


@dataclass(frozen=True)
class _IntactEvents:
    """Result of _DamagedBuffer.walk(): the valid events before the first invalid event."""

    count: int
    end: int
    """Offset in the page's data at which the valid events end, in bytes."""
    stamp: int
    """Time of the last valid event; if there is none, the argument `stamp` of walk()."""
    is_whole: bool
    """Whether walk() found nothing but valid events in its whole range."""


@dataclass(frozen=True)
class _RecoveredPage:
    """The valid events of a page: the consumed events, and then the unread events."""

    number: int
    """Index of the page among the buffer's pages in memory."""
    consumed: _IntactEvents
    unread: _IntactEvents

    @property
    def count(self) -> int:
        """Number of valid events of the page, consumed or unread."""
        return self.consumed.count + self.unread.count

    @property
    def unread_size(self) -> int:
        """Size of the unread events in bytes."""
        return self.unread.end - self.consumed.end


class UnreadableControlBlock(ValueError):
    """Exception for bytes that are not a valid control block of a ring buffer."""

    def __init__(self, message: str, lost: int) -> None:
        """Create the exception.

        `lost`: number of unread records according to the block's counters, or 0 if that number is
        implausible.
        """
        super().__init__(message)
        self.lost = lost


class _DamagedBuffer:
    """A copy of a control block and its pages, which this class repairs."""

    def __init__(self, block: bytes, read: Callable[[int, int], bytes]) -> None:
        self.block = memoryview(bytearray(block))
        control = RingControl.from_buffer(self.block)
        self.control = control
        count = control.nr_pages
        self.count = count
        self.is_changing = bool(control.changing)
        control.changing = 0
        self.is_odd = False
        """Whether the control block is inconsistent, as if the host was changing it when the daemon ended."""
        if not MIN_PAGES <= count < 1 << 32:
            raise ValueError(f"a ring buffer of {count} pages")
        order = control.order
        if order > MAX_ORDER:
            raise ValueError(f"sub-buffers of order {order}")
        self._page_size = PAGE_SIZE << order
        self.capacity = capacity(order)
        self.memory = memoryview(bytearray(read(control.base, memory_size(count, order))))
        self.table = self.memory.cast("Q")
        self.words32 = self.memory.cast("I")
        self._start = data_start(count, order, control.base)
        self._repair_slots()

    def _repair_slots(self) -> None:
        control = self.control
        count = self.count
        slots = self.table[SLOTS : SLOTS + count].tolist()
        self._repair_tail(slots)
        if max(control.head_slot, control.tail_slot) >= count or control.tail_page > count:
            raise ValueError("a slot that isn't there")
        reader = control.reader_page
        head = control.head_slot
        missing = set(range(count + 1)).difference(slots, (reader,))
        if len(missing) == 1 and slots[head] == reader:
            # The reader was swapping its page with the head page. Its old page is in the ring already.
            control.reader_page = missing.pop()
            control.reader_read = 0
            control.head_slot = (head + 1) % count
            self.is_odd = True
        elif missing:
            raise ValueError("a page that is there twice")
        if control.tail_page != control.reader_page:
            # If the slots differ, the tail was moving to the next page, but has not left its page.
            slot = slots.index(control.tail_page)
            self.is_odd |= slot != control.tail_slot
            control.tail_slot = slot

    def _repair_tail(self, slots: list[int]) -> None:
        """Correct the position of the tail, which the control block stores three times.

        The three copies are the write pointer, tail_page and tail_slot. If the host was changing the control
        block, do nothing. Otherwise, at least two of the copies are right. `slots`: number of the page in
        each ring slot.
        """
        control = self.control
        # If the page is full, the pointer is after the page, so one is subtracted.
        written = (self._pointer - 1 - control.base - self._start) // self._page_size
        if self.is_changing:
            return
        slot = control.tail_slot
        if written != control.tail_page:
            self.is_odd = True
            if written in (control.reader_page, *slots[slot : slot + 1]):
                control.tail_page = written
        if slot >= self.count and written == control.tail_page:
            self.is_odd = True
            control.tail_slot = (
                slots.index(written) if written in slots else (control.head_slot - 1) % self.count
            )

    @property
    def _pointer(self) -> int:
        return self.control.write_ptr or self.control.parked_ptr

    def header(self, page: int) -> int:
        """Return the offset of a page's header in the buffer's memory, in bytes."""
        return self._start + page * self._page_size

    def stamp(self, page: int) -> int:
        """Return the time of a page's first event."""
        return self.table[self.header(page) >> 3]

    def end(self, page: int) -> int:
        """Return the size of a page's data in bytes, or 0 if the stored size is invalid."""
        control = self.control
        if page != control.tail_page:
            end = self.table[(self.header(page) >> 3) + 1] & COMMIT_MASK
            return end if end <= self.capacity else 0
        end = self._pointer - control.base - self.header(page) - PAGE_HEADER_SIZE
        if 0 <= end <= self.capacity:
            return end
        # If the tail was moving to this page, nothing was written to the page yet.
        return 0 if self.is_changing else self._end_by_count(page)

    def _end_by_count(self, page: int) -> int:
        """Return the size in bytes of the tail page's data, computed from the counter tail_entries.

        The caller needs this size if the write pointer is invalid.
        """
        low = 0
        high = self.capacity
        while low < high:
            middle = (low + high) // 8 * 4
            if self.walk(page, 0, middle, 0).count < self.control.tail_entries:
                low = middle + 4
            else:
                high = middle
        return high

    def pages(self) -> list[_RecoveredPage]:
        """Return the reader page, and then the pages of the ring that hold unread events, oldest first."""
        reader = self.control.reader_page
        read = min(self.control.reader_read, self.end(reader))
        found = [self._page(reader, self.walk(reader, 0, read, self.stamp(reader)))]
        for number in self._unread():
            nothing = _IntactEvents(0, 0, self.stamp(number), is_whole=True)
            found.append(self._page(number, nothing))
        return found

    def _page(self, number: int, consumed: _IntactEvents) -> _RecoveredPage:
        unread = self.walk(number, consumed.end, self.end(number), consumed.stamp)
        return _RecoveredPage(number, consumed, unread)

    def _unread(self) -> list[int]:
        """Return the numbers of the ring's pages that hold unread events, oldest first."""
        control = self.control
        count = self.count
        if control.tail_page == control.reader_page:
            return []
        used = (control.tail_slot - control.head_slot) % count + 1
        return [self.table[SLOTS + (control.head_slot + i) % count] for i in range(used)]

    def is_count_wrong(self, page: _RecoveredPage) -> bool:
        """Return True if the number of valid events on `page` differs from the number that the writer stored.

        The writer stores the number when the tail leaves the page. For the tail page, return False.
        """
        is_left = page.number != self.control.tail_page
        return is_left and page.count != self.table[SLOTS + self.count + page.number]

    def torn(self, page: _RecoveredPage) -> int:
        """Return the number of records of a page that the end of the process left incomplete: 0 or 1."""
        if not page.unread.is_whole:
            return 1
        # The writer counts a record and stores its time before it advances the pointer. In between, the page
        # does not show the record. For an empty page, the counters prove nothing.
        control = self.control
        if page.number != control.tail_page or not page.unread.end:
            return 0
        return int(control.tail_entries > page.count or control.write_stamp > page.unread.stamp)

    def keep(self, page: _RecoveredPage) -> None:
        """Correct the number of unread events and the data size that are stored for `page`.

        Afterwards, the page's data end after its valid events.
        """
        control = self.control
        unread = page.unread
        self.table[SLOTS + self.count + page.number] = unread.count
        if page.number != control.tail_page:
            self.table[(self.header(page.number) >> 3) + 1] = unread.end
            return
        control.write_ptr = 0
        control.parked_ptr = control.base + self.header(page.number) + PAGE_HEADER_SIZE + unread.end
        control.tail_entries = unread.count
        control.write_stamp = unread.stamp

    def keep_counts(self, unread: int, size: int) -> None:
        """Set the counters so that all pages together have `unread` unread events of `size` bytes.

        Also set the flag DISABLED, so that nothing is recorded, and set implausible counters to 0.
        """
        control = self.control
        for word in ("overrun", "dropped", "read", "read_bytes"):
            if getattr(control, word) >= _COUNT_LIMIT:
                setattr(control, word, 0)
        tail = self.end(control.tail_page)
        control.last_overrun = control.overrun
        control.lost_events = 0
        # `entries` counts the events of pages that the tail has left, and must not be negative. As in
        # _expected(): unread = entries + tail_entries - overrun - read
        control.read = max(control.read, control.tail_entries - unread)
        control.entries = unread + control.overrun + control.read - control.tail_entries
        # For sizes in bytes, overwritten events are not counted:
        # size = entries_bytes + the tail's bytes - read_bytes
        control.read_bytes = max(control.read_bytes, tail - size)
        control.entries_bytes = size + control.read_bytes - tail
        control.flags = control.flags & RingFlag.OVERWRITE | RingFlag.DISABLED

    def walk(self, page: int, offset: int, end: int, stamp: int) -> _IntactEvents:
        """Find the valid events in the range [offset, end) of a page's data, up to the first invalid one.

        `stamp` is the time to which the first event's time delta is added.
        """
        words = self.words32
        data = self.header(page) + PAGE_HEADER_SIZE
        count = 0
        sound = offset
        while offset < end:
            header = words[(data + offset) >> 2]
            size = 4
            kind = header & 31
            delta = header >> 5
            has_more = kind == 0 or kind > PADDING or (kind == PADDING and delta)
            if has_more and offset + TIME_EVENT_SIZE > end:
                break
            more = words[(data + offset + 4) >> 2] if has_more else 0
            if kind <= MAX_TYPE_LEN:
                size += kind * 4 or more
                if size - (4 if kind else 8) < TRACE_ENTRY.size:
                    break
                stamp += delta
            elif kind == PADDING:
                size = size + more if delta else end - offset
            else:
                size = TIME_EVENT_SIZE
                value = delta | more << DELTA_BITS
                stamp = stamp + value if kind == TIME_EXTEND else (stamp & ~STAMP_MASK) | value
            if size % 4 or offset + size > end:
                break
            offset += size
            sound = offset
            count += kind <= MAX_TYPE_LEN
        return _IntactEvents(count, sound, stamp, sound >= end)


def recover_ring_buffer(block: bytes, read: Callable[[int, int], bytes]) -> RecoveredBuffer | None:
    """Return a repaired copy of the ring buffer with the control block `block`; None for an unused block.

    `read` takes a guest address, such as that of the buffer's pages, and a size in bytes; it returns the
    content of the ended machine's memory there.
    Raises: UnreadableControlBlock (the buffer cannot be repaired), OSError (from `read`).
    """
    if not any(block[: offset_of("aside")]):
        return None
    expected = _expected(RingControl.from_buffer_copy(block))
    try:
        damaged = _DamagedBuffer(block, read)
    except ValueError as error:
        raise UnreadableControlBlock(str(error), expected if 0 <= expected < _LOST_LIMIT else 0) from error
    control = damaged.control
    pages = damaged.pages()
    unread = sum(page.unread.count for page in pages)
    torn = sum(damaged.torn(page) for page in pages)
    is_damaged = damaged.is_odd or any(damaged.is_count_wrong(page) for page in pages)

    reader = pages[0].consumed
    control.reader_read = reader.end
    control.read_stamp = reader.stamp
    for page in pages:
        damaged.keep(page)
    damaged.keep_counts(unread, sum(page.unread_size for page in pages))

    missing = expected - unread
    # The counters may include an incomplete record, which no page holds. They may also count a record as
    # consumed that is unread by its position, because the reader advances its position last.
    if torn > 1 or missing > torn or missing < -1:
        is_damaged = True
    damage = ""
    if is_damaged and not damaged.is_changing:
        # A number of missing records is plausible if that many records fit into the pages.
        is_plausible = 0 < missing <= (damaged.count + 1) * damaged.capacity // MIN_SIZE
        torn = max(torn, missing) if is_plausible else torn
        damage = f"records missing: {missing}" if is_plausible else "counters and pages disagree"
    memory = RingMemory(damaged.memory, control.base, damaged.block)
    return RecoveredBuffer(
        RingBuffer.over(memory, damaged.count, control.order), torn, damage, bool(control.aside)
    )


def _expected(control: RingControl) -> int:
    """Return the number of unread events according to the counters.

    It is the number of events on pages that the tail has left and on the tail page, less those that were
    overwritten or consumed.
    """
    return control.entries + control.tail_entries - control.overrun - control.read
