"""A ring buffer with words that guest code has damaged: reads end, and writes go on."""

from __future__ import annotations

import random

import pytest

from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.buffer_page import PAGE_DATA_SIZE
from emulated_kernel.trace.ring.ring_layout import CONTROL_SIZE, SLOTS, RingMemory, memory_size
from tests.sample import WHOLE

PAGES = 3
MAX_EVENTS = (PAGES + 2) * PAGE_DATA_SIZE // 4
VALUES = (0, 1, 2, PAGES, PAGES + 1, 31, 4095, 1 << 20, 1 << 31, 0x1234_5678_9ABC_DEF0, (1 << 64) - 1)


def filled() -> tuple[bytearray, RingBuffer, list[str]]:
    """Return the memory of a ring buffer, the buffer, and the list of its reports.

    The buffer has full pages, a partly read reader's page, and a page that is being written.
    """
    memory = bytearray(memory_size(PAGES))
    reports: list[str] = []
    place = RingMemory(memoryview(memory), report=lambda what, _why: reports.append(what))
    buffer = RingBuffer(place, PAGES)
    for number in range(700):
        assert buffer.write(number.to_bytes(4, "little") * (number % 40 + 1), number << number % 30)
    assert buffer.consume() is not None
    return memory, buffer, reports


def use(buffer: RingBuffer) -> None:
    """Call all operations of a ring buffer. Assert that reads end, and that the buffer works after a
    reset.
    """
    assert len(list(buffer)) <= MAX_EVENTS
    buffer.stats()
    assert 0 <= buffer.dirty_pages <= PAGES
    assert 0 <= len(buffer) <= MAX_EVENTS
    buffer.peek()
    for _ in range(3):
        buffer.consume()
    buffer.read_page(full=True)
    buffer.write(b"more", 1 << 40)
    buffer.disabled = True
    buffer.disabled = False
    pages = 0
    while buffer.read_page() is not None:
        pages += 1
        assert pages <= PAGES + 2
    for number in range(600):
        buffer.write(bytes(40), (1 << 41) + number)
    buffer.resize(RingMemory(memoryview(bytearray(memory_size(PAGES + 1)))), PAGES + 1)
    buffer.reset()
    assert buffer.write(b"last", 1 << 42)
    assert [record[:4] for _, record in buffer] == [b"last"]


def test_an_intact_buffer_is_not_emptied() -> None:
    _, buffer, reports = filled()
    before = list(buffer)
    buffer.check()
    assert (list(buffer), reports) == (before, [])
    use(buffer)


@pytest.mark.parametrize("part", ["control", "slots", "pages"])
def test_each_damaged_word(part: str) -> None:
    memory, *_ = filled()
    places = {
        "control": range(0, CONTROL_SIZE, 8),
        "slots": range(8 * SLOTS, 8 * (SLOTS + 2 * PAGES + 1), 8),
        "pages": range(4096, len(memory), 8),
    }[part]
    cases = [(place, value) for place in places for value in (place, place + 8, *VALUES)]
    for place, value in cases if WHOLE else random.Random(5).sample(cases, min(len(cases), 150)):
        memory, buffer, _ = filled()
        memory[place : place + 8] = value.to_bytes(8, "little")
        use(buffer)


def test_a_damaged_control_block_is_reported_and_events_are_recorded_again() -> None:
    memory, buffer, reports = filled()
    memory[8 * 7 : 8 * 8] = b"\xff" * 8  # tail_page
    assert list(buffer) == []
    assert reports == ["ring buffer"]
    assert buffer.write(b"next", 5)
    assert [record[:4] for _, record in buffer] == [b"next"]
