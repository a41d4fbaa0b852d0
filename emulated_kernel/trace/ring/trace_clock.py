"""Trace clocks: what the time stamps of a trace array count."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.util.abi import HZ
from emulated_kernel.util.fast_dataclass import dataclass

NSEC_PER_SEC = 1_000_000_000
USER_HZ = 100


@dataclass(frozen=True)
class TraceClock:
    """A clock that trace_clock offers.

    Mirrors: kernel/trace/trace.c:trace_clocks (v6.1)
    """

    name: str
    in_ns: bool
    """Whether it counts nanoseconds, and is shown as seconds with six decimals."""


LOCAL = TraceClock("local", True)
COUNTER = TraceClock("counter", False)
UPTIME = TraceClock("uptime", False)

TRACE_CLOCKS = (
    LOCAL,
    TraceClock("global", True),
    COUNTER,
    UPTIME,
    TraceClock("perf", True),
    TraceClock("mono", True),
    TraceClock("mono_raw", True),
    TraceClock("boot", True),
    TraceClock("tai", True),
    TraceClock("x86-tsc", False),
)


class ClockSource:
    """Turns the machine's nanoseconds since boot into the units of each clock."""

    def __init__(self) -> None:
        self._counter = 0

    def converter(self, clock: TraceClock) -> Callable[[int], int] | None:
        """The function from nanoseconds to `clock`'s units; None where they are the same.

        So are those of x86-tsc: the time stamp counter has a rate of 1 GHz.
        """
        return {COUNTER: self._count, UPTIME: _uptime}.get(clock)

    def _count(self, _ns: int) -> int:
        self._counter += 1
        return self._counter


def _uptime(ns: int) -> int:
    jiffies = ns * HZ // NSEC_PER_SEC
    return jiffies * USER_HZ // HZ


def ns_to_usecs(ns: int) -> int:
    """Microseconds, rounded to the nearest. Mirrors: kernel/trace/trace.c:ns2usecs (v6.1)."""
    return (ns + 500) // 1000


def find_clock(name: str) -> TraceClock | None:
    """The clock of that name."""
    return next((clock for clock in TRACE_CLOCKS if clock.name == name), None)


def clocks_text(current: TraceClock) -> str:
    """The trace_clock file: all names in one line, the current one in brackets."""
    return " ".join(f"[{c.name}]" if c is current else c.name for c in TRACE_CLOCKS) + "\n"
