"""The guest's time source: host_clock {now_ns, step_ns} in guest memory, moved on by each reading."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Any

KINDS = ("virtual", "real")
_U64 = (1 << 64) - 1
_NOW = 0
_STEP = 1


_CMPXCHG8B = b"\xf0\x0f\xc7\x0d"
_JNE = 0x75


def compare_loops(va: int, text: bytes, cells: int) -> Iterator[range]:
    """Loops of i386 that add to the clock by cmpxchg8b until nobody else has; `va`: where `text` stands."""
    exchange = _CMPXCHG8B + cells.to_bytes(4, "little")
    at = text.find(exchange)
    while at >= 0:
        end = at + len(exchange) + 2
        opcode, distance = text[end - 2 : end]
        if opcode == _JNE:
            yield range(va + end - (256 - distance), va + end)
        at = text.find(exchange, end)


class GuestClock(ABC):
    """A guest's time as handlers and tracing read it; nanoseconds since boot."""

    is_virtual: bool
    """Whether only runs of the guest move it on."""
    step_ns: int
    """Nanoseconds that a reading adds."""

    def __init__(self) -> None:
        self._is_held = False

    @abstractmethod
    def now_ns(self) -> int:
        """Never less than what the guest has read."""

    @abstractmethod
    def read_ns(self) -> int:
        """A reading as the guest itself makes one: time moves on by it, unless it is held."""

    def holding(self, call: Callable[[Any], object]) -> Callable[[Any], None]:
        """`call`, whose readings leave the time as it is."""

        def held(regs: Any) -> None:
            self._is_held = True
            try:
                call(regs)
            finally:
                self._is_held = False

        return held


class RealClock:
    """Monotonic time since the machine was built; a reading within a run takes one nanosecond."""

    step_ns = 1
    """What a reading within a run adds."""

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells
        self._boot = monotonic_ns() - cells[_NOW]

    def tick(self) -> None:
        """Set the guest's time; called before each run."""
        self._cells[_NOW] = self.now_ns()

    def now_ns(self) -> int:
        return max(monotonic_ns() - self._boot, self._cells[_NOW])

    def read_ns(self) -> int:
        self._cells[_NOW] = now = max(monotonic_ns() - self._boot, self._cells[_NOW] + self._cells[_STEP])
        return now

    def advance(self, ns: int) -> None:
        """Let time pass in which nothing runs.

        Deviates: a sleep of the guest isn't waited for; from then on its time is ahead of the host's.
        """
        self._boot -= ns


class VirtualClock:
    """Time that only runs of the guest advance, so that the same seed and input give the same timestamps."""

    RUN_NS = 1_000
    """Nanoseconds per run, on top of the steps taken by readings."""

    def __init__(self, cells: memoryview, seed: int) -> None:
        self._cells = cells
        dice = random.Random(seed)
        # It goes on where another clock ended.
        cells[_NOW] = max(cells[_NOW], dice.randrange(1_000_000, 2_000_000))
        self.step_ns = dice.randrange(40, 80)

    def now_ns(self) -> int:
        return int(self._cells[_NOW])

    def read_ns(self) -> int:
        self.advance(self._cells[_STEP])
        return int(self._cells[_NOW])

    def advance(self, ns: int = RUN_NS) -> None:
        """Let time pass; a wild guest may have written anything, so it wraps around."""
        self._cells[_NOW] = (self._cells[_NOW] + ns) & _U64

    tick = advance
    """Called before each run."""


class MachineClock(GuestClock):
    """The machine's clock, over the guest's two u64 cells; what it follows can be changed.

    Raises: ValueError (as `select`).
    """

    def __init__(self, cells: memoryview, kind: str, seed: int) -> None:
        super().__init__()
        self._cells = cells
        self._source: RealClock | VirtualClock
        self.select(kind, seed)

    def select(self, kind: str, seed: int) -> None:
        """Follow "real" or "virtual" time from now on; the guest's time goes on where it is.

        Raises: ValueError (neither of the two).
        """
        if kind not in KINDS:
            raise ValueError(f"unknown clock {kind!r}")
        self.kind = kind
        self.seed = seed
        self.is_virtual = kind == "virtual"
        self._source = RealClock(self._cells) if kind == "real" else VirtualClock(self._cells, seed)
        self._cells[_STEP] = self.step_ns = self._source.step_ns
        self.tick = self._source.tick

    def now_ns(self) -> int:
        return self._source.now_ns()

    def read_ns(self) -> int:
        return int(self._cells[_NOW]) if self._is_held else self._source.read_ns()

    def advance(self, ns: int) -> None:
        self._source.advance(ns)
