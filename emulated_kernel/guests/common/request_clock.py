"""RequestClock: decides when delayed work is due, by the guest's clock and the number of requests."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.guest_clock import GuestClock
from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.util.abi import HZ

NSEC_PER_JIFFY = 1_000_000_000 // HZ
PAUSE = 0.1
"""Length in seconds of the shortest pause between two requests that a virtual clock takes into account.

The whole length of such a pause is added to the count of jiffies.
"""


class RequestClock:
    """Counts the jiffies that decide when delayed work is due.

    A virtual clock hardly advances between two commands of a shell. With such a clock each request adds one
    jiffy, so a script without pauses counts the same number in every run. A pause of at least PAUSE seconds
    before a request adds its whole length, unless the constructor's `pauses` is False or the request comes
    from the Python API.
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
        """Count a request of a host process.

        `by_program`: the request comes from the Python API, so a pause before the request does not count.
        """
        self._extra += self._clock.is_virtual
        if by_program:
            return
        now = self._wall()
        paused = 0.0 if self._latest is None or not self._pauses else now - self._latest
        if self._clock.is_virtual and paused >= PAUSE:
            self._extra += int(paused * HZ)
        self._latest = now


class RequestObserver(TaskObserver):
    """Counts each request when it begins, and then runs the delayed work that is due."""

    def __init__(self, clock: RequestClock, kprobes: Kprobes) -> None:
        self._clock = clock
        optimizer = kprobes.optimizer
        self._delayed = [kprobes.garbage.work]
        if optimizer is not None:
            self._delayed += [optimizer.work, optimizer.stages.work]

    def request_begins(self, *, by_program: bool = False) -> None:
        """Count a request, and run the delayed work that is due: the optimizer's work and deferred frees.

        `by_program`: the request comes from the Python API, so a pause before the request does not count.
        """
        self._clock.count_request(by_program=by_program)
        for work in self._delayed:
            if work.due is not None:
                work.run_if_due()
