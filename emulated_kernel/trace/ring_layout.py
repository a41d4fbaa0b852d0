"""Where everything stands in a ring buffer's memory: the contract between guest code and the reader here.

Each CPU writes to a buffer of its own. Its control block of 32 u64 words (little-endian) holds what changes
with each event and counts:

    word  0 write_ptr      address of the next event; 0: nobody but the host may write one now
          1 write_stamp    time of the last event written
          2 tail_entries   events on the sub-buffer that is written
          3 parked_ptr     write_ptr's value while that is 0
          4 base           address of the sub-buffers' memory
          5 nr_pages       sub-buffers in the ring; one more, the reader page, stands outside of it
          6 flags          RingFlag
          7 tail_page      number of the sub-buffer that is written
          8 tail_slot      ring slot of tail_page (or that it had before the reader took it)
          9 head_slot      ring slot of the oldest unread sub-buffer
         10 reader_page    number of the reader's sub-buffer
         11 reader_read    bytes of its data that were consumed
         12 anchor_slot    where head and tail go on reset
         13 read_stamp     time of the last event consumed
         14 entries        events on all sub-buffers that were ever left behind
         15 overrun        events overwritten before they were read
         16 commit_overrun events lost because the writer met its own uncommitted ones (always 0 here)
         17 dropped        events refused for want of room (no overwriting)
         18 read           events consumed
         19 entries_bytes  bytes written on sub-buffers that were left behind, and not overwritten
         20 read_bytes     bytes consumed
         21 last_overrun   `overrun` when the reader last took a sub-buffer
         22 lost_events    events lost before the next one that the reader gets

The sub-buffers' memory starts with room for a control block (used where there is no other), then

         word 32...        slots[nr_pages]: the sub-buffer's number of each ring slot
         then              page_entries[nr_pages + 1]: events on each sub-buffer that was left behind

and goes on with the nr_pages + 1 sub-buffers (ring_page.py) from the next multiple of 4096 bytes; `base` is
a multiple of 4096 too. The commit word of tail_page is stale: its data end at write_ptr (or parked_ptr).

How guest code writes an event of `length` bytes (ring_page.event_size) at the time t:

    p = write_ptr
    if ((p - 1) & 4095) > 4095 - length, unsigned: no room (or off, or the first event of a sub-buffer)
    delta = t - write_stamp; if delta >= 1 << 27, unsigned: a time extend is needed
    write_stamp += delta; put the event at p; tail_entries += 1; write_ptr = p + length

In both other cases the host is asked first: RingBuffer.make_room(length, t). If that says yes, the steps
succeed when begun again; if no, the event is dropped, and counted if that is for want of room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntFlag

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.trace.ring_page import PAGE_DATA_SIZE

MIN_PAGES = 2
_SIZE_MASK = (1 << 64) - 1

(
    WRITE_PTR,
    WRITE_STAMP,
    TAIL_ENTRIES,
    PARKED_PTR,
    BASE,
    NR_PAGES,
    FLAGS,
    TAIL_PAGE,
    TAIL_SLOT,
    HEAD_SLOT,
    READER_PAGE,
    READER_READ,
    ANCHOR_SLOT,
    READ_STAMP,
    ENTRIES,
    OVERRUN,
    COMMIT_OVERRUN,
    DROPPED,
    READ,
    ENTRIES_BYTES,
    READ_BYTES,
    LAST_OVERRUN,
    LOST_EVENTS,
) = range(23)
COUNTERS = (WRITE_STAMP, *range(READ_STAMP, LOST_EVENTS + 1))
"""Words that a reset clears."""
CONTROL_WORDS = 32
CONTROL_SIZE = CONTROL_WORDS * 8
SLOTS = CONTROL_WORDS


class RingFlag(IntFlag):
    """Word 6 of a control block."""

    OVERWRITE = 1
    """A full buffer loses its oldest sub-buffer; otherwise it refuses new events."""
    DISABLED = 2
    """Nothing is recorded or counted."""


def _keep() -> None:
    """Memory that goes with its last user."""


@dataclass(frozen=True)
class RingMemory:
    """What a ring buffer stands in.

    Guest code sees its pages at `address`, and its control block at `control_at` from the base of the CPU
    that the buffer is of. Without a control block of its own it uses the room at the start of `pages`.
    Memory that no guest code sees has address 0.
    """

    pages: memoryview
    """Writable, memory_size(nr_pages) bytes at least, of any content."""
    address: int = 0
    control: memoryview | None = None
    """Writable, CONTROL_SIZE bytes."""
    control_at: int = 0
    release: Callable[[], None] = _keep
    """Gives the pages back."""

    def moved_to(self, pages: RingMemory) -> RingMemory:
        """Other pages under the same control block."""
        return replace(pages, control=self.control, control_at=self.control_at)


@dataclass(frozen=True)
class RingControls:
    """The control blocks of ring buffers, one a CPU, at the same offset from the base of each."""

    blocks: Sequence[memoryview]
    offset: int = 0
    release: Callable[[], None] = _keep

    def place(self, cpu: int, pages: RingMemory) -> RingMemory:
        """Pages under that CPU's control block."""
        return replace(pages, control=self.blocks[cpu], control_at=self.offset)


def pages_for(size: int) -> int:
    """Sub-buffers in the ring for a wanted size in bytes.

    Linux: rounding up wraps around. Mirrors: kernel/trace/ring_buffer.c:ring_buffer_resize (v6.1).
    """
    return max(MIN_PAGES, ((size + PAGE_DATA_SIZE - 1) & _SIZE_MASK) // PAGE_DATA_SIZE)


def memory_size(nr_pages: int) -> int:
    """Bytes of memory that a ring buffer of `nr_pages` sub-buffers stands in."""
    return data_start(nr_pages) + (nr_pages + 1) * PAGE_SIZE


def data_start(nr_pages: int) -> int:
    """Where the sub-buffers begin, in bytes."""
    header = (SLOTS + 2 * nr_pages + 1) * 8
    return -(-header // PAGE_SIZE) * PAGE_SIZE
