"""When delayed work is due: the guest's clock, and in virtual time the requests that come in."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from emulated_kernel.abi import HZ

NSEC_PER_JIFFY = 1_000_000_000 // HZ
PAUSE = 0.1
"""Seconds without a request, from which on somebody waits rather than works."""


class RequestTime:
    """Jiffies as delayed work counts them.

    A virtual clock hardly moves between two commands of a shell. So there each request counts a jiffy, the
    same in each run of a script; and a pause between requests counts as long as it was.
    """

    def __init__(
        self, now_ns: Callable[[], int], *, virtual: bool, wall: Callable[[], float] = monotonic
    ) -> None:
        self._now_ns = now_ns
        self.virtual = virtual
        self._wall = wall
        self._extra = 0
        self._latest: float | None = None

    def jiffies(self) -> int:
        return self._now_ns() // NSEC_PER_JIFFY + self._extra

    def count_call(self) -> None:
        """A request of the program itself: how long it paused is its own affair."""
        if self.virtual:
            self._extra += 1

    def count_request(self) -> None:
        """A request of a process of the host."""
        self.count_call()
        now = self._wall()
        if self.virtual and self._latest is not None and now - self._latest >= PAUSE:
            self._extra += int((now - self._latest) * HZ)
        self._latest = now
