"""The ring buffer under random operations: no event is lost without being counted, and the order of events is
kept.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from emulated_kernel.trace.ring import ring_layout
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.buffer_page import MAX_DATA_SIZE
from emulated_kernel.trace.ring.ring_layout import memory_size
from tests.sample import fewer

SIZES = st.one_of(
    st.integers(0, 40),
    st.sampled_from([112, 113, 1000, 2030, MAX_DATA_SIZE - 8, MAX_DATA_SIZE - 4, MAX_DATA_SIZE]),
)
STEPS = st.one_of(st.integers(0, 50), st.sampled_from([(1 << 27) - 1, 1 << 27, 1 << 45, -3]))


class RingMachine(RuleBasedStateMachine):
    """A state machine that compares a ring buffer with a queue of all events that the buffer should still
    hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: deque[tuple[int, bytes]] = deque()
        self.now = 1 << 20
        self.number = 0
        self.accepted = self.consumed = self.dropped = self.cleared_overrun = self.reported = 0

    @initialize(pages=st.integers(2, 4), overwrite=st.booleans(), order=st.sampled_from([0, 0, 1]))
    def make(self, pages: int, overwrite: bool, order: int) -> None:
        self.order = order
        place = ring_layout.RingMemory(self.allocate(pages))
        self.ring = RingBuffer(place, pages, overwrite=overwrite, order=order)

    def unread_bytes(self) -> int:
        """Return the number of bytes of events and padding on unread pages, computed only from the buffer's
        memory.
        """
        words, control = self.memory.cast("Q"), ring_layout.RingControl.from_buffer(self.memory)
        pages, reader = control.nr_pages, control.reader_page

        def commit(page: int) -> int:
            data = ring_layout.data_start(pages, self.order) + page * (4096 << self.order)
            if page == control.tail_page:
                return (control.write_ptr or control.parked_ptr) - data - 16
            return words[data // 8 + 1]

        size = commit(reader) - control.reader_read
        if control.tail_page != reader:
            slot = control.head_slot
            size += commit(words[ring_layout.SLOTS + slot])
            while slot != control.tail_slot:
                slot = (slot + 1) % pages
                size += commit(words[ring_layout.SLOTS + slot])
        return size

    def allocate(self, pages: int) -> memoryview:
        self.memory = memoryview(bytearray(memory_size(pages, self.order)))
        return self.memory

    def forget_overwritten(self) -> None:
        """Remove overwritten events from the queue. Overwriting takes the oldest events, except those on the
        reader's page.
        """
        held = list(self.ring)
        while len(self.held) > len(held):
            index = next(
                (
                    i
                    for i, (mine, its) in enumerate(zip(self.held, held, strict=False))
                    if not same(mine, its)
                ),
                len(held),
            )
            del self.held[index]

    @rule(size=SIZES, step=STEPS)
    def write(self, size: int, step: int) -> None:
        self.now = max(0, self.now + step)
        self.number += 1
        payload = (self.number.to_bytes(4, "little") + bytes(size))[: max(size, 4)]
        if self.ring.write(payload, self.now):
            self.accepted += 1
            self.held.append((self.now, payload))
            self.forget_overwritten()
        else:
            assert not self.ring.overwrite
            self.dropped += 1

    @rule(count=st.integers(1, 20))
    def consume(self, count: int) -> None:
        for _ in range(count):
            event = self.ring.consume()
            if event is None:
                assert not self.held
                return
            assert same(self.held.popleft(), (event.time_stamp, event.record))
            self.consumed += 1
            self.reported += event.lost_events

    @rule()
    def read_page(self) -> None:
        before = self.ring.stats().read_events
        page = self.ring.read_page()
        assert (page is None) == (not self.held)
        for _ in range(self.ring.stats().read_events - before):
            self.held.popleft()
            self.consumed += 1
        if page is not None:
            # The page has the number of lost events. test_ring_buffer checks its format.
            self.reported = self.ring.stats().overrun

    @rule(pages=st.integers(2, 5))
    def resize(self, pages: int) -> None:
        self.ring.resize(ring_layout.RingMemory(self.allocate(pages)), pages)
        self.forget_overwritten()

    @rule(overwrite=st.booleans())
    def change_overwrite(self, overwrite: bool) -> None:
        self.ring.overwrite = overwrite

    @rule()
    def reset(self) -> None:
        self.ring.reset()
        self.held.clear()
        self.accepted = self.consumed = self.dropped = self.reported = 0

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "ring"):
            return
        stats = self.ring.stats()
        assert stats.entries == len(self.ring) == len(self.held)
        assert stats.entries + stats.overrun + self.consumed == self.accepted
        assert stats.read_events == self.consumed
        assert stats.dropped_events == self.dropped
        assert stats.commit_overrun == 0
        assert stats.size == self.unread_bytes()
        assert self.reported <= stats.overrun

    @invariant()
    def reading_twice_gives_the_same_in_order(self) -> None:
        if not hasattr(self, "ring"):
            return
        events = list(self.ring)
        assert len(events) == len(self.held)
        assert all(map(same, self.held, events))


def same(mine: tuple[int, bytes], its: tuple[int, bytes]) -> bool:
    """Return True if time and payload agree. The buffer pads payloads to its granularity."""
    return mine[0] == its[0] and its[1][: len(mine[1])] == mine[1] and len(its[1]) - len(mine[1]) < 8


RingMachine.TestCase.settings = settings(max_examples=fewer(60, 2), stateful_step_count=60)
TestRing = RingMachine.TestCase
