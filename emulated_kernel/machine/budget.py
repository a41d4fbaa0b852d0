"""Run budget: a thread that stops a run which lasts too long, and sleeps while nothing runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from threading import get_native_id
from time import clock_gettime, monotonic, sleep

_THREAD_CPU_CLOCK = 6
"""Low bits of the clock id that Linux gives a thread's CPU time. Mirrors: linux/posix-timers.h."""


class Watchdog:
    """Stops a run after `budget` seconds.

    Arming costs two stores: the thread looks at the run's start when it wakes by itself, at most once a
    budget; with nothing running it parks in a wait without a timeout.
    """

    def __init__(self, stop: Callable[[], None], budget: float) -> None:
        self._stop = stop
        self._budget = self._allowed = budget
        self._started = 0.0
        self._runner = get_native_id()
        self._seen = 0.0
        self._seen_cpu = 0.0
        self._expired = -1.0
        self._stopping = -1.0
        self._parked = False
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def arm(self, budget: float | None = None) -> None:
        """A run starts; it may take `budget` seconds instead of the usual ones."""
        self._allowed = self._budget if budget is None else budget
        self._runner = get_native_id()
        self._started = monotonic()
        # Order matters: the thread says that it parks, then looks for a start once more.
        if self._parked:
            self._wake.set()
        elif self._thread is None:
            self._spawn()

    def disarm(self) -> bool:
        """The run ended; whether it was stopped for its budget. No stop comes after this returns."""
        started, self._started = self._started, 0.0
        # Order matters, as in _expire: the thread sees that the run is over, or is seen stopping it.
        while self._stopping == started:
            sleep(0)
        return self._expired == started

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _spawn(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="run-budget", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed:
            self._parked = True
            if not self._started:
                self._wake.wait()
            self._parked = False
            self._wake.clear()
            while self._started and not self._closed:
                self._guard(self._started)

    def _guard(self, started: float) -> None:
        """Sleep until the run that began at `started` is due, then stop it if it is still the same."""
        remaining = max(started + self._allowed - monotonic(), self._allowed - self._used(started))
        if remaining > 0:
            self._sleep(max(remaining, self._allowed / 100))
        else:
            self._expire(started)
            self._sleep(self._allowed / 10)

    def _used(self, started: float) -> float:
        """Seconds of CPU that the running thread had since this run was first looked at.

        On a busy host a run that was kept from the CPU must not pass for one that loops.
        """
        cpu = self._seen_cpu
        # The thread may be gone by now: its clock is named by number then, and can't be read.
        with suppress(OSError):
            cpu = clock_gettime(~self._runner << 3 | _THREAD_CPU_CLOCK)
        if self._seen != started:
            self._seen, self._seen_cpu = started, cpu
        return cpu - self._seen_cpu

    def _expire(self, started: float) -> None:
        self._stopping = started
        if self._started == started:
            self._stop()
            self._expired = started
        self._stopping = -1.0

    def _sleep(self, seconds: float) -> None:
        # A late set() of arm() must not leave the event set: each further sleep would return at once.
        if self._wake.wait(seconds) and not self._closed:
            self._wake.clear()
