"""Ring buffer operations, each tested alone, and the layout of the buffer's memory."""

from __future__ import annotations

import struct

import pytest

from emulated_kernel.trace.ring import ring_layout
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.buffer_page import (
    MAX_DATA_SIZE,
    MISSED_EVENTS,
    MISSED_STORED,
    PAGE_DATA_SIZE,
    event_size,
)
from emulated_kernel.trace.ring.ring_layout import RingControl, RingMemory, memory_size, pages_for

BIG = bytes(1000)
"""Payload of 1000 bytes. Four events with this payload fill a page except 64 bytes."""


def ring(pages: int = 2, **more: bool) -> RingBuffer:
    return RingBuffer(RingMemory(memoryview(bytearray(b"\xa5" * memory_size(pages)))), pages, **more)


def fill(buffer: RingBuffer, count: int, first: int = 0) -> None:
    for n in range(first, first + count):
        buffer.write(struct.pack("<I", n) + BIG[4:], n)


def numbers(buffer: RingBuffer) -> list[int]:
    return [int.from_bytes(record[:4], "little") for _, record in buffer]


def consumed(buffer: RingBuffer) -> list[tuple[int, int]]:
    """Consume all events. Return for each its number, and the count of events lost before it."""
    events = []
    while event := buffer.consume():
        events.append((int.from_bytes(event.record[:4], "little"), event.lost_events))
    return events


def page_of(memory: bytes, pages: int, number: int) -> bytes:
    at = len(memory) - (pages + 1 - number) * 4096
    return memory[at : at + 4096]


@pytest.mark.parametrize(
    ("payload", "size"),
    [(0, 12), (1, 12), (4, 12), (5, 12), (8, 12), (9, 16), (112, 116), (113, 124), (4072, 4080)],
)
def test_size_of_an_event(payload: int, size: int) -> None:
    assert event_size(payload) == size


def test_small_event_in_memory() -> None:
    memory = bytearray(memory_size(2))
    buffer = RingBuffer(RingMemory(memoryview(memory)), 2)
    buffer.write(b"abcdefgh", 1000)
    buffer.write(b"ijklmnop", 1007)
    page = page_of(memory, 2, 0)
    assert page[:8] == struct.pack("<Q", 1000)
    assert page[16:40] == struct.pack("<I8s", 2, b"abcdefgh") + struct.pack("<I8s", 2 | 7 << 5, b"ijklmnop")


def test_large_event_in_memory() -> None:
    memory = bytearray(memory_size(2))
    buffer = RingBuffer(RingMemory(memoryview(memory)), 2)
    buffer.write(bytes(range(120)), 5)
    page = page_of(memory, 2, 0)
    assert page[16:24] == struct.pack("<II", 0, 124)
    assert page[24:144] == bytes(range(120))


@pytest.mark.parametrize("delta", [(1 << 27) - 1, 1 << 27, (1 << 27) + 1, 1 << 40, (1 << 59) - 2000])
def test_long_deltas(delta: int) -> None:
    buffer = ring()
    buffer.write(b"a", 1000)
    buffer.write(b"b", 1000 + delta)
    buffer.write(b"c", 1001 + delta)
    assert [stamp for stamp, _ in buffer] == [1000, 1000 + delta, 1001 + delta]
    assert buffer.stats().size == 36 + (8 if delta >> 27 else 0)


def test_time_extend_in_memory() -> None:
    memory = bytearray(memory_size(2))
    buffer = RingBuffer(RingMemory(memoryview(memory)), 2)
    buffer.write(b"a", 0)
    buffer.write(b"b", 3 << 27 | 5)
    assert page_of(memory, 2, 0)[28:36] == struct.pack("<II", 30 | 5 << 5, 3)


def test_a_clock_that_goes_back() -> None:
    buffer = ring()
    for stamp in (5000, 4000, 4001, 1 << 50, 7):
        buffer.write(b"x", stamp)
    assert [stamp for stamp, _ in buffer] == [5000, 4000, 4001, 1 << 50, 7]
    assert [buffer.consume().time_stamp for _ in range(5)] == [5000, 4000, 4001, 1 << 50, 7]  # type: ignore[union-attr]


def test_the_page_ends_with_padding() -> None:
    memory = bytearray(memory_size(2))
    buffer = RingBuffer(RingMemory(memoryview(memory)), 2)
    fill(buffer, 5)
    page = page_of(memory, 2, 0)
    room = PAGE_DATA_SIZE - 4 * event_size(1000)
    assert page[8:16] == struct.pack("<Q", PAGE_DATA_SIZE)
    assert page[4096 - room : 4104 - room] == struct.pack("<II", 29 | 1 << 5, room - 4)
    assert buffer.stats().size == PAGE_DATA_SIZE + event_size(1000)


def test_room_for_less_than_an_event_is_no_data() -> None:
    memory = bytearray(memory_size(2))
    buffer = RingBuffer(RingMemory(memoryview(memory)), 2)
    buffer.write(bytes(MAX_DATA_SIZE - 4), 0)
    buffer.write(b"next", 1)
    page = page_of(memory, 2, 0)
    assert page[8:16] == struct.pack("<Q", PAGE_DATA_SIZE - 4)
    assert page[-4:] == struct.pack("<I", 29)
    assert len(list(buffer)) == 2
    assert [buffer.consume() is not None for _ in range(3)] == [True, True, False]


def test_bytes_of_pages_that_were_overwritten_are_those_in_use() -> None:
    buffer = ring()
    for n in range(9):
        buffer.write(bytes(MAX_DATA_SIZE - 4), n)
    assert buffer.stats().size == 2 * (PAGE_DATA_SIZE - 4)


def test_too_large_a_payload_is_refused_and_not_counted() -> None:
    buffer = ring()
    assert buffer.write(bytes(MAX_DATA_SIZE), 0)
    assert not buffer.write(bytes(MAX_DATA_SIZE + 1), 0)
    assert buffer.stats().dropped_events == 0
    assert len(buffer) == 1


def test_overwrite_loses_a_page_of_the_oldest() -> None:
    buffer = ring()
    fill(buffer, 8)
    assert (len(buffer), buffer.stats().overrun) == (8, 0)
    fill(buffer, 1, first=8)
    assert (len(buffer), buffer.stats().overrun) == (5, 4)
    assert numbers(buffer) == [4, 5, 6, 7, 8]
    stats = buffer.stats()
    assert stats.size == PAGE_DATA_SIZE + event_size(1000)
    assert stats.oldest_event_ts == 4


def test_without_overwrite_new_events_are_dropped() -> None:
    buffer = ring(overwrite=False)
    fill(buffer, 11)
    assert numbers(buffer) == list(range(8))
    stats = buffer.stats()
    assert (stats.entries, stats.overrun, stats.dropped_events) == (8, 0, 3)


def test_a_drop_closes_the_last_page() -> None:
    # Linux: the tail is padded before it is known that there is no next page.
    buffer = ring(overwrite=False)
    fill(buffer, 9)
    assert not buffer.write(b"small", 100)
    assert buffer.stats().dropped_events == 2


def test_reading_makes_room_again() -> None:
    buffer = ring(overwrite=False)
    fill(buffer, 9)
    assert consumed(buffer)[:5] == [(n, 0) for n in range(5)]
    fill(buffer, 9, first=20)
    assert numbers(buffer) == list(range(20, 28))


def test_lost_events_come_with_the_next_one_read() -> None:
    buffer = ring()
    fill(buffer, 13)
    assert consumed(buffer) == [(8, 8), (9, 0), (10, 0), (11, 0), (12, 0)]


def test_the_readers_page_is_not_overwritten() -> None:
    buffer = ring()
    fill(buffer, 2)
    first = buffer.consume()
    assert first is not None
    fill(buffer, 30, first=2)
    events = consumed(buffer)
    assert events[:3] == [(1, 0), (2, 0), (3, 0)]
    number, lost = events[3]
    assert lost == number - 4 == buffer.stats().overrun


def test_peek_consumes_nothing() -> None:
    buffer = ring()
    fill(buffer, 13)
    assert buffer.peek() == buffer.peek() == buffer.consume()
    assert (buffer.stats().read_events, len(buffer)) == (1, 4)


def test_nothing_to_read() -> None:
    buffer = ring()
    assert buffer.peek() is None
    assert buffer.consume() is None
    assert buffer.read_page() is None
    assert list(buffer) == []


def test_disabled() -> None:
    buffer = ring()
    buffer.disabled = True
    assert not buffer.write(b"x", 0)
    assert buffer.stats().dropped_events == 0
    buffer.disabled = False
    assert buffer.write(b"x", 0)


def test_reset_keeps_modes_and_the_oldest_time() -> None:
    buffer = ring(overwrite=False)
    fill(buffer, 9, first=50)
    buffer.consume()
    buffer.reset()
    stats = buffer.stats()
    assert (stats.entries, stats.dropped_events, stats.read_events, stats.size) == (0, 0, 0, 0)
    assert not buffer.overwrite
    fill(buffer, 3)
    assert consumed(buffer) == [(0, 0), (1, 0), (2, 0)]


def test_the_oldest_time_after_a_reset_is_that_of_the_page_behind_the_reader() -> None:
    buffer = ring(3)
    fill(buffer, 12)
    buffer.consume()
    buffer.reset()
    assert buffer.stats().oldest_event_ts == 8


def test_read_events_leave_the_bytes() -> None:
    buffer = ring()
    fill(buffer, 6)
    buffer.consume()
    assert buffer.stats().size == PAGE_DATA_SIZE + event_size(1000)
    consumed(buffer)
    assert buffer.stats().size == 0


@pytest.mark.parametrize(
    ("size", "pages"), [(0, 2), (1, 2), (8160, 2), (8161, 3), (65536, 17), (1441792, 354)]
)
def test_pages_for_a_size(size: int, pages: int) -> None:
    assert pages_for(size) == pages


@pytest.mark.parametrize("consume_first", [0, 1, 3, 4, 8])
@pytest.mark.parametrize("pages", [2, 3, 4, 9])
def test_resize_keeps_the_newest(pages: int, consume_first: int) -> None:
    buffer = ring(4)
    fill(buffer, 16)
    for _ in range(consume_first):
        buffer.consume()
    before = numbers(buffer)
    buffer.resize(RingMemory(memoryview(bytearray(memory_size(pages)))), pages)
    after = numbers(buffer)
    assert after == [n for n in before if n in after]
    assert len(after) == len(before) - buffer.stats().overrun
    assert after[-1] == 15
    fill(buffer, 6, first=16)
    assert numbers(buffer)[-6:] == list(range(16, 22))
    assert len(buffer) == len(numbers(buffer))
    assert buffer.size == pages * PAGE_DATA_SIZE


def test_a_page_is_read_whole() -> None:
    buffer = ring()
    fill(buffer, 13)
    page = buffer.read_page()
    assert page is not None
    stamp, commit = struct.unpack_from("<QQ", page)
    assert stamp == 8
    assert commit & 0xFFFFF == PAGE_DATA_SIZE
    assert commit & MISSED_EVENTS
    assert (buffer.stats().read_events, len(buffer)) == (4, 1)
    rest = buffer.read_page()
    assert rest is not None
    assert struct.unpack_from("<QQ", rest) == (12, event_size(1000))
    assert buffer.stats().size == 0


def test_the_rest_of_a_page_starts_at_the_time_of_the_last_read_event() -> None:
    buffer = ring()
    for stamp in (100, 110, 130):
        buffer.write(b"12345678", stamp)
    buffer.consume()
    page = buffer.read_page()
    assert page is not None
    assert struct.unpack_from("<QQI", page) == (100, 24, 2 | 10 << 5)


def test_a_page_tells_how_many_events_were_lost() -> None:
    buffer = ring()
    fill(buffer, 12)
    for n in range(12, 20):
        buffer.write(bytes(1000), n)
    while len(buffer) > 4:
        buffer.consume()
    fill(buffer, 1, first=90)
    overrun_before = buffer.stats().overrun
    fill(buffer, 20, first=91)
    consumed_lost = []
    while page := buffer.read_page():
        _, commit = struct.unpack_from("<QQ", page)
        if commit & MISSED_STORED:
            size = commit & 0xFFFFF
            consumed_lost.append(struct.unpack_from("<Q", page, 16 + size)[0])
        elif commit & MISSED_EVENTS:
            consumed_lost.append(buffer.stats().overrun - overrun_before)
    assert sum(consumed_lost) == buffer.stats().overrun - overrun_before


@pytest.mark.parametrize("address", [0, 0xFFFFC98000000000])
def test_guest_code_appends_as_the_layout_says(address: int) -> None:
    memory, block = bytearray(memory_size(2)), bytearray(ring_layout.CONTROL_SIZE)
    control = RingControl.from_buffer(block)
    buffer = RingBuffer(RingMemory(memoryview(memory), address, memoryview(block)), 2)
    assert control.write_ptr == 0
    buffer.write(b"12345678", 100)
    append(memory, control, b"guest..!", 105)
    assert list(buffer) == [(100, b"12345678"), (105, b"guest..!")]
    assert len(buffer) == 2
    assert buffer.stats().size == 24
    buffer.write(b"abcdefgh", 106)
    assert [stamp for stamp, _ in buffer] == [100, 105, 106]
    buffer.disabled = True
    assert control.write_ptr == 0
    buffer.disabled = False
    append(memory, control, b"again..!", 107)
    buffer.resize(RingMemory(memoryview(bytearray(memory_size(4)))), 4)
    assert control.write_ptr == 0
    assert [stamp for stamp, _ in buffer] == [100, 105, 106, 107]
    assert [event.time_stamp for event in iter(buffer.consume, None)] == [100, 105, 106, 107]


def append(memory: bytearray, control: RingControl, payload: bytes, time_stamp: int) -> None:
    """Append an event of 12 bytes that fits on the page, as guest code does."""
    pointer = control.write_ptr
    assert pointer - 1 & 4095 <= 4095 - 12
    delta = time_stamp - control.write_stamp
    struct.pack_into("<I8s", memory, pointer - control.base, 2 | delta << 5, payload)
    control.write_stamp = time_stamp
    control.tail_entries += 1
    control.write_ptr = pointer + 12


def test_a_page_that_is_full_to_the_byte_has_no_room() -> None:
    memory = bytearray(memory_size(2))
    buffer = RingBuffer(RingMemory(memoryview(memory)), 2)
    control = RingControl.from_buffer(memory)
    buffer.write(bytes(MAX_DATA_SIZE), 1)
    pointer = control.write_ptr
    assert pointer % 4096 == 0
    assert pointer - 1 & 4095 > 4095 - 12
    assert buffer.make_room(12, 2)
    assert control.write_ptr % 4096 == 16
