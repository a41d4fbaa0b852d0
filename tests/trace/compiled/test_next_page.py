"""Guest code moves the tail of a ring buffer to the next page exactly as the host does. In all other cases,
guest code asks the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.trace.compiled.next_page import CONTROL, LENGTH, REQUEST_SIZE, TIME, NextPageEmitter
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.buffer_page import event_size
from emulated_kernel.trace.ring.recover import recover_ring_buffer
from emulated_kernel.trace.ring.ring_layout import (
    CONTROL_SIZE,
    SLOTS,
    RingControl,
    RingMemory,
    memory_size,
    offset_of,
)
from tests.arch.program_model import Interpreter, Regions
from tests.sample import fewer

PAGES_AT, PER_CPU, CONTROL_AT = 0xE0001000, 0xC1100000, 0x400
"""Addresses that fit into 4 bytes. The buffer's memory does not begin at a multiple of the larger pages."""


class Watched(Regions):
    """A guest's memory that calls `before` before each store."""

    before: Callable[[], None] | None = None

    def write(self, address: int, value: int, size: int) -> None:
        if self.before is not None:
            self.before()
        super().write(address, value, size)


class GuestRing:
    """Two ring buffers with the same events: guest code moves the tail of the first, and the host writes the
    second.
    """

    def __init__(self, pages: int, bits: int, *, overwrite: bool = True, order: int = 0) -> None:
        self.bits = bits
        self.order = order
        size = memory_size(pages, order)
        self.memory = Watched({PAGES_AT: bytes(size), PER_CPU: bytes(CONTROL_AT + CONTROL_SIZE)})
        self.guest = RingBuffer(self.place(size), pages, overwrite=overwrite, order=order)
        here = memoryview(bytearray(size))
        block = memoryview(bytearray(CONTROL_SIZE))
        self.host = RingBuffer(RingMemory(here, PAGES_AT, block), pages, overwrite=overwrite, order=order)
        self.reports: list[str] = []
        self.asked = 0
        """Number of events for which guest code could not move the tail, so that the host must write them."""
        self.turned = 0
        """Number of pages to which guest code moved."""

    def place(self, size: int) -> RingMemory:
        """Return the memory of the guest's buffer; a resize gets new pages at the same address."""
        areas = self.memory.areas
        areas[PAGES_AT] = bytearray(size)
        control = memoryview(areas[PER_CPU])[CONTROL_AT:]
        report = lambda what, _why: self.reports.append(what)  # noqa: E731
        return RingMemory(memoryview(areas[PAGES_AT]), PAGES_AT, control, CONTROL_AT, report=report)

    def step(self, length: int, time: int) -> bool:
        """Run the guest code that moves the tail to the next page.

        Return True if it moved the tail, False if it asks the host. `length`, `time`: length of the event
        that needs room, and its time.
        """
        for word, value in ((TIME, time), (LENGTH, length), (CONTROL, PER_CPU + CONTROL_AT)):
            self.memory.areas[PER_CPU][word : word + 8] = value.to_bytes(8, "little")
        builder = ProgramBuilder()
        NextPageEmitter(builder, self.bits // 8, 0).emit()
        stray = [0xDEAD0000 + number for number in range(7)]
        Interpreter(self.bits, {}, self.memory, PER_CPU, lambda _number: False, stray).run(builder.program())
        return not self.memory.read(PER_CPU + LENGTH, 4)

    def write(self, payload: bytes, time: int) -> bool:
        """Write an event to both buffers. Guest code moves the tail in the cases that ring_layout.py
        describes.
        """
        ring = self.guest
        control = RingControl.from_buffer(ring.place.control_block)
        length = event_size(len(payload))
        last = ring.page_size - 1
        offset = (control.write_ptr - 1) & last
        is_short = not control.write_ptr or offset > last - length
        if not ring.disabled and (is_short or (time - control.write_stamp) >> 27):
            if self.step(length, time):
                self.turned += 1
            else:
                self.asked += 1
        recorded = ring.write(payload, time)
        assert recorded is self.host.write(payload, time)
        return recorded

    def same(self) -> None:
        """Check that both buffers have the same words and pages."""
        assert self.reports == []
        assert bytes(self.guest.place.control_block) == bytes(self.host.place.control_block)
        assert bytes(self.guest.place.pages) == bytes(self.host.place.pages)


def both(ring: GuestRing, act: Callable[[RingBuffer], object]) -> None:
    assert act(ring.guest) == act(ring.host)


def resize(ring: GuestRing, pages: int) -> None:
    size = memory_size(pages, ring.order)
    ring.host.resize(RingMemory(memoryview(bytearray(size)), PAGES_AT, ring.host.place.control), pages)
    images = ring.guest.kept(pages)
    ring.guest.resize(ring.place(size), pages, images)


def switch(buffer: RingBuffer, name: str, value: bool) -> None:
    setattr(buffer, name, value)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("seed", range(fewer(40, 8)))
def test_both_buffers_are_equal_after_each_operation(seed: int, overwrite: bool) -> None:
    rng = random.Random(seed)
    ring = GuestRing(rng.choice((2, 3, 5)), (64, 32)[seed % 2], overwrite=overwrite, order=seed % 3 // 2)
    sizes = rng.choice(((90, 196, 300), (900,), (20, 24, 2000), (192,)))
    # Make the time and the counters exceed 4 bytes.
    now = (1 << 32) - 1000
    for ring_of in (ring.guest, ring.host):
        RingControl.from_buffer(ring_of.place.control_block).entries_bytes = (1 << 32) - 2000
    for _ in range(400):
        now += rng.choice((1, 50, 1000, 1000, (1 << 27) - 1, 1 << 27, -5))
        roll = rng.random()
        if roll < 0.85:
            ring.write(rng.randbytes(rng.choice(sizes) + rng.choice((0, 0, 4))), now)
        elif roll < 0.90:
            both(ring, RingBuffer.consume)
        elif roll < 0.95:
            both(ring, RingBuffer.read_page)
        elif roll < 0.97:
            value = rng.random() < 0.2
            for buffer in (ring.guest, ring.host):
                switch(buffer, "disabled", value)
        elif roll < 0.98:
            value = rng.random() < 0.5
            for buffer in (ring.guest, ring.host):
                switch(buffer, "overwrite", value)
        elif roll < 0.985:
            both(ring, RingBuffer.reset)
        elif roll < 0.99:
            resize(ring, rng.choice((2, 4)))
        ring.same()
    assert ring.turned > 0
    assert list(ring.guest) == list(ring.host)


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("order", [0, 1])
def test_the_host_is_asked_for_the_first_page_only(order: int, bits: int) -> None:
    ring = GuestRing(3, bits, order=order)
    for number in range(5000):
        ring.write(number.to_bytes(8, "little") + bytes(8), 1000 + number)
    ring.same()
    assert ring.asked == 1
    assert ring.turned > 5
    assert ring.guest.stats().overrun > 0


def test_a_full_buffer_that_must_not_overwrite_asks_the_host_for_each_event() -> None:
    """If a full ring buffer must not overwrite, guest code asks the host for each event, because the host
    counts dropped events.
    """
    ring = GuestRing(2, 64, overwrite=False)
    recorded = sum(ring.write(bytes(16), 1000 + number) for number in range(1000))
    ring.same()
    assert ring.guest.stats().dropped_events == 1000 - recorded > 0
    assert ring.asked == 1 + 1000 - recorded
    assert ring.turned == 1


@pytest.mark.parametrize("bits", [64, 32])
def test_an_end_between_any_two_stores(bits: int) -> None:
    """If the process ends between any two stores while guest code moves the tail, no event is lost, and
    recovery finds no damage.
    """
    rng = random.Random(7)
    ring = GuestRing(3, bits)
    images: list[tuple[bytes, bytes]] = []
    areas = ring.memory.areas
    ring.memory.before = lambda: images.append((bytes(areas[PER_CPU]), bytes(areas[PAGES_AT])))
    for number in range(300):
        before = list(ring.guest)
        images.clear()
        ring.write(number.to_bytes(8, "little") + bytes(rng.choice((0, 200, 900))), 1000 + number)
        after = list(ring.guest)
        for cpu, pages in images:
            result = recover_ring_buffer(cpu[CONTROL_AT:], lambda _at, size, pages=pages: pages[:size])
            assert result is not None
            assert not result.damage
            held = list(result.buffer)
            assert [event for event in before if event in after and event not in held] == []
            assert [event for event in held if event not in before] == []
        if rng.random() < 0.05:
            both(ring, RingBuffer.consume)
    assert ring.turned > 20


_GEOMETRY = ("base", "nr_pages", "order", "first_page")
"""Words of which the host keeps copies. If they are damaged, guest code writes elsewhere in the guest."""
VALUES = (0, 1, 3, 4, 31, 4095, 1 << 31, 0x1234_5678_9ABC_DEF0, (1 << 64) - 1)


@pytest.mark.parametrize("bits", [64, 32])
def test_damaged_words_do_not_lead_out_of_the_buffer(bits: int) -> None:
    """A damaged word in the buffer does not make guest code access other memory. The interpreter would refuse
    such an access.
    """
    words = [name for name, *_ in RingControl._fields_ if name not in (*_GEOMETRY, "reserved")]
    places = [(PER_CPU, CONTROL_AT + offset_of(word)) for word in words]
    places += [(PAGES_AT, 8 * (SLOTS + index)) for index in range(3 + 4)]
    ring = GuestRing(3, bits)
    for number in range(60):
        ring.write(bytes(204), 1000 + number)
    intact = {area: bytes(data) for area, data in ring.memory.areas.items()}
    for area, at in places:
        for value in VALUES:
            for each, data in ring.memory.areas.items():
                data[:] = intact[each]
            ring.memory.areas[area][at : at + 8] = value.to_bytes(8, "little")
            ring.step(event_size(1000), 5000)
            ring.guest.write(bytes(1000), 5000)
            assert len(list(ring.guest)) <= 60 + 1


def test_a_request_ends_before_the_control_block() -> None:
    assert REQUEST_SIZE <= CONTROL_AT
