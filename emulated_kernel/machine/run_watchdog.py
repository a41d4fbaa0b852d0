"""Run budget: a thread that stops a run which lasts too long, and sleeps while nothing runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident, get_native_id
from time import clock_gettime, monotonic, sleep, thread_time
from types import CodeType

from emulated_kernel.util.threads import start_thread

_THREAD_CPU_CLOCK = 6
"""Low bits of the clock id that Linux gives a thread's CPU time. Mirrors: linux/posix-timers.h."""


LOOK = 0.25
"""Seconds between two looks at whether a run is wanted."""
HANDLERS_FREE = 0.75
"""Share of the callbacks' time that isn't counted; the rest ends a guest that loops from one to the next."""


class HandlerTime:
    """CPU seconds that the host's callbacks take out of runs; measured only where a run gets long.

    A probe's handler is none of the guest's doing, however many there are on one function.
    """

    __slots__ = ("_kept_from", "callbacks", "is_kept", "is_measured", "seconds", "since")

    def __init__(self) -> None:
        self.callbacks: set[CodeType] = set()
        """What the emulator calls; each asks `is_measured` and has itself measured."""
        self.is_measured = False
        self.is_kept = False
        """Measure in the runs that follow too."""
        self._kept_from = 0.0
        self.seconds = 0.0
        """All that was measured so far."""
        self.since = 0.0
        """The thread's CPU time at which the measured callback under way began; 0.0: there is none."""

    def keep(self) -> None:
        """Measure from now on, in all runs until `is_kept` is taken back."""
        self.is_kept = True
        self.is_measured = True
        self._kept_from = self.seconds

    @property
    def kept(self) -> float:
        """What doesn't count of the time since `keep`."""
        return HANDLERS_FREE * (self.seconds - self._kept_from) if self.is_kept else 0.0

    def measure(self, callback: Callable[..., object], *args: object) -> object:
        """Call a callback and measure it, unless it already is."""
        self.is_measured, self.since = False, thread_time()
        try:
            return callback(*args)
        finally:
            self.seconds += thread_time() - self.since
            self.is_measured = True
            self.since = 0.0

    def until(self, now: float) -> float:
        """All that was measured up to `now` of the running thread's CPU time."""
        since = self.since
        return self.seconds + (now - since if since else 0.0)

    def is_within(self, thread: int) -> bool:
        """Whether this thread is in a callback."""
        frame = sys._current_frames().get(thread)
        while frame is not None and frame.f_code not in self.callbacks:
            frame = frame.f_back
        return frame is not None


class Watchdog:
    """Stops a run after `budget` seconds of CPU time; of the second half the host's callbacks count little.

    Arming costs two stores: the thread looks at the run's start when it wakes by itself, at most once a
    budget; with nothing running it parks in a wait without a timeout.
    """

    def __init__(self, stop: Callable[[], None], handler_time: HandlerTime, budget: float) -> None:
        self._stop = stop
        self._handler_time = handler_time
        self._budget = budget
        self._allowed = budget
        self._started = 0.0
        self._runner = get_native_id()
        self._ident = get_ident()
        self._seen = 0.0
        self._seen_cpu = 0.0
        self._half: float | None = None
        """What counts of the CPU seconds used, when callbacks began to be measured."""
        self._expired = -1.0
        self._stopping = -1.0
        self._parked = False
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_unwanted: Callable[[], bool] | None = None
        self._sleeps_long = False
        """The thread sleeps until a run is due, and looks at nothing before."""
        self.was_unwanted = False
        """Of the run that was stopped last: whether that was since nobody waited for it."""

    @property
    def budget(self) -> float:
        """Seconds that a run may take from now on."""
        return self._budget

    @budget.setter
    def budget(self, seconds: float) -> None:
        self._budget = seconds
        # The thread may sleep as long as runs were allowed until now.
        self._wake.set()

    def ask(self, is_unwanted: Callable[[], bool] | None) -> None:
        """Have the thread ask whether nobody waits any more for the runs from now on."""
        self._is_unwanted = is_unwanted
        # Order matters, as in _guard: the thread sees it, or is seen in a sleep that began without.
        if is_unwanted is not None and self._sleeps_long:
            self._wake.set()

    def arm(self, budget: float | None = None) -> None:
        """A run starts; it may take `budget` seconds instead of the usual ones.

        Raises: KernelError ENOMEM (the host has no thread: no run may go on without).
        """
        self._allowed = self._budget if budget is None else budget
        self._runner, self._ident = get_native_id(), get_ident()
        self._started = monotonic()
        # Order matters: the thread says that it parks, then looks for a start once more.
        if self._parked:
            self._wake.set()
        elif self._thread is None:
            self._thread = start_thread("run-budget", self._watch)

    def disarm(self) -> bool:
        """The run ended; whether it was stopped for its budget. No stop comes after this returns."""
        started = self._started
        self._started = 0.0
        # Order matters, as in _expire: the thread sees that the run is over, or is seen stopping it.
        while self._stopping == started:
            sleep(0)
        if not self._handler_time.is_kept:
            self._handler_time.is_measured = False
        return self._expired == started

    @property
    def has_expired(self) -> bool:
        """Whether the run under way was stopped for its budget."""
        return self._expired == self._started

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        while not self._closed:
            try:
                self._watch_runs()
            # Without this thread a run would never end. What waits allocates, too.
            except MemoryError:
                sleep(self._budget / 10)

    def _watch_runs(self) -> None:
        self._sleeps_long = False
        self._parked = True
        if not self._started:
            self._wake.wait()
        self._parked = False
        self._wake.clear()
        while self._started and not self._closed:
            self._guard(self._started)

    def _guard(self, started: float) -> None:
        """Sleep until the run that began at `started` is due, then stop it if it is still the same."""
        self._sleeps_long = True
        is_unwanted = self._is_unwanted
        remaining = self._remaining(started)
        self._sleeps_long = is_unwanted is None
        was_unwanted = is_unwanted is not None and is_unwanted()
        if remaining > 0 and not was_unwanted:
            longest = max(remaining, self._allowed / 100)
        else:
            self._expire(started, was_unwanted=was_unwanted)
            longest = self._allowed / 10
        self._sleep(min(longest, LOOK) if is_unwanted else longest)

    def _remaining(self, started: float) -> float:
        """Seconds that the run may still take at least."""
        half = self._allowed / 2
        handlers = self._handler_time
        cpu = self._cpu_of_run(started)
        used = cpu - self._seen_cpu
        if self._half is None:
            remaining = max(started + half - monotonic(), half - used)
            if remaining > 0:
                return remaining
            handlers.is_measured = True
            # One that is under way isn't measured: the guest's half begins behind it.
            if handlers.is_within(self._ident):
                return half / 10
            self._half = used - HANDLERS_FREE * handlers.seconds
        return self._half + half - (used - HANDLERS_FREE * handlers.until(cpu))

    def _cpu_of_run(self, started: float) -> float:
        """CPU time of the running thread; a run is counted from the first look at it on.

        On a busy host a run that was kept from the CPU must not pass for one that loops.
        """
        cpu = self._seen_cpu
        # The thread may be gone by now: its clock is named by number then, and can't be read.
        with suppress(OSError):
            cpu = clock_gettime(~self._runner << 3 | _THREAD_CPU_CLOCK)
        if self._seen != started:
            self._seen = started
            self._seen_cpu = cpu
            self._half = None
        return cpu

    def _expire(self, started: float, *, was_unwanted: bool) -> None:
        self._stopping = started
        try:
            if self._started == started:
                self._stop()
                self._expired = started
                self.was_unwanted = was_unwanted
        finally:
            # Else disarm() would wait for ever.
            self._stopping = -1.0

    def _sleep(self, seconds: float) -> None:
        # A late set() of arm() must not leave the event set: each further sleep would return at once.
        if self._wake.wait(seconds) and not self._closed:
            self._wake.clear()
