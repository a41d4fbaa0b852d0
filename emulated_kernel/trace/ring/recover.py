"""Recovery of the ring buffers of a machine that ended at an arbitrary moment.

A record is complete once the write pointer is after it. Each buffer has at most one incomplete record; its
time or its count may already be included in the control block.
If the host was changing the control block, the pages decide and not the counters. Otherwise, a buffer whose
counters and pages disagree is damaged.
"""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.buffer_page import (
    COMMIT_MASK,
    DELTA_BITS,
    MAX_TYPE_LEN,
    PADDING,
    PAGE_DATA_SIZE,
    PAGE_HEADER_SIZE,
    STAMP_MASK,
    TIME_EVENT_SIZE,
    TIME_EXTEND,
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
"""Bytes of the smallest event."""
_LOST_LIMIT = 1 << 32
"""A larger number of lost records is not plausible: no machine has memory for so many."""
_COUNT_LIMIT = 1 << 62
"""A counter that reaches this value is not plausible."""


@dataclass(frozen=True)
class RecoveredBuffer:
    """A ring buffer that was copied to memory of its own, and the findings of the recovery."""

    buffer: RingBuffer
    torn: int
    """Number of records that are incomplete, or that the counters include but no page holds."""
    damage: str
    """Description of damage that the end of a process cannot explain; "" if there is none."""
    is_aside: bool
    """Whether the buffer belonged to a snapshot."""


@dataclass(frozen=True)
class _IntactEvents:
    """The valid events at the start of a page's data."""

    count: int
    end: int
    stamp: int
    """Time of the last valid event."""
    is_whole: bool
    """Whether the data consist of valid events only."""


class UnreadableControlBlock(ValueError):
    """Raised for bytes that are not a valid control block of a ring buffer."""

    def __init__(self, message: str, lost: int) -> None:
        """Keep `lost`, the number of records that the counters of the block include."""
        super().__init__(message)
        self.lost = lost


class _DamagedBuffer:
    """A control block and its pages, as they were found."""

    def __init__(self, block: bytes, read: Callable[[int, int], bytes]) -> None:
        self.block = memoryview(bytearray(block))
        self.control = control = RingControl.from_buffer(self.block)
        self.count = count = control.nr_pages
        self.is_changing = bool(control.changing)
        control.changing = 0
        self.is_odd = False
        """Whether something is inconsistent that would be consistent if the host was changing nothing."""
        if not MIN_PAGES <= count < 1 << 32:
            raise ValueError(f"a ring buffer of {count} pages")
        self.memory = memoryview(bytearray(read(control.base, memory_size(count))))
        self.table, self.words32 = self.memory.cast("Q"), self.memory.cast("I")
        self._start = data_start(count)
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
            # The reader was taking the head's page: it is in the ring already, and the other one not out yet.
            control.reader_page = missing.pop()
            control.reader_read = 0
            control.head_slot = (head + 1) % count
            self.is_odd = True
        elif missing:
            raise ValueError("a page that is there twice")
        if control.tail_page != control.reader_page:
            # The tail was moving where this differs: it hasn't left its page.
            slot = slots.index(control.tail_page)
            self.is_odd |= slot != control.tail_slot
            control.tail_slot = slot

    def _repair_tail(self, slots: list[int]) -> None:
        """Correct the tail, whose position is stored three times.

        If the host was changing nothing, two of the three are right.
        """
        control = self.control
        # Where the page is full the pointer is behind it.
        written = (self._pointer - 1 - control.base - self._start) // PAGE_SIZE
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
        """Return the offset of a page's header, in bytes."""
        return self._start + page * PAGE_SIZE

    def stamp(self, page: int) -> int:
        """Return the time of a page's first event."""
        return self.table[self.header(page) >> 3]

    def end(self, page: int) -> int:
        """Return the offset at which a page's data end, in bytes."""
        control = self.control
        if page != control.tail_page:
            end = self.table[(self.header(page) >> 3) + 1] & COMMIT_MASK
            return end if end <= PAGE_DATA_SIZE else 0
        end = self._pointer - control.base - self.header(page) - PAGE_HEADER_SIZE
        if 0 <= end <= PAGE_DATA_SIZE:
            return end
        # Where the tail was moving here nothing is written yet.
        return 0 if self.is_changing else self._end_by_count(page)

    def _end_by_count(self, page: int) -> int:
        """Return where the counted number of events of a page ends; used if the write pointer is invalid."""
        low = 0
        high = PAGE_DATA_SIZE
        while low < high:
            middle = (low + high) // 8 * 4
            if self.walk(page, 0, middle, 0).count < self.control.tail_entries:
                low = middle + 4
            else:
                high = middle
        return high

    def unread(self) -> list[int]:
        """Return the pages of the ring that hold unread events, oldest first."""
        control = self.control
        count = self.count
        if control.tail_page == control.reader_page:
            return []
        used = (control.tail_slot - control.head_slot) % count + 1
        return [self.table[SLOTS + (control.head_slot + i) % count] for i in range(used)]

    def walk(self, page: int, offset: int, end: int, stamp: int) -> _IntactEvents:
        """Return the valid events of a page in [offset, end). `stamp` is the time before the first one."""
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
    """Recover the buffer of a control block; return None if the block is empty.

    `read` reads pages by address.
    Raises: UnreadableControlBlock, OSError (from `read`).
    """
    if not any(block[: offset_of("aside")]):
        return None
    found = RingControl.from_buffer_copy(block)
    expected = found.entries + found.tail_entries - found.overrun - found.read
    try:
        wreck = _DamagedBuffer(block, read)
    except ValueError as error:
        raise UnreadableControlBlock(str(error), expected if 0 <= expected < _LOST_LIMIT else 0) from error
    control = wreck.control
    reader = wreck.control.reader_page
    tail_page = wreck.control.tail_page
    consumed = wreck.walk(reader, 0, min(control.reader_read, wreck.end(reader)), wreck.stamp(reader))
    control.reader_read = consumed.end
    control.read_stamp = consumed.stamp
    torn = 0
    unread = 0
    size = 0
    is_damaged = wreck.is_odd
    for page in (reader, *wreck.unread()):
        offset = consumed.end if page == reader else 0
        stamp = consumed.stamp if page == reader else wreck.stamp(page)
        walked = wreck.walk(page, offset, wreck.end(page), stamp)
        complete = walked.count + (consumed.count if page == reader else 0)
        torn += not walked.is_whole
        is_damaged |= page != tail_page and complete != wreck.table[SLOTS + wreck.count + page]
        unread = unread + walked.count
        size = size + walked.end - offset
        wreck.table[SLOTS + wreck.count + page] = walked.count
        if page != tail_page:
            wreck.table[(wreck.header(page) >> 3) + 1] = walked.end
            continue
        if walked.is_whole and walked.end:
            torn += control.tail_entries > complete or control.write_stamp > walked.stamp
        control.write_ptr = 0
        control.parked_ptr = control.base + wreck.header(page) + PAGE_HEADER_SIZE + walked.end
        control.tail_entries = walked.count
        control.write_stamp = walked.stamp
    _count(wreck, unread, size)
    missing = expected - unread
    if torn > 1 or missing > torn or missing < -1:
        is_damaged = True
    damage = ""
    if is_damaged and not wreck.is_changing:
        is_told = 0 < missing <= (wreck.count + 1) * PAGE_DATA_SIZE // MIN_SIZE
        torn = max(torn, missing) if is_told else torn
        damage = f"records missing: {missing}" if is_told else "counters and pages disagree"
    pages = RingMemory(wreck.memory, control.base, wreck.block)
    return RecoveredBuffer(RingBuffer.over(pages, wreck.count), torn, damage, bool(control.aside))


def _count(wreck: _DamagedBuffer, unread: int, size: int) -> None:
    """Set the counters to the content of the pages."""
    control = wreck.control
    for word in ("overrun", "dropped", "read", "read_bytes"):
        if getattr(control, word) >= _COUNT_LIMIT:
            setattr(control, word, 0)
    tail = wreck.end(control.tail_page)
    control.last_overrun = control.overrun
    control.lost_events = 0
    control.read = max(control.read, control.tail_entries - unread)
    control.entries = unread + control.overrun + control.read - control.tail_entries
    control.read_bytes = max(control.read_bytes, tail - size)
    control.entries_bytes = size + control.read_bytes - tail
    control.flags = control.flags & RingFlag.OVERWRITE | RingFlag.DISABLED
