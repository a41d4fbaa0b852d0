"""Board: the time of an emulated machine, its timer, and its console; subclasses add the other devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import addressof, c_uint64
from time import monotonic_ns
from typing import Any, ClassVar, Protocol

from emulated_kernel.machine.native.tsc_words import (
    SHORTEST_STEP,
    STEP_ADDEND,
    STEP_FACTOR,
    STEP_SHIFT,
    TscWords,
)
from emulated_kernel.util.safe_read import is_word

_LOG_LIMIT = 1 << 16
_MASK = (1 << 64) - 1
_MILLION = 10**6
_TSC = TscWords.tsc.offset // 8
_STEPS = TscWords.steps.offset // 8


class TimeFollower(Protocol):
    """Interface of an object that keeps the machine's time in memory, for guest code to read and advance."""

    @property
    def host_address(self) -> int:
        """Address in this process of the u64 in which guest code advances the time, in nanoseconds."""

    def go_on(self, tsc: int, cycles: int) -> int:
        """Return the new time: the sum of `tsc`, `cycles` and the time that guest code has used.

        `tsc`: the old time, in cycles. `cycles`: the cycles to add. If it is not 0, guest code can read the
        new time afterwards.
        """

    def show(self, cycles: int) -> None:
        """Show the TSC value `cycles` to guest code as the current time."""


class CountedTime:
    """A TimeFollower that only adds the time that guest code has used to the TSC.

    It is for a guest whose instructions are counted. Such a guest reads the TSC, and no time in memory.
    """

    def __init__(self, khz: int) -> None:
        """Create the u64 at `host_address`, which is 0 at first.

        `khz`: number of cycles of the time counter in a millisecond.

        Guest code advances the u64 by the nanoseconds that pass. go_on() converts them to cycles, and sets
        the u64 to 0.
        """
        self._khz = khz
        self._ns = c_uint64()
        self._part = 0
        """Remainder, in millionths of a cycle, of go_on()'s last conversion of nanoseconds to cycles."""

    @property
    def host_address(self) -> int:
        return addressof(self._ns)

    def go_on(self, tsc: int, cycles: int) -> int:
        passed, self._part = divmod(self._ns.value * self._khz + self._part, _MILLION)
        self._ns.value = 0
        return tsc + passed + cycles

    def show(self, cycles: int) -> None:
        """Do nothing, because guest code reads only the TSC."""


class Board(ABC):
    """The time, the timer and the console of a machine.

    The time is a counter of cycles; each reading advances it by a seeded random step.
    """

    khz: ClassVar[int]
    """Number of cycles of the time counter in a millisecond."""
    STATE: ClassVar[tuple[str, ...]] = "tsc", "random", "due", "period"
    """Names of the attributes that a snapshot keeps."""
    _NONE: ClassVar[tuple[str, ...]] = ("due",)
    """Names of the attributes of STATE that can be None."""

    def __init__(self, seed: int) -> None:
        self._follower: TimeFollower | None = None
        self.words = TscWords(tsc=10**9, steps=seed)
        """The TSC and the generator of its random steps; the host's routine for rdtsc uses both."""
        self._cells = memoryview(self.words).cast("B").cast("Q")
        self.counts_instructions = False
        """Whether the guest's time advances at each instruction; if False, at each reading of the time."""
        self._wall: Callable[[], int] | None = None
        """Function that returns the host's time in nanoseconds; None if guest time does not follow it."""
        self._wall_base = 0
        """Host's time in nanoseconds at which the TSC was 0. Not used if `_wall` is None."""
        self.due: int | None = None
        """TSC value of the timer's next interrupt; None if the timer is off."""
        self.period = 0
        """Period of the timer in cycles; 0 if the timer interrupts only once."""
        self.console = bytearray()
        """The latest output of the kernel on its console, at most _LOG_LIMIT bytes."""

    def write_console(self, text: bytes) -> None:
        """Append `text` to the console's output, of which only the last _LOG_LIMIT bytes are kept."""
        self.console += text
        del self.console[:-_LOG_LIMIT]

    def state(self) -> dict[str, Any]:
        """Return the values of the devices' attributes that STATE names, for a snapshot."""
        return {name: getattr(self, name) for name in self.STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Set the devices to `state`, a result of state().

        Raises: KeyError, TypeError, ValueError (state() cannot have returned `state`).
        """
        for name in self.STATE:
            kept = state[name]
            if isinstance(getattr(self, name), list):
                words = kept
                (_, _) = words
            else:
                words = [0 if kept is None and name in self._NONE else kept]
            if not all(map(is_word, words)):
                raise ValueError(f"{name} is {kept}")
            setattr(self, name, kept)

    # Time

    @property
    def follower(self) -> TimeFollower | None:
        """The object that shows the time to guest code in memory; None if there is no such object.

        If there is a follower, Python executes each rdtsc in place of the host's routine.
        """
        return self._follower

    @follower.setter
    def follower(self, follower: TimeFollower) -> None:
        self._follower = follower
        self.words.followed = 1

    @property
    def random(self) -> int:
        """State of the random generator from which rdtsc gets the steps of the time."""
        return self._cells[_STEPS]

    @random.setter
    def random(self, state: int) -> None:
        self._cells[_STEPS] = state

    @property
    def tsc(self) -> int:
        """Value of the time counter in cycles, modulo 2**64."""
        if self._follower is not None:
            self._cells[_TSC] = self._follower.go_on(self._cells[_TSC], 0) & _MASK
        return self._cells[_TSC]

    @tsc.setter
    def tsc(self, cycles: int) -> None:
        self._cells[_TSC] = cycles & _MASK
        if self._follower is not None:
            self._follower.show(cycles)

    @property
    def is_real(self) -> bool:
        """Whether the machine's time follows the host's time."""
        return self._wall is not None

    def follow_wall(self, wall: Callable[[], int] = monotonic_ns) -> None:
        """Make each rdtsc advance the machine's time to the host's time.

        `wall` returns the host's time in nanoseconds.
        """
        self._wall = wall
        self._wall_base = wall() - self.tsc * _MILLION // self.khz
        # The host's routine for rdtsc does not know the host's time.
        self.words.followed = 1

    def behind(self) -> int:
        """Return the host's time minus the board's time, in nanoseconds; the result can be negative.

        The board's time must follow the host's; see `is_real`.
        """
        assert self._wall is not None
        return self._wall() - self._wall_base - self.tsc * _MILLION // self.khz

    def skip(self, nanoseconds: int) -> None:
        """Leave out `nanoseconds` of the host's time, so that the guest's time does not advance by them.

        A negative number puts the guest's time ahead of the host's.
        """
        self._wall_base += nanoseconds

    def jump_to(self, cycles: int) -> None:
        """Advance the time to at least the TSC value `cycles`, at which the guest's sleep ends.

        Deviates: the host does not wait while the guest sleeps. If the guest's time follows the host's time,
        the guest's time is then ahead, and advances at the same rate.
        """
        self.tsc = max(self.tsc, cycles)
        if self._wall is not None:
            self.skip(min(self.behind(), 0))

    def pass_time(self, cycles: int) -> None:
        """Advance the time by `cycles` and by the cycles that guest code has used."""
        before = self._cells[_TSC]
        follower = self._follower
        after = before + cycles if follower is None else follower.go_on(before, cycles)
        self._cells[_TSC] = after & _MASK

    def read_tsc(self) -> int:
        """Advance the time by a random step; return the new time, as the result of rdtsc.

        The step varies, because some code waits until it has read two different values. If the guest's time
        follows the host's time, and lags by more than the step, it is set to the host's time. If
        instructions are counted, the step is 0.
        """
        state = (self._cells[_STEPS] * STEP_FACTOR + STEP_ADDEND) & _MASK
        self._cells[_STEPS] = state
        step = 0 if self.counts_instructions else SHORTEST_STEP + (state >> STEP_SHIFT)
        if self._wall is not None:
            step = max(step, self.behind() * self.khz // _MILLION)
        self.pass_time(step)
        return self._cells[_TSC]

    @property
    @abstractmethod
    def timer_vector(self) -> int | None:
        """Number of the timer's interrupt, or None if the timer is off or masked."""

    @property
    def is_due(self) -> bool:
        """Whether the timer's interrupt is due, and the timer is neither off nor masked.

        The property uses the TSC value that was read or set last. It does not advance the TSC.
        """
        return self.due is not None and self._cells[_TSC] >= self.due and self.timer_vector is not None

    def timer_fires(self) -> None:
        """Advance the time to the timer's interrupt and start the next period."""
        assert self.due is not None
        self.jump_to(self.due)
        self.due = self.tsc + self.period if self.period else None
