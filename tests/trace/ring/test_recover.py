"""Recovery of a ring buffer whose process ended between any two stores: all complete records are found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.recover import RecoveredBuffer, UnreadableControlBlock, recover_ring_buffer
from emulated_kernel.trace.ring.ring_layout import (
    CONTROL_SIZE,
    RingControl,
    RingMemory,
    memory_size,
    offset_of,
)
from tests.sample import fewer, share

BASE = 0x7000
Events = list[tuple[int, bytes]]


class Stores:
    """A view of memory that calls a function before each store, so that the memory can be copied there."""

    def __init__(self, view: memoryview, before: Callable[[], None]) -> None:
        self._view = view
        self._before = before

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._before()
        self._view[key] = value


class Words:
    """A control block that calls a function before each store to one of its words."""

    def __init__(self, control: RingControl, before: Callable[[], None]) -> None:
        self.__dict__.update(control=control, before=before)

    def __getattr__(self, word: str) -> Any:
        return getattr(self.control, word)

    def __setattr__(self, word: str, value: int) -> None:
        self.before()
        setattr(self.control, word, value)


class Watched(RingBuffer):
    """A ring buffer that keeps an image of its memory from before each store to its control block and
    tables.
    """

    __slots__ = ("images", "images_of")
    images: list[tuple[bytes, bytes]]
    images_of: RingMemory

    def _attach(self, place: RingMemory, nr_pages: int) -> None:
        super()._attach(place, nr_pages)
        control: Any = Words(self._control, self.look)
        words: Any = Stores(self._words, self.look)
        table: Any = Stores(self._table, self.look)
        self._control, self._words, self._table = control, words, table

    def look(self) -> None:
        """Keep an image of the memory as a process that ends now would leave it."""
        if getattr(self, "images", None) is not None:
            self.images.append(image_of(self.images_of))


def image_of(place: RingMemory) -> tuple[bytes, bytes]:
    assert place.control is not None
    return bytes(place.control), bytes(place.pages)


def found(image: tuple[bytes, bytes]) -> RecoveredBuffer:
    control, pages = image

    def read(address: int, size: int) -> bytes:
        assert address == BASE
        return pages[:size]

    result = recover_ring_buffer(control, read)
    assert result is not None
    return result


def buffer(pages: int, *, overwrite: bool = True, order: int = 0) -> Watched:
    memory = memoryview(bytearray(memory_size(pages, order)))
    place = RingMemory(memory, BASE, memoryview(bytearray(CONTROL_SIZE)))
    ring = Watched(place, pages, overwrite=overwrite, order=order)
    ring.images, ring.images_of = [], place
    return ring


def steps(ring: Watched, seed: int) -> None:
    """Change the ring buffer 300 times at random. Check that each memory image is recovered to the records
    before or after a change.
    """
    rng = random.Random(seed)
    now = 1 << 20
    for number in range(300):
        before: Events = list(ring)
        ring.images.clear()
        now += rng.choice((1, 50, 1 << 27, 1 << 30))
        payload = number.to_bytes(8, "little") + bytes(rng.choice((0, 8, 200, 900)))
        if rng.random() < 0.7:
            ring.write(payload, now)
        elif before and rng.random() < 0.9:
            ring.consume()
        elif before:
            ring.read_page()
        after: Events = list(ring)
        for image in ring.images:
            check(found(image), before, after)
        check(found(image_of(ring.images_of)), after, after)


def check(result: RecoveredBuffer, before: Events, after: Events) -> None:
    held = list(result.buffer)
    assert result.torn <= 1
    assert not result.damage
    assert [event for event in before if event in after and event not in held] == []
    assert [event for event in held if event not in before and event not in after] == []
    assert held == sorted(held)
    assert len(result.buffer) == result.buffer.stats().entries == len(held)
    assert result.buffer.stats().size >= sum(len(payload) for _, payload in held)
    # The recovered buffer can be written.
    memory = memoryview(bytearray(memory_size(4, result.buffer.order)))
    result.buffer.resize(RingMemory(memory), 4)
    assert list(result.buffer) == held
    if held:
        assert result.buffer.consume() == (*held[0], 0)
        assert len(result.buffer) == len(held) - 1


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("seed", range(fewer(12, 6)))
def test_an_end_between_any_two_stores(seed: int, overwrite: bool) -> None:
    ring = buffer(3, overwrite=overwrite, order=seed % 3 // 2)
    steps(ring, seed)


@pytest.mark.parametrize(
    ("word", "change", "lost"),
    [
        pytest.param("write_stamp", 5, 0, id="its time alone is there"),
        pytest.param("tail_entries", 1, 0, id="it is counted already"),
        pytest.param("write_ptr", -4, 1, id="it is cut"),
    ],
)
def test_a_torn_record_is_counted(word: str, change: int, lost: int) -> None:
    """A record that was being written is counted as torn, and no other record is lost. Guest code moves the
    write pointer last.
    """
    ring = buffer(3)
    for number in range(5):
        ring.write(number.to_bytes(8, "little"), 1000 + number)
    events = list(ring)
    control, pages = image_of(ring.images_of)
    words = RingControl.from_buffer_copy(control)
    word = "parked_ptr" if word == "write_ptr" and not words.write_ptr else word
    setattr(words, word, getattr(words, word) + change)
    result = found((bytes(words), pages))
    assert result.torn == 1
    assert list(result.buffer) == events[: len(events) - lost]


def whole() -> tuple[bytes, bytes, Events]:
    """Return the image and the records of a ring buffer at rest, with full pages and a partly read page."""
    ring = buffer(4)
    for number in range(60):
        ring.write(number.to_bytes(8, "little") + bytes(240), 1000 + number)
    for _ in range(3):
        ring.consume()
    assert ring.dirty_pages >= 2
    return *image_of(ring.images_of), list(ring)


def known(control: bytes, pages: bytes) -> tuple[Events, int, str]:
    """Recover a ring buffer. Return its records, the number of lost records, and the description of the
    damage.
    """

    def read(address: int, size: int) -> bytes:
        if address != BASE or size > len(pages):
            raise ValueError("no pages there")
        return pages[:size]

    try:
        result = recover_ring_buffer(control, read)
    except UnreadableControlBlock as error:
        return [], error.lost, str(error)
    assert result is not None
    return list(result.buffer), result.torn, result.damage


@pytest.mark.parametrize("bit", share(range(8), 1, 3))
@pytest.mark.parametrize("where", ["control", "pages"])
def test_no_record_is_lost_without_a_word(where: str, bit: int) -> None:
    """If any single bit of a ring buffer is wrong, every lost record is counted.

    If more than one record is lost, the damage is also reported.
    """
    control, pages, events = whole()
    size = offset_of("changing") if where == "control" else len(pages)
    for at in range(0, size, 1 if where == "control" else 3):
        damaged = [bytearray(control), bytearray(pages)]
        damaged[where == "pages"][at] ^= 1 << bit
        held, torn, damage = known(bytes(damaged[0]), bytes(damaged[1]))
        lost = len(events) - len(held)
        assert torn >= lost, (at, lost, torn, damage)
        assert damage or lost <= 1, (at, lost, torn)


@pytest.mark.parametrize("word", ["write_ptr", "tail_page"])
def test_what_is_complete_stays_readable(word: str) -> None:
    """If one word for the tail of a ring buffer is damaged, all records stay readable, because another word
    has the same information.
    """
    control, pages, events = whole()
    words = RingControl.from_buffer_copy(control)
    setattr(words, word, getattr(words, word) ^ (1 << 40 if word == "write_ptr" else 1))
    held, torn, damage = known(bytes(words), pages)
    assert ([record for _, record in held], torn) == ([record for _, record in events], 0)
    assert damage == "counters and pages disagree"
