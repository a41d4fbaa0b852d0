"""set_event_pid: how written pids are parsed, and the tasks whose events are recorded."""

from __future__ import annotations

import errno

import pytest

from emulated_kernel.trace.events.event_pids import BYTES_PER_PID, EventPids, PidList
from emulated_kernel.trace.text.get_user import take_word
from emulated_kernel.util.limits import Limit, Limits, MemoryBudget
from tests.trace.events.kernel import errno_of
from tests.trace.events.plain_event import PlainEvent

PAIRS = ((5, 9), (9, 5), (8, 9))
"""Pairs of pids: the current task, and the other task of the event."""


@pytest.mark.parametrize(
    ("data", "word", "size"),
    [
        (b"", b"", 0),
        (b"a", b"a", 1),
        (b"a\n", b"a", 2),
        (b"  ab cd", b"ab", 5),
        (b" \t\n", b"", 3),
        (b" \0a", b"", 2),
        (b"a\0b", b"a", 2),
        (b"\xa0a", b"a", 2),
        (b"x" * 127 + b"\n", b"x" * 127, 128),
    ],
)
def test_words(data: bytes, word: bytes, size: int) -> None:
    assert take_word(data) == (word, size)


def test_a_word_is_not_too_long() -> None:
    assert errno_of(lambda: take_word(b"x" * 128)) == "EINVAL"


@pytest.mark.parametrize(
    ("data", "pids"),
    [
        (b"1\n", [1]),
        (b"3 1 2", [1, 2, 3]),
        (b"0x10 010 +9\n", [8, 9, 16]),
        (b"0\n", [0]),
        (b"\n", []),
        (b"4294967297", [1]),
    ],
)
def test_written_pids(data: bytes, pids: list[int]) -> None:
    made = PidList(lambda: None)
    assert made.write(data) == len(data)
    assert made.records() == [f"{pid}\n" for pid in pids]


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (b"x", errno.EINVAL),
        (b"-1", errno.EINVAL),
        (b"1,2", errno.EINVAL),
        (b"18446744073709551616", errno.EINVAL),
        (b"1073741824", errno.EPERM),
    ],
)
def test_a_wrong_one_changes_nothing(data: bytes, number: int) -> None:
    made = PidList(lambda: None)
    made.write(b"7")
    assert errno_of(lambda: made.write(b"8 " + data)) == errno.errorcode[number]
    assert made.pids == {7}


def test_writes_append_and_truncating_clears() -> None:
    made = PidList(lambda: None)
    made.write(b"1")
    made.write(b"2")
    assert made.pids == {1, 2}
    made.clear()
    assert made.records() == []


class Counted(int):
    """A pid whose comparisons with other objects of this class are counted."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < int(other)


def test_reading_a_long_list_in_pieces_sorts_it_once() -> None:
    made = PidList(lambda: None)
    made.write(b" ".join(b"%d" % pid for pid in range(2000, 0, -1)))
    made.pids = {Counted(pid) for pid in made.pids}
    lines = [next(made.records_from(index)) for index in range(2000)]
    assert lines == [f"{pid}\n" for pid in range(1, 2001)]
    assert Counted.compared < 40_000
    made.follow(7, 5000)
    assert [*made.records_from(1999)] == ["2000\n", "5000\n"]


def test_a_change_keeps_the_pids_that_were_there() -> None:
    """Writes, forks and exits change the set of pids in place.

    A change of one pid neither copies a long list nor compares all of its pids.
    """
    changes = 0

    def changed() -> None:
        nonlocal changes
        changes += 1

    made = PidList(changed)
    made.write(b"1 2 3")
    kept = made.pids
    made.write(b"4")
    made.write(b"4 1")
    made.follow(4, 5)
    made.forget(1)
    assert made.pids is kept
    assert kept == {2, 3, 4, 5}
    assert changes == 4


def test_the_memory_of_long_lists_has_a_limit() -> None:
    limits = Limits()
    limits[Limit.DEFINITION_BYTES] = 100 * BYTES_PER_PID
    memory = MemoryBudget(limits, Limit.DEFINITION_BYTES, Limit.USER_DEFINITION_BYTES)
    pids = EventPids(lambda: None, memory=memory)
    pids.traced.write(b" ".join(b"%d" % pid for pid in range(90)))
    pids.traced.write(b"1 2 3")
    assert errno_of(lambda: pids.untraced.write(b" ".join(b"%d" % pid for pid in range(11)))) == "ENOMEM"
    assert pids.untraced.pids == set()
    pids.untraced.write(b"1 2 3")
    assert memory.used == 93 * BYTES_PER_PID
    pids.traced.clear()
    assert memory.used == 3 * BYTES_PER_PID


def test_who_is_ignored() -> None:
    pids = EventPids(lambda: None)
    assert (pids.is_active, pids.ignores(1)) == (False, False)
    pids.traced.write(b"1 2")
    assert [pids.ignores(pid) for pid in (1, 2, 3)] == [False, False, True]
    pids.untraced.write(b"2")
    assert [pids.ignores(pid) for pid in (1, 2, 3)] == [False, True, True]
    assert pids.is_active


def test_a_switch_is_ignored_if_both_tasks_are() -> None:
    pids = EventPids(lambda: None)
    pids.traced.write(b"1")
    assert [pids.ignores_switch(*tasks) for tasks in ((1, 9), (9, 1), (8, 9))] == [False, False, True]
    pids.traced.clear()
    pids.untraced.write(b"1 2")
    assert [pids.ignores_switch(*tasks) for tasks in ((1, 2), (9, 1), (8, 9))] == [True, False, False]


def test_children_follow() -> None:
    pids = EventPids(lambda: None)
    pids.traced.write(b"1")
    pids.follow(1, 5)
    pids.follow(7, 8)
    assert (pids.traced.pids, pids.untraced.pids) == ({1, 5}, frozenset())
    pids.forget(1)
    assert pids.traced.pids == {5}


class _Scheduled(PlainEvent):
    """An event of the scheduler whose record holds only the pid of the other task."""

    def __init__(self, name: str) -> None:
        super().__init__("sched", name, [], "")

    def other_task(self, payload: bytes) -> int | None:
        return int.from_bytes(payload, "little") if payload else None


@pytest.mark.parametrize("name", ["sched_waking", "sched_wakeup", "sched_wakeup_new"])
def test_waking_a_traced_task_is_recorded(name: str) -> None:
    pids, event = EventPids(lambda: None), _Scheduled(name)
    pids.traced.write(b"5")
    left_out = [pids.is_filtered(event, woken.to_bytes(4, "little"), pid) for pid, woken in PAIRS]
    assert left_out == [False, False, True]


def test_switches_to_and_from_a_traced_task_are_recorded() -> None:
    pids, event = EventPids(lambda: None), _Scheduled("sched_switch")
    pids.traced.write(b"5")
    left_out = [pids.is_filtered(event, after.to_bytes(4, "little"), pid) for pid, after in PAIRS]
    assert left_out == [False, False, True]
    assert pids.is_filtered(_Scheduled("sched_process_exit"), b"", 9)
