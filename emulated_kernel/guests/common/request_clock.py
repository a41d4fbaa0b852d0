"""When delayed work is due: the guest's clock, and in virtual time the requests that come in."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.guest_clock import GuestClock
from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.util.abi import HZ

NSEC_PER_JIFFY = 1_000_000_000 // HZ
PAUSE = 0.1
"""Seconds without a request from which on the virtual clock counts the pause as long as it was."""


class RequestClock:
    """Jiffies as delayed work counts them.

    A virtual clock hardly moves between two commands of a shell. So there each request counts a jiffy, the
    same in each run of a script; and a pause between requests counts as long as it was.
    """

    def __init__(
        self, clock: GuestClock, wall: Callable[[], float] = monotonic, *, pauses: bool = True
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._pauses = pauses
        self._extra = 0
        self._latest: float | None = None

    def jiffies(self) -> int:
        return self._clock.now_ns() // NSEC_PER_JIFFY + self._extra

    def count_request(self, *, by_program: bool = False) -> None:
        """A request of a process of the host; how long the program itself paused is its own affair."""
        self._extra += self._clock.is_virtual
        if by_program:
            return
        now = self._wall()
        paused = 0.0 if self._latest is None or not self._pauses else now - self._latest
        if self._clock.is_virtual and paused >= PAUSE:
            self._extra += int(paused * HZ)
        self._latest = now


class RequestObserver(TaskObserver):
    """What each request begins with: it counts for the clock, and delayed work that is due is done."""

    def __init__(self, clock: RequestClock, kprobes: Kprobes) -> None:
        self._clock = clock
        optimizer = kprobes.optimizer
        self._delayed = [kprobes.garbage.work, *([] if optimizer is None else [optimizer.work])]

    def request_begins(self, *, by_program: bool = False) -> None:
        """See TaskEvents; `by_program`: the program itself makes the request."""
        self._clock.count_request(by_program=by_program)
        for work in self._delayed:
            if work.due is not None:
                work.run_if_due()
