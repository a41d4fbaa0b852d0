"""The guest's time source: host_clock {now_ns, step_ns} in guest memory, moved on by each reading."""

from __future__ import annotations

import random
from time import monotonic_ns
from typing import Protocol

_NOW, _STEP = 0, 1


class Clock(Protocol):
    """Time since boot as the guest sees it."""

    @property
    def step_ns(self) -> int:
        """What a reading within a run adds; always the same."""

    def tick(self) -> None:
        """Set the guest's time; called before each run."""

    def now_ns(self) -> int:
        """Nanoseconds since boot; never less than what the guest has read."""

    def read_ns(self) -> int:
        """A reading as the guest itself makes one: time moves on by it."""

    def advance(self, ns: int) -> None:
        """Let time pass in which nothing runs."""


class RealClock:
    """Monotonic time since the machine was built; a reading within a run takes one nanosecond."""

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells
        self._boot = monotonic_ns()
        cells[_STEP] = 1

    @property
    def step_ns(self) -> int:
        """What a reading within a run adds; always the same."""
        return int(self._cells[_STEP])

    def tick(self) -> None:
        """Set the guest's time."""
        self._cells[_NOW] = self.now_ns()

    def now_ns(self) -> int:
        """Nanoseconds since boot."""
        return max(monotonic_ns() - self._boot, self._cells[_NOW])

    def read_ns(self) -> int:
        """A reading that moves time on."""
        self._cells[_NOW] = now = max(monotonic_ns() - self._boot, self._cells[_NOW] + self._cells[_STEP])
        return now

    def advance(self, ns: int) -> None:
        """Deviates: a sleep of the guest isn't waited for; from then on its time is ahead of the host's."""
        self._boot -= ns


class VirtualClock:
    """Time that only runs of the guest advance, so that the same seed and input give the same timestamps."""

    RUN_NS = 1_000
    """Nanoseconds per run, on top of the steps taken by readings."""

    def __init__(self, cells: memoryview, seed: int) -> None:
        self._cells = cells
        dice = random.Random(seed)
        cells[_NOW] = dice.randrange(1_000_000, 2_000_000)
        cells[_STEP] = dice.randrange(40, 80)

    @property
    def step_ns(self) -> int:
        """What a reading within a run adds; always the same."""
        return int(self._cells[_STEP])

    def tick(self) -> None:
        """Set the guest's time."""
        self._cells[_NOW] += self.RUN_NS

    def now_ns(self) -> int:
        """Nanoseconds since boot."""
        return int(self._cells[_NOW])

    def read_ns(self) -> int:
        """A reading that moves time on."""
        self._cells[_NOW] += self._cells[_STEP]
        return int(self._cells[_NOW])

    def advance(self, ns: int) -> None:
        """Let time pass in which nothing runs."""
        self._cells[_NOW] += ns


def make_clock(kind: str, cells: memoryview, seed: int) -> Clock:
    """The clock that `MachineConfig.clock` names, over the guest's two u64 cells.

    Raises:
        ValueError: neither "real" nor "virtual".
    """
    if kind == "real":
        return RealClock(cells)
    if kind == "virtual":
        return VirtualClock(cells, seed)
    raise ValueError(f"unknown clock {kind!r}")
