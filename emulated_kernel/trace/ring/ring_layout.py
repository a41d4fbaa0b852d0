"""Layout of a ring buffer's memory, on which guest code and the host's readers rely.

Each CPU writes to its own buffer. The buffer's control block has 32 u64 words (little-endian): the state that
each event changes, and counters. RingControl lists the words.

The memory of the sub-buffers starts with space for a control block, which is used if there is no other one.
The following words are

         word 32...        slots[nr_pages]: the number of the sub-buffer in each ring slot
         then              page_entries[nr_pages + 1]: events on each sub-buffer that the tail has left

The nr_pages + 1 sub-buffers (buffer_page.py) have 4096 << order bytes each. They begin at the next address
that is a multiple of this size. The memory itself begins at the address in the control block's word `base`, a
multiple of 4096. The commit word of tail_page is stale: its data end at write_ptr (or parked_ptr).

Guest code writes an event of `length` bytes (buffer_page.event_size) at the time t like this:

    p = write_ptr
    last = (4096 << order) - 1
    if ((p - 1) & last) > last - length, unsigned: no room (or recording off, or a sub-buffer's first event)
    delta = t - write_stamp; if delta >= 1 << 27, unsigned: a time extend is needed
    write_stamp += delta; put the event at p; tail_entries += 1; write_ptr = p + length

If there is no room or a time extend is needed, guest code first calls the host: RingBuffer.make_room(length,
t). If the call returns True, the steps succeed when they are repeated. If the call returns False, the event
is dropped. A dropped event is counted only if there was no room. Guest code can also move the tail to the
next sub-buffer itself (trace/compiled/next_page.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import LittleEndianStructure, c_uint64, sizeof
from enum import IntFlag

from emulated_kernel.trace.ring.buffer_page import capacity
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import dataclass, replace
from emulated_kernel.util.fast_named_tuple import NamedTuple

MIN_PAGES = 2
"""Minimum number of sub-buffers in a ring."""
_SIZE_MASK = (1 << 64) - 1


class RingShape(NamedTuple):
    """Shape of a ring: the number of its sub-buffers, and their size as an order."""

    pages: int
    """Number of sub-buffers, without the reader page."""
    order: int = 0
    """Order of the sub-buffers, which have 4096 << order bytes."""


class RingControl(LittleEndianStructure):
    """A control block of a ring buffer: 32 u64 words; the last 5 words are reserved."""

    write_ptr: int  # address of the next event; 0: only the host may write one now
    write_stamp: int  # time of the last event written
    tail_entries: int  # events on the sub-buffer that is being written
    parked_ptr: int  # write_ptr's value while that is 0
    base: int  # address of the sub-buffers' memory
    nr_pages: int  # sub-buffers in the ring; one more, the reader page, is outside of it
    flags: int  # RingFlag
    tail_page: int  # number of the sub-buffer that is being written
    tail_slot: int  # ring slot of tail_page (or its last slot, if the reader has taken it)
    head_slot: int  # ring slot of the oldest unread sub-buffer
    reader_page: int  # number of the reader's sub-buffer
    reader_read: int  # bytes of its data that were consumed
    anchor_slot: int  # ring slot of head and tail after a reset
    read_stamp: int  # time of the last event consumed
    entries: int  # events on all sub-buffers that the tail ever left
    overrun: int  # events overwritten before they were read
    commit_overrun: int  # events lost because the writer met its own uncommitted ones (always 0 here)
    dropped: int  # events dropped because the buffer was full (without overwriting)
    read: int  # events consumed
    entries_bytes: int  # bytes written on sub-buffers that the tail left and that were not overwritten
    read_bytes: int  # bytes consumed
    last_overrun: int  # `overrun` when the reader last took a sub-buffer
    lost_events: int  # events lost just before the reader's next event
    aside: int  # 1: the buffer of a snapshot, not of the trace array itself
    changing: int  # 1 while the host changes words that belong together
    order: int  # a sub-buffer has 4096 << order bytes
    first_page: int  # address of sub-buffer 0
    _fields_ = (*((name, c_uint64) for name in __annotations__), ("reserved", c_uint64 * 5))


CONTROL_SIZE = sizeof(RingControl)
SLOTS = CONTROL_SIZE // 8
"""Index of the first ring slot among the u64 words of the buffer's memory."""
COUNTERS = (
    "write_stamp",
    "read_stamp",
    "entries",
    "overrun",
    "commit_overrun",
    "dropped",
    "read",
    "entries_bytes",
    "read_bytes",
    "last_overrun",
    "lost_events",
)
"""Names of the control block's words that a reset clears."""


def offset_of(word: str) -> int:
    """Return the offset in bytes of the word called `word` in a control block."""
    offset: int = getattr(RingControl, word).offset
    return offset


WRITE_PTR = offset_of("write_ptr")
WRITE_STAMP = offset_of("write_stamp")
TAIL_ENTRIES = offset_of("tail_entries")
FLAGS = offset_of("flags")


class RingFlag(IntFlag):
    """Bits of `flags` in a control block."""

    OVERWRITE = 1
    """If the buffer is full, it overwrites its oldest sub-buffer. Without this bit, it drops new events."""
    DISABLED = 2
    """The buffer neither records nor counts events."""


def _keep() -> None:
    """Do nothing: default of RingMemory.release, for memory that Python frees when it is unused."""


def _ignore(_what: str, _why: object) -> None:
    """Do nothing: default of RingMemory.report, for memory to which only the host writes."""


@dataclass(frozen=True)
class RingMemory:
    """The memory of a ring buffer.

    Memory that no guest code uses has address 0.
    """

    pages: memoryview
    """Writable memory of at least memory_size() bytes for the shape of the ring, with any content."""
    address: int = 0
    """Guest address of the pages; 0 if no guest code uses them."""
    control: memoryview | None = None
    """Writable memory of the control block. If it is None, the start of `pages` is the control block."""
    control_at: int = 0
    """Offset of the control block from the per-CPU base of the buffer's CPU, in bytes, for guest code."""
    release: Callable[[], None] = _keep
    """Function that frees the pages."""
    report: Callable[[str, object], None] = _ignore
    """Function to call if the guest has damaged the memory; arguments: name of the data, and the damage."""

    @property
    def control_block(self) -> memoryview:
        """The memory of the control block, which has CONTROL_SIZE bytes."""
        return (self.pages if self.control is None else self.control).cast("B")[:CONTROL_SIZE]

    def moved_to(self, pages: RingMemory) -> RingMemory:
        """Return an object with the pages of `pages` and this object's control block. No memory is copied."""
        return replace(pages, control=self.control, control_at=self.control_at)


@dataclass(frozen=True)
class RingControls:
    """The control blocks of a set of ring buffers, one per CPU."""

    blocks: Sequence[memoryview]
    """Memory of each CPU's control block."""
    offset: int = 0
    """Offset of the control blocks from the per-CPU bases, in bytes."""
    release: Callable[[], None] = _keep
    """Function that frees the control blocks."""

    def place(self, cpu: int, pages: RingMemory) -> RingMemory:
        """Return an object with the pages of `pages` and the control block of `cpu`. No memory is copied."""
        return replace(pages, control=self.blocks[cpu], control_at=self.offset)


@dataclass(frozen=True)
class RecordTarget:
    """Data that guest code needs to write records to a trace array's ring buffers."""

    control_at: int
    """Offset of the control blocks from the per-CPU bases, in bytes."""
    saves_comm: bool
    """Whether guest code that writes a record also saves the task's name for saved_cmdlines."""
    make_room: Callable[[], bool]
    """Function of the host that guest code calls if there is no room or a time extend is needed.

    It calls RingBuffer.make_room() of the current CPU's buffer, and returns the result. True: there is room,
    so guest code tries again. False: guest code drops the event.
    """
    order: int = 0
    """Order of the buffers' sub-buffers, which have 4096 << order bytes."""


def pages_for(size: int, order: int = 0) -> int:
    """Return the number of sub-buffers of `order` for a ring of at least `size` bytes.

    As in Linux, rounding up a size near 2**64 overflows to the minimum.
    Mirrors: kernel/trace/ring_buffer.c:ring_buffer_resize (v6.12).
    """
    room = capacity(order)
    return max(MIN_PAGES, ((size + room - 1) & _SIZE_MASK) // room)


def memory_size(nr_pages: int, order: int = 0) -> int:
    """Return the size in bytes of the memory for a ring of `nr_pages` sub-buffers of `order`.

    The size is sufficient at any address that is a multiple of PAGE_SIZE.
    """
    page = PAGE_SIZE << order
    return data_start(nr_pages) + page - PAGE_SIZE + (nr_pages + 1) * page


def data_start(nr_pages: int, order: int = 0, address: int = 0) -> int:
    """Return the offset in bytes of the first sub-buffer in the memory of a ring buffer.

    `nr_pages`, `order`: shape of the ring. `address`: address of the memory.
    """
    page = PAGE_SIZE << order
    header = (SLOTS + 2 * nr_pages + 1) * 8
    return -(-(address + header) // page) * page - address
