"""Ring buffer pages: the format of a sub-buffer, which trace_pipe_raw returns and guest code writes.

A sub-buffer is one page of 4096 bytes, little-endian. If buffer_subbuf_size_kb says so, a sub-buffer is a
larger page of 4096 << order bytes.

    0   u64  time_stamp   absolute time of its first event
    8   u64  commit       bytes of data in use; bits 31 and 30 are MISSED_EVENTS and MISSED_STORED
    16  data              events, each on a multiple of 4 bytes

An event starts with a u32. Its low 5 bits are type_len; its upper 27 bits are time_delta, the time since the
previous event.

    type_len 1..28   data of type_len * 4 bytes follows
    0                a u32 follows: 4 + the bytes of data after it
    29 PADDING       time_delta 0: the rest of the page is empty; else a u32: 4 less than the bytes to skip
    30 TIME_EXTEND   a u32 follows: delta >> 27
    31 TIME_STAMP    a u32 follows: absolute time >> 27

Mirrors: include/linux/ring_buffer.h, kernel/trace/ring_buffer.c (v6.1).
"""

from __future__ import annotations

from emulated_kernel.util.abi import PAGE_SIZE

PAGE_HEADER_SIZE = 16
PAGE_DATA_SIZE = PAGE_SIZE - PAGE_HEADER_SIZE
MAX_ORDER = 7
"""Maximum order of a sub-buffer, whose size is PAGE_SIZE << order."""
MAX_DATA_SIZE = PAGE_DATA_SIZE - 8
"""Maximum size of a payload in bytes. With the headers of event and page, it fills 4096 bytes.

The maximum is the same with larger sub-buffers.
Mirrors: kernel/trace/ring_buffer.c:struct trace_buffer.max_data_size (v6.12).
"""

MISSED_EVENTS = 1 << 31
MISSED_STORED = 1 << 30
COMMIT_MASK = (1 << 20) - 1

MAX_TYPE_LEN = 28
MAX_SMALL_DATA = MAX_TYPE_LEN * 4
PADDING = 29
TIME_EXTEND = 30
TIME_STAMP = 31
TIME_EVENT_SIZE = 8
DELTA_BITS = 27
DELTA_MASK = (1 << DELTA_BITS) - 1
STAMP_MASK = (1 << 59) - 1


def capacity(order: int) -> int:
    """Return the number of bytes of data in a sub-buffer of PAGE_SIZE << order bytes."""
    return (PAGE_SIZE << order) - PAGE_HEADER_SIZE


def event_size(payload_size: int) -> int:
    """Return the size on a page, in bytes, of an event with a payload of `payload_size` bytes.

    The size includes the header and padding.
    Mirrors: kernel/trace/ring_buffer.c:rb_calculate_event_length (v6.1).
    """
    size = max(payload_size, 1) + (4 if payload_size <= MAX_SMALL_DATA else 8)
    size = (size + 3) & ~3
    # A discarded event becomes padding. A discarded event of TIME_EVENT_SIZE would look like a time extend.
    return 12 if size == TIME_EVENT_SIZE else size
