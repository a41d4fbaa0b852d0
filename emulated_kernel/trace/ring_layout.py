"""Where everything stands in a ring buffer's memory: the contract between guest code and the reader here.

The memory starts with u64 words (little-endian):

    word  0 nr_pages       sub-buffers in the ring; one more, the reader page, stands outside of it
          1 flags          RingFlag
          2 tail_page      number of the sub-buffer that is written
          3 tail_slot      ring slot of tail_page (or that it had before the reader took it)
          4 head_slot      ring slot of the oldest unread sub-buffer
          5 reader_page    number of the reader's sub-buffer
          6 reader_read    bytes of its data that were consumed
          7 anchor_slot    where head and tail go on reset
          8 write_stamp    time of the last event written
          9 read_stamp     time of the last event consumed
         10 entries        events written
         11 overrun        events overwritten before they were read
         12 commit_overrun events lost because the writer met its own uncommitted ones (always 0 here)
         13 dropped        events refused for want of room (no overwriting)
         14 read           events consumed
         15 entries_bytes  bytes written and not overwritten
         16 read_bytes     bytes consumed
         17 last_overrun   `overrun` when the reader last took a sub-buffer
         18 lost_events    events lost before the next one that the reader gets
         32...             slots[nr_pages]: the sub-buffer's number of each ring slot
         then              page_entries[nr_pages + 1]: events on each sub-buffer

and goes on with the nr_pages + 1 sub-buffers (ring_page.py) from the next multiple of 4096 bytes.

A writer whose event fits on the tail page changes only that page, write_stamp, entries, entries_bytes
and the page's page_entries; all other cases begin with RingBuffer.move_tail.
"""

from __future__ import annotations

from enum import IntFlag

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.trace.ring_page import PAGE_DATA_SIZE

MIN_PAGES = 2

(
    NR_PAGES,
    FLAGS,
    TAIL_PAGE,
    TAIL_SLOT,
    HEAD_SLOT,
    READER_PAGE,
    READER_READ,
    ANCHOR_SLOT,
    WRITE_STAMP,
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
) = range(19)
SLOTS = 32


class RingFlag(IntFlag):
    """Word 1 of a ring buffer."""

    OVERWRITE = 1
    """A full buffer loses its oldest sub-buffer; otherwise it refuses new events."""
    DISABLED = 2
    """Nothing is recorded or counted."""


def pages_for(size: int) -> int:
    """Sub-buffers in the ring for a wanted size in bytes."""
    return max(MIN_PAGES, -(-size // PAGE_DATA_SIZE))


def memory_size(nr_pages: int) -> int:
    """Bytes of memory that a ring buffer of `nr_pages` sub-buffers stands in."""
    return data_start(nr_pages) + (nr_pages + 1) * PAGE_SIZE


def data_start(nr_pages: int) -> int:
    """Where the sub-buffers begin, in bytes."""
    header = (SLOTS + 2 * nr_pages + 1) * 8
    return -(-header // PAGE_SIZE) * PAGE_SIZE
