"""GuestClock: the guest's clock, with real, virtual or model time.

The time is in the guest's variable host_clock, which has two u64 fields: now_ns, and step_ns, the nanoseconds
by which each reading advances now_ns.
"""

from __future__ import annotations

import errno
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Any

from emulated_kernel.machine.instruction_time import TRAP_NS, InstructionTime
from emulated_kernel.util.errors import KernelError

KINDS = ("virtual", "real", "model")
_U64 = (1 << 64) - 1
_NOW = 0
_STEP = 1


_CMPXCHG8B = b"\xf0\x0f\xc7\x0d"
_JNE = 0x75


def compare_loops(va: int, text: bytes, cells: int) -> Iterator[range]:
    """Yield the address range of each loop in i386 text that advances the clock with cmpxchg8b.

    Such a loop repeats if cmpxchg8b fails. `va`: address of `text`. `cells`: address of the guest's variable
    host_clock; the loops are found by this address in their code.
    """
    exchange = _CMPXCHG8B + cells.to_bytes(4, "little")
    at = text.find(exchange)
    while at >= 0:
        end = at + len(exchange) + 2
        opcode, distance = text[end - 2 : end]
        if opcode == _JNE:
            yield range(va + end - (256 - distance), va + end)
        at = text.find(exchange, end)


class GuestClock(ABC):
    """The clock of a guest, which handlers and tracing read. The time is in nanoseconds since boot."""

    is_virtual: bool
    """True for virtual or model time, which does not pass while the guest is stopped; False for real time."""

    def __init__(self) -> None:
        self._is_held = False

    @property
    @abstractmethod
    def step_ns(self) -> int:
        """Nanoseconds by which each reading advances the time; 0 for model time."""

    @abstractmethod
    def now_ns(self) -> int:
        """Return the time without advancing it. The time is never before the guest's last reading."""

    @abstractmethod
    def read_ns(self) -> int:
        """Read the time as the guest does.

        The reading advances the time, except during a call of a function that holding() returned.
        """

    def holding(self, call: Callable[[Any], object]) -> Callable[[Any], None]:
        """Return a function that calls `call`; during the call, readings don't advance the time.

        The returned function passes its only argument, such as a trap's registers, to `call`.
        """

        def held(regs: Any) -> None:
            self._is_held = True
            try:
                call(regs)
            finally:
                self._is_held = False

        return held


class RealClock:
    """Clock with the real time since the machine was built; a reading during a run adds one nanosecond."""

    step_ns = 1
    """Nanoseconds that a reading during a run adds."""

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells
        self._boot = monotonic_ns() - cells[_NOW]

    def tick(self) -> None:
        """Set the guest's time to the real time. The machine calls this method before each run."""
        self._cells[_NOW] = self.now_ns()

    def now_ns(self) -> int:
        return max(monotonic_ns() - self._boot, self._cells[_NOW])

    def read_ns(self) -> int:
        now = max(monotonic_ns() - self._boot, self._cells[_NOW] + self._cells[_STEP])
        self._cells[_NOW] = now
        return now

    def advance(self, ns: int) -> None:
        """Advance the time by `ns` nanoseconds while no guest code runs.

        Deviates: the host doesn't wait while the guest sleeps; from then on the guest's time is ahead of real
        time.
        """
        self._boot -= ns


class VirtualClock:
    """Clock that advances only by runs and by readings: the same seed and input give the same timestamps."""

    RUN_NS = 1_000
    """Nanoseconds by which each run of the guest advances the time, in addition to the steps of readings."""

    def __init__(self, cells: memoryview, seed: int) -> None:
        self._cells = cells
        dice = random.Random(seed)
        # If this clock replaces another one, the time continues.
        cells[_NOW] = max(cells[_NOW], dice.randrange(1_000_000, 2_000_000))
        self.step_ns = dice.randrange(40, 80)

    def now_ns(self) -> int:
        return int(self._cells[_NOW])

    def read_ns(self) -> int:
        self.advance(self._cells[_STEP])
        return int(self._cells[_NOW])

    def advance(self, ns: int = RUN_NS) -> None:
        """Advance the time by `ns` nanoseconds.

        The u64 value wraps around, because a faulty guest may have written any value.
        """
        self._cells[_NOW] = (self._cells[_NOW] + ns) & _U64

    tick = advance
    """Advance the time by RUN_NS; called before each run."""


class ModelClock(VirtualClock):
    """Clock that the guest's instructions, traps and host handlers advance. Readings don't advance it."""

    def __init__(self, cells: memoryview, seed: int) -> None:
        super().__init__(cells, seed)
        self.step_ns = 0

    def tick(self, ns: int = TRAP_NS) -> None:
        """Advance the time by `ns` nanoseconds for the entry into the guest, before each run.

        An entry takes as much time as a trap.
        """
        self.advance(ns)


class MachineClock(GuestClock):
    """The machine's clock, in the guest's variable host_clock. The clock has real, virtual or model time.

    Raises: ValueError, KernelError EOPNOTSUPP (in the cases in which `select` raises them).
    """

    def __init__(
        self, cells: memoryview, kind: str, seed: int, counting: InstructionTime | None = None
    ) -> None:
        """Keep the time of the guest in `cells`, the memory of the guest's variable host_clock.

        `kind` and `seed`: as for select(). `counting`: the counter of the instructions' time, which the clock
        "model" needs; None if the machine has no such clock.
        """
        super().__init__()
        self._cells = cells
        self._counting = counting
        self._source: RealClock | VirtualClock
        self.select(kind, seed)

    def select(self, kind: str, seed: int) -> None:
        """Switch to "real", "virtual" or "model" time; the guest's time continues from its current value.

        `seed`: seed of two random numbers. One is the time at which a virtual or model clock starts, unless
        the guest's time is later already. The other is the duration of a reading in virtual time.
        Raises: ValueError (`kind` is no kind of clock), KernelError EOPNOTSUPP (there is no model clock on
        this machine).
        """
        if kind not in KINDS:
            raise ValueError(f"unknown clock {kind!r}")
        if kind == "model":
            if self._counting is None:
                raise KernelError(errno.EOPNOTSUPP, "no model clock on i386; use x86_64 or riscv64")
            self._counting.start()
        elif self._counting is not None:
            self._counting.stop()
        self.kind = kind
        self.seed = seed
        self.is_virtual = kind != "real"
        if kind == "real":
            self._source = RealClock(self._cells)
        else:
            self._source = (ModelClock if kind == "model" else VirtualClock)(self._cells, seed)
        self._cells[_STEP] = self._source.step_ns
        self.tick = self._source.tick

    @property
    def step_ns(self) -> int:
        return self._source.step_ns

    def now_ns(self) -> int:
        return self._source.now_ns()

    def read_ns(self) -> int:
        return int(self._cells[_NOW]) if self._is_held else self._source.read_ns()

    def advance(self, ns: int) -> None:
        self._source.advance(ns)
