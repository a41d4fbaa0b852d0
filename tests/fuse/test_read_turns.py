"""ReadTurns: one thread reads FUSE requests, and another thread takes the turn if the first one is busy for
long.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from kprobefs.fuse.read_turns import CPUS, Reader, ReadTurns

PATIENCE = 10.0


class Clock(threading.Event):
    """The event that the successor waits for, with a simulated clock.

    A wait with a time limit lasts until the test calls pass_time() or sets the event.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asleep = threading.Semaphore(0)
        self._go_on = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            return super().wait(PATIENCE)
        self._asleep.release()
        assert self._go_on.acquire(timeout=PATIENCE)
        return self.is_set()

    def set(self) -> None:
        super().set()
        self._go_on.release()

    def await_sleep(self) -> None:
        """Wait until the successor sleeps with a time limit."""
        assert self._asleep.acquire(timeout=PATIENCE)

    def pass_time(self) -> None:
        self._go_on.release()


def begin(turns: ReadTurns, reader: Reader) -> None:
    """Record that `reader` has read a request, and wake a parked successor, as SessionLoop does."""
    reader.requests += 1
    reader.is_busy = True
    if turns.is_parked:
        turns.wake()


def end(turns: ReadTurns, reader: Reader) -> None:
    """Record that `reader` has answered a request. Assert that `reader` still has the turn."""
    reader.is_busy = False
    assert turns.reader is reader


@pytest.fixture
def reader() -> Reader:
    """Return the Reader of the test's own thread."""
    return Reader()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turns(reader: Reader, clock: Clock) -> ReadTurns:
    """Return a ReadTurns in which `reader` has the turn."""
    turns = ReadTurns(clock)
    turns.await_turn(reader)
    return turns


@pytest.fixture
def has_turn(turns: ReadTurns, clock: Clock) -> Iterator[threading.Event]:
    """Yield an event that is set when the successor, another thread, has the turn."""
    found = threading.Event()

    def take() -> None:
        turns.await_turn(Reader())
        found.set()

    successor = threading.Thread(target=take)
    successor.start()
    clock.await_sleep()
    yield found
    turns.give_up()
    successor.join(PATIENCE)
    assert not successor.is_alive()


def test_one_thread_answers_short_requests(
    turns: ReadTurns, reader: Reader, clock: Clock, has_turn: threading.Event
) -> None:
    for _ in range(20):
        begin(turns, reader)
        end(turns, reader)
        begin(turns, reader)
        clock.pass_time()
        clock.await_sleep()
        assert not has_turn.is_set()
        end(turns, reader)


def test_another_reads_while_one_is_busy(
    turns: ReadTurns, reader: Reader, clock: Clock, has_turn: threading.Event
) -> None:
    begin(turns, reader)
    clock.pass_time()
    # The request may have arrived in the middle of the first period.
    clock.await_sleep()
    assert not has_turn.is_set()
    clock.pass_time()
    assert has_turn.wait(PATIENCE)


def test_the_first_request_after_a_pause_is_measured(
    turns: ReadTurns, reader: Reader, clock: Clock, has_turn: threading.Event
) -> None:
    """After a pause, during which the successor has slept without a time limit, a long request passes on the
    turn.
    """
    clock.pass_time()
    while not turns.is_parked:
        threading.Event().wait(0.001)
    begin(turns, reader)
    clock.pass_time()
    assert has_turn.wait(PATIENCE)


def test_who_waits_in_a_request_gives_up_the_turn(
    turns: ReadTurns, reader: Reader, has_turn: threading.Event
) -> None:
    begin(turns, reader)
    turns.give_up()
    assert has_turn.wait(PATIENCE)
    assert turns.reader is not reader


def test_who_ends_wakes_the_sleeping_successor(
    turns: ReadTurns, clock: Clock, has_turn: threading.Event
) -> None:
    clock.pass_time()
    while not turns.is_parked:
        threading.Event().wait(0.001)
    turns.give_up()
    assert has_turn.wait(PATIENCE)


def test_all_threads_read_on_a_busy_host(
    turns: ReadTurns, clock: Clock, has_turn: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the host's load is high, the sleeping successor and later threads read at once. When the load is low
    again, threads take turns.
    """
    clock.pass_time()
    while not turns.is_parked:
        threading.Event().wait(0.001)
    monkeypatch.setattr(os, "getloadavg", lambda: (CPUS + 0.5, 0.0, 0.0))
    turns.look_at_load()
    assert turns.is_shared
    assert has_turn.wait(PATIENCE)
    turns.await_turn(Reader())
    monkeypatch.setattr(os, "getloadavg", lambda: (float(CPUS), 0.0, 0.0))
    turns.look_at_load()
    assert not turns.is_shared
