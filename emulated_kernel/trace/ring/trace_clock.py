"""Trace clocks, which determine the units and the origin of a trace array's time stamps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from emulated_kernel.machine.guest_clock import GuestClock
from emulated_kernel.util.abi import HZ
from emulated_kernel.util.fast_dataclass import dataclass

NSEC_PER_SEC = 1_000_000_000
USER_HZ = 100


@dataclass(frozen=True)
class TraceClock:
    """A clock whose name can be written to trace_clock.

    Mirrors: kernel/trace/trace.c:trace_clocks (v6.1).
    """

    name: str
    in_ns: bool
    """Whether the clock counts nanoseconds, which are shown as seconds with six decimals.

    The counts of other clocks are shown as they are.
    """
    host_clock: int | None = None
    """clockid_t of the clock that has the same values in user space, such as CLOCK_MONOTONIC.

    The value is None if user space has no such clock.
    """


LOCAL = TraceClock("local", True)
COUNTER = TraceClock("counter", False)
UPTIME = TraceClock("uptime", False)

TRACE_CLOCKS = (
    LOCAL,
    TraceClock("global", True),
    COUNTER,
    UPTIME,
    TraceClock("perf", True),
    TraceClock("mono", True, time.CLOCK_MONOTONIC),
    TraceClock("mono_raw", True, time.CLOCK_MONOTONIC_RAW),
    TraceClock("boot", True, time.CLOCK_BOOTTIME),
    TraceClock("tai", True, time.CLOCK_TAI),
    TraceClock("x86-tsc", False),
)


class ClockSource:
    """Converts times of the machine's clock (nanoseconds since boot) to the units of a trace clock."""

    def __init__(self, clock: GuestClock) -> None:
        """Create the converter for times that `clock` returns."""
        self._clock = clock
        self._counter = 0
        self._latest: dict[int, int] = {}
        """clockid_t -> latest time returned. Later results are never smaller, as ring buffers require."""

    def converter(self, clock: TraceClock) -> Callable[[int], int] | None:
        """Return a function that converts nanoseconds to the units of `clock`.

        Return None if no conversion is needed, because `clock` counts the machine's nanoseconds. The clock
        x86-tsc counts them too, because the guest's TSC runs at 1 GHz.
        """
        if clock.host_clock is not None:
            return partial(self._host_time, clock.host_clock)
        return {COUNTER: self._count, UPTIME: _uptime}.get(clock)

    def _host_time(self, host_clock: int, ns: int) -> int:
        """Return the time of the host's clock `host_clock` at the guest's time `ns`.

        `ns` was just read from the guest's clock. If this clock is virtual, return `ns`, because a virtual
        clock is independent of the host's clocks.
        """
        if self._clock.is_virtual:
            return ns
        # The guest's clock is read first, so that no event seems to precede its cause.
        age = self._clock.now_ns() - ns
        found = max(time.clock_gettime_ns(host_clock) - age, self._latest.get(host_clock, 0))
        self._latest[host_clock] = found
        return found

    def _count(self, _ns: int) -> int:
        self._counter += 1
        return self._counter


def _uptime(ns: int) -> int:
    jiffies = ns * HZ // NSEC_PER_SEC
    return jiffies * USER_HZ // HZ


def ns_to_usecs(ns: int) -> int:
    """Convert nanoseconds to microseconds, rounded to the nearest integer.

    Mirrors: kernel/trace/trace.c:ns2usecs (v6.1).
    """
    return (ns + 500) // 1000


def find_clock(name: str) -> TraceClock | None:
    """Return the trace clock called `name`, or None if there is no such clock."""
    return next((clock for clock in TRACE_CLOCKS if clock.name == name), None)


def clocks_text(current: TraceClock) -> str:
    """Return the text of the trace_clock file: one line of all names, with the current clock in brackets."""
    names = (f"[{clock.name}]" if clock is current else clock.name for clock in TRACE_CLOCKS)
    return " ".join(names) + "\n"
