"""Layout of a ring buffer's memory: the contract between guest code and the reader here.

Each CPU writes to a buffer of its own. Its control block of 32 u64 words (little-endian) holds what changes
with each event and counts, as RingControl says.

The sub-buffers' memory starts with room for a control block (used where there is no other), then

         word 32...        slots[nr_pages]: the sub-buffer's number of each ring slot
         then              page_entries[nr_pages + 1]: events on each sub-buffer that was left behind

and goes on with the nr_pages + 1 sub-buffers (page.py) from the next multiple of 4096 bytes; `base` is
a multiple of 4096 too. The commit word of tail_page is stale: its data end at write_ptr (or parked_ptr).

How guest code writes an event of `length` bytes (page.event_size) at the time t:

    p = write_ptr
    if ((p - 1) & 4095) > 4095 - length, unsigned: no room (or off, or the first event of a sub-buffer)
    delta = t - write_stamp; if delta >= 1 << 27, unsigned: a time extend is needed
    write_stamp += delta; put the event at p; tail_entries += 1; write_ptr = p + length

In both other cases the host is asked first: RingBuffer.make_room(length, t). If that says yes, the steps
succeed when begun again; if no, the event is dropped, and counted if that is for want of room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import LittleEndianStructure, c_uint64, sizeof
from dataclasses import replace
from enum import IntFlag

from emulated_kernel.trace.ring.buffer_page import PAGE_DATA_SIZE
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import dataclass

MIN_PAGES = 2
_SIZE_MASK = (1 << 64) - 1


class RingControl(LittleEndianStructure):
    """A control block: u64 words, and room for more."""

    write_ptr: int  # address of the next event; 0: nobody but the host may write one now
    write_stamp: int  # time of the last event written
    tail_entries: int  # events on the sub-buffer that is written
    parked_ptr: int  # write_ptr's value while that is 0
    base: int  # address of the sub-buffers' memory
    nr_pages: int  # sub-buffers in the ring; one more, the reader page, stands outside of it
    flags: int  # RingFlag
    tail_page: int  # number of the sub-buffer that is written
    tail_slot: int  # ring slot of tail_page (or that it had before the reader took it)
    head_slot: int  # ring slot of the oldest unread sub-buffer
    reader_page: int  # number of the reader's sub-buffer
    reader_read: int  # bytes of its data that were consumed
    anchor_slot: int  # where head and tail go on reset
    read_stamp: int  # time of the last event consumed
    entries: int  # events on all sub-buffers that were ever left behind
    overrun: int  # events overwritten before they were read
    commit_overrun: int  # events lost because the writer met its own uncommitted ones (always 0 here)
    dropped: int  # events refused for want of room (no overwriting)
    read: int  # events consumed
    entries_bytes: int  # bytes written on sub-buffers that were left behind, and not overwritten
    read_bytes: int  # bytes consumed
    last_overrun: int  # `overrun` when the reader last took a sub-buffer
    lost_events: int  # events lost before the next one that the reader gets
    aside: int  # 1: the buffer of a snapshot, not of the trace array itself
    changing: int  # 1 while the host changes words that belong together
    _fields_ = (*((name, c_uint64) for name in __annotations__), ("reserved", c_uint64 * 7))


CONTROL_SIZE = sizeof(RingControl)
SLOTS = CONTROL_SIZE // 8
COUNTERS = (
    *("write_stamp", "read_stamp", "entries", "overrun", "commit_overrun", "dropped", "read"),
    *("entries_bytes", "read_bytes", "last_overrun", "lost_events"),
)
"""Words that a reset clears."""


def offset_of(word: str) -> int:
    """Where a word of a control block begins, in bytes."""
    offset: int = getattr(RingControl, word).offset
    return offset


WRITE_PTR, WRITE_STAMP, TAIL_ENTRIES, FLAGS = map(
    offset_of, ("write_ptr", "write_stamp", "tail_entries", "flags")
)
"""Where guest code finds what it needs for an append."""


class RingFlag(IntFlag):
    """`flags` of a control block."""

    OVERWRITE = 1
    """A full buffer loses its oldest sub-buffer; otherwise it refuses new events."""
    DISABLED = 2
    """Nothing is recorded or counted."""


def _keep() -> None:
    """Memory that goes with its last user."""


@dataclass(frozen=True)
class RingMemory:
    """The memory of a ring buffer.

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

    @property
    def control_block(self) -> memoryview:
        """Its bytes, wherever it stands."""
        return (self.pages if self.control is None else self.control).cast("B")[:CONTROL_SIZE]

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


@dataclass(frozen=True)
class RecordTarget:
    """A recorder's ring buffers, one of each CPU, as guest code writes to them."""

    control_at: int
    """Offset of the control blocks."""
    saves_comm: bool
    make_room: Callable[[], bool]
    """RingBuffer.make_room of the CPU's buffer for the event that `event_time` tells of."""


def pages_for(size: int) -> int:
    """Sub-buffers in the ring for a wanted size in bytes.

    Linux: rounding up wraps around. Mirrors: kernel/trace/ring_buffer.c:ring_buffer_resize (v6.1).
    """
    return max(MIN_PAGES, ((size + PAGE_DATA_SIZE - 1) & _SIZE_MASK) // PAGE_DATA_SIZE)


def memory_size(nr_pages: int) -> int:
    """Bytes of memory of a ring buffer with `nr_pages` sub-buffers."""
    return data_start(nr_pages) + (nr_pages + 1) * PAGE_SIZE


def data_start(nr_pages: int) -> int:
    """Where the sub-buffers begin, in bytes."""
    header = (SLOTS + 2 * nr_pages + 1) * 8
    return -(-header // PAGE_SIZE) * PAGE_SIZE
