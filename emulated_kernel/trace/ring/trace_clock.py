"""Trace clocks: the units of a trace array's time stamps."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.util.abi import HZ
from emulated_kernel.util.fast_dataclass import dataclass

NSEC_PER_SEC = 1_000_000_000
USER_HZ = 100


@dataclass(frozen=True)
class TraceClock:
    """A clock that can be written to trace_clock.

    Mirrors: kernel/trace/trace.c:trace_clocks (v6.1)
    """

    name: str
    in_ns: bool
    """Whether the clock counts nanoseconds, which are shown as seconds with six decimals."""


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
    """Converter of the machine's nanoseconds since boot into the units of each clock."""

    def __init__(self) -> None:
        self._counter = 0

    def converter(self, clock: TraceClock) -> Callable[[int], int] | None:
        """Return the function from nanoseconds to `clock`'s units; None if the units are nanoseconds.

        The result is None for x86-tsc too, because the time stamp counter runs at 1 GHz.
        """
        return {COUNTER: self._count, UPTIME: _uptime}.get(clock)

    def _count(self, _ns: int) -> int:
        self._counter += 1
        return self._counter


def _uptime(ns: int) -> int:
    jiffies = ns * HZ // NSEC_PER_SEC
    return jiffies * USER_HZ // HZ


def ns_to_usecs(ns: int) -> int:
    """Return microseconds, rounded to the nearest. Mirrors: kernel/trace/trace.c:ns2usecs (v6.1)."""
    return (ns + 500) // 1000


def find_clock(name: str) -> TraceClock | None:
    """Return the clock of that name, or None."""
    return next((clock for clock in TRACE_CLOCKS if clock.name == name), None)


def clocks_text(current: TraceClock) -> str:
    """Return the trace_clock file: all names in one line, the current one in brackets."""
    names = (f"[{clock.name}]" if clock is current else clock.name for clock in TRACE_CLOCKS)
    return " ".join(names) + "\n"
