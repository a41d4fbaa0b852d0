"""Run budget: a thread that stops a run which lasts too long, and sleeps while nothing runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep


class Watchdog:
    """Stops a run after `budget` seconds.

    Arming costs two stores: the thread looks at the run's start when it wakes by itself, at most once a
    budget; with nothing running it parks in a wait without a timeout.
    """

    def __init__(self, stop: Callable[[], None], budget: float) -> None:
        self._stop = stop
        self._budget = self._allowed = budget
        self._started = 0.0
        self._expired = -1.0
        self._stopping = -1.0
        self._parked = False
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def arm(self, budget: float | None = None) -> None:
        """A run starts; it may take `budget` seconds instead of the usual ones."""
        self._allowed = self._budget if budget is None else budget
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
        remaining = started + self._allowed - monotonic()
        if remaining > 0:
            self._sleep(remaining)
        else:
            self._expire(started)
            self._sleep(self._allowed / 10)

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
