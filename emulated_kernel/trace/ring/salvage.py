"""Ring buffers of a machine that ended at any moment: what is complete in them is brought into order.

A record is complete when the write pointer is behind it; each buffer has at most one that isn't, for which
the time or the count has gone on already. What the host was changing is told by pages, not by counters.
"""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.dataclass import dataclass
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.layout import (
    ASIDE,
    BASE,
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
    PARKED_PTR,
    READ,
    READ_BYTES,
    READ_STAMP,
    READER_PAGE,
    READER_READ,
    SLOTS,
    TAIL_ENTRIES,
    TAIL_PAGE,
    TAIL_SLOT,
    WRITE_PTR,
    WRITE_STAMP,
    RingFlag,
    RingMemory,
    data_start,
    memory_size,
)
from emulated_kernel.trace.ring.page import (
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
from emulated_kernel.trace.ring.trace_entry import TRACE_ENTRY

_COUNT_LIMIT = 1 << 62
"""No counter got so far."""


@dataclass(frozen=True)
class Salvaged:
    """A ring buffer in memory of its own, and what was found on the way."""

    buffer: RingBuffer
    torn: int
    """Records that weren't complete, or pages that made no sense behind some record."""
    is_aside: bool
    """It was a snapshot's."""


@dataclass(frozen=True)
class _Walked:
    """The sound events at the start of a page's data."""

    count: int
    end: int
    stamp: int
    """Time of the last one."""
    is_whole: bool
    """There is nothing else."""


class _Wreck:
    """A control block and its pages, as they were found."""

    def __init__(self, control: bytes, read: Callable[[int, int], bytes]) -> None:
        self.control = memoryview(bytearray(control))
        self.words = words = self.control.cast("Q")
        self.count = count = words[NR_PAGES]
        if not MIN_PAGES <= count < 1 << 32:
            raise ValueError(f"a ring buffer of {count} pages")
        self.memory = memoryview(bytearray(read(words[BASE], memory_size(count))))
        self.table, self.words32 = self.memory.cast("Q"), self.memory.cast("I")
        self._start = data_start(count)
        self._repair_slots()

    def _repair_slots(self) -> None:
        words, count = self.words, self.count
        slots = self.table[SLOTS : SLOTS + count].tolist()
        if max(words[HEAD_SLOT], words[TAIL_SLOT]) >= count or words[TAIL_PAGE] > count:
            raise ValueError("a slot that isn't there")
        reader, head = words[READER_PAGE], words[HEAD_SLOT]
        missing = set(range(count + 1)).difference(slots, (reader,))
        if len(missing) == 1 and slots[head] == reader:
            # The reader was taking the head's page: it is in the ring already, and the other one not out yet.
            words[READER_PAGE], words[READER_READ] = missing.pop(), 0
            words[HEAD_SLOT] = (head + 1) % count
        elif missing:
            raise ValueError("a page that is there twice")
        if words[TAIL_PAGE] != words[READER_PAGE]:
            # The tail was moving where this differs: it hasn't left its page.
            words[TAIL_SLOT] = slots.index(words[TAIL_PAGE])

    def header(self, page: int) -> int:
        """Position of a page, in bytes."""
        return self._start + page * PAGE_SIZE

    def stamp(self, page: int) -> int:
        """When its first event was."""
        return self.table[self.header(page) >> 3]

    def end(self, page: int) -> int:
        """Where its data end, in bytes."""
        words = self.words
        if page != words[TAIL_PAGE]:
            end = self.table[(self.header(page) >> 3) + 1] & COMMIT_MASK
            return end if end <= PAGE_DATA_SIZE else 0
        pointer = words[WRITE_PTR] or words[PARKED_PTR]
        end = pointer - words[BASE] - self.header(page) - PAGE_HEADER_SIZE
        # Out of range where the tail was moving here: nothing is written yet.
        return end if 0 <= end <= PAGE_DATA_SIZE else 0

    def unread(self) -> list[int]:
        """Pages of the ring that were written and not read, oldest first."""
        words, count = self.words, self.count
        if words[TAIL_PAGE] == words[READER_PAGE]:
            return []
        used = (words[TAIL_SLOT] - words[HEAD_SLOT]) % count + 1
        return [self.table[SLOTS + (words[HEAD_SLOT] + i) % count] for i in range(used)]

    def walk(self, page: int, offset: int, end: int, stamp: int) -> _Walked:
        """The sound events of a page in [offset, end), `stamp` being the time before them."""
        words, data = self.words32, self.header(page) + PAGE_HEADER_SIZE
        count, sound = 0, offset
        while offset < end:
            header, size = words[(data + offset) >> 2], 4
            kind, delta = header & 31, header >> 5
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
                size, value = TIME_EVENT_SIZE, delta | more << DELTA_BITS
                stamp = stamp + value if kind == TIME_EXTEND else (stamp & ~STAMP_MASK) | value
            if size % 4 or offset + size > end:
                break
            offset += size
            sound = offset
            count += kind <= MAX_TYPE_LEN
        return _Walked(count, sound, stamp, sound >= end)


def salvage(control: bytes, read: Callable[[int, int], bytes]) -> Salvaged | None:
    """The buffer of a control block; None where that has none. `read` gives pages by address.

    Raises: ValueError: that can't be a ring buffer; what `read` raises.
    """
    if not int.from_bytes(control[NR_PAGES * 8 : NR_PAGES * 8 + 8], "little"):
        return None
    wreck = _Wreck(control, read)
    words, reader, tail_page = wreck.words, wreck.words[READER_PAGE], wreck.words[TAIL_PAGE]
    consumed = wreck.walk(reader, 0, min(words[READER_READ], wreck.end(reader)), wreck.stamp(reader))
    words[READER_READ], words[READ_STAMP] = consumed.end, consumed.stamp
    torn = unread = size = 0
    for page in (reader, *wreck.unread()):
        offset = consumed.end if page == reader else 0
        stamp = consumed.stamp if page == reader else wreck.stamp(page)
        walked = wreck.walk(page, offset, wreck.end(page), stamp)
        torn += not walked.is_whole
        unread, size = unread + walked.count, size + walked.end - offset
        wreck.table[SLOTS + wreck.count + page] = walked.count
        if page != tail_page:
            wreck.table[(wreck.header(page) >> 3) + 1] = walked.end
            continue
        if walked.is_whole and walked.end:
            complete = walked.count + (consumed.count if page == reader else 0)
            torn += words[TAIL_ENTRIES] > complete or words[WRITE_STAMP] > walked.stamp
        words[WRITE_PTR] = 0
        words[PARKED_PTR] = words[BASE] + wreck.header(page) + PAGE_HEADER_SIZE + walked.end
        words[TAIL_ENTRIES] = walked.count
        words[WRITE_STAMP] = walked.stamp
    _count(wreck, unread, size)
    pages = RingMemory(wreck.memory, words[BASE], wreck.control)
    return Salvaged(RingBuffer.over(pages, wreck.count), torn, bool(words[ASIDE]))


def _count(wreck: _Wreck, unread: int, size: int) -> None:
    """Let the counters say what the pages hold."""
    words = wreck.words
    for word in (OVERRUN, DROPPED, READ, READ_BYTES):
        if words[word] >= _COUNT_LIMIT:
            words[word] = 0
    tail = wreck.end(words[TAIL_PAGE])
    words[LAST_OVERRUN], words[LOST_EVENTS] = words[OVERRUN], 0
    words[READ] = max(words[READ], words[TAIL_ENTRIES] - unread)
    words[ENTRIES] = unread + words[OVERRUN] + words[READ] - words[TAIL_ENTRIES]
    words[READ_BYTES] = max(words[READ_BYTES], tail - size)
    words[ENTRIES_BYTES] = size + words[READ_BYTES] - tail
    words[FLAGS] = words[FLAGS] & RingFlag.OVERWRITE | RingFlag.DISABLED
