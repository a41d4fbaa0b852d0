"""Watchdog: a thread that stops a run of the guest that exceeds the run budget."""

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
"""Low bits of the clock id for a thread's CPU time on Linux. Mirrors: linux/posix-timers.h."""


LOOK = 0.25
"""Maximum seconds between two calls of a Watchdog's `is_unwanted` or `is_interrupted` during a run."""
HANDLERS_FREE = 0.75
"""Share of the callbacks' CPU time that is free: it doesn't count towards the run budget.

Callbacks are the Python functions that Unicorn calls during a run, such as probe handlers. The rest counts,
so that a guest that loops from hit to hit is stopped.
"""


class HandlerTime:
    """Measures the CPU time of callbacks within long runs of the guest, such as probe handlers.

    Most of this time does not count towards the run budget, because the guest isn't responsible for it.
    """

    __slots__ = ("_start_seconds", "callbacks", "is_continued", "is_measured", "seconds", "since")

    def __init__(self) -> None:
        self.callbacks: set[CodeType] = set()
        """Code objects of the functions that Unicorn calls. Each calls `measure` if `is_measured` is True."""
        self.is_measured = False
        self.is_continued = False
        """Whether the measurement goes on after the end of a run. If False, the end of a run stops it."""
        self._start_seconds = 0.0
        self.seconds = 0.0
        """Total of the measured CPU time in seconds."""
        self.since = 0.0
        """CPU time of the thread at the start of the measured callback in progress; 0.0 if there is none."""

    def keep_measuring(self) -> None:
        """Begin to measure the callbacks' CPU time; the measurement continues across runs.

        To end it, set `is_continued` to False: then the next end of a run stops the measurement.
        """
        self.is_continued = True
        self.is_measured = True
        self._start_seconds = self.seconds

    @property
    def kept(self) -> float:
        """The part of the callbacks' CPU time that does not count towards a budget, in seconds.

        The time is counted from the call of keep_measuring().

        The value is 0 while `is_continued` is False.
        """
        return HANDLERS_FREE * (self.seconds - self._start_seconds) if self.is_continued else 0.0

    def measure(self, callback: Callable[..., object], *args: object) -> object:
        """Call `callback` and return its result; add the CPU time of the call to `seconds`.

        Callbacks that are called meanwhile are not measured separately.
        """
        self.is_measured = False
        self.since = thread_time()
        try:
            return callback(*args)
        finally:
            self.seconds += thread_time() - self.since
            self.is_measured = True
            self.since = 0.0

    def until(self, now: float) -> float:
        """Return the CPU seconds of the measured callbacks until `now`, including the callback in progress.

        `now`: present CPU time of the thread that runs the guest.
        """
        since = self.since
        return self.seconds + (now - since if since else 0.0)

    def is_within(self, thread: int) -> bool:
        """Return True if the thread `thread`, a result of get_ident(), executes one of `callbacks`."""
        frame = sys._current_frames().get(thread)
        while frame is not None and frame.f_code not in self.callbacks:
            frame = frame.f_back
        return frame is not None


class _CallingThread(threading.local):
    """Identifier of the calling thread in the host's kernel.

    The identifier is kept in thread-local memory, because each call of get_native_id() asks the kernel for
    it.
    """

    def __init__(self) -> None:
        self.number = get_native_id()


class Watchdog:
    """Stops a run after `budget` seconds of CPU time.

    In the second half of the budget, only a part of the callbacks' CPU time counts. Arming does not wake the
    watchdog's thread during a series of runs: the thread wakes by itself, and then reads the start of the
    current run. If no guest runs, the thread waits without a timeout.
    """

    def __init__(
        self,
        stop: Callable[[], None],
        handler_time: HandlerTime,
        budget: float,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a watchdog that ends a run after `budget` seconds by calling `stop`.

        It also stops a run of the main thread if `is_interrupted` returns True. `handler_time` measures the
        time of callbacks.
        """
        self._stop = stop
        self._is_interrupted = is_interrupted
        self._handler_time = handler_time
        self._budget = budget
        self._allowed = budget
        self._started = 0.0
        self._calling = _CallingThread()
        self._runner = self._calling.number
        self._ident = get_ident()
        self._seen = 0.0
        self._last_cpu = 0.0
        self._half: float | None = None
        """CPU seconds that the run had used at the middle of its budget, less the free time of callbacks.

        The free time is HANDLERS_FREE times HandlerTime.seconds. The value is None in the first half of the
        budget.
        """
        self._expired = -1.0
        self._stopping = -1.0
        self._parked = False
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_unwanted: Callable[[], bool] | None = None
        self._sleeps_long = False
        """Whether the thread sleeps until a run's budget ends, and does not call `is_unwanted` before."""
        self.was_unwanted = False
        """Whether the last run that the watchdog stopped was unwanted: `is_unwanted` returned True.

        A run is unwanted if no caller waits for its result any more.
        """
        self.was_interrupted = False
        """Whether the last run that the watchdog stopped was interrupted: `is_interrupted` returned True."""

    @property
    def budget(self) -> float:
        """Maximum CPU time in seconds of each further run for which arm() gets no other budget."""
        return self._budget

    @budget.setter
    def budget(self, seconds: float) -> None:
        self._budget = seconds
        # The thread may be asleep for the length of the old budget.
        self._wake.set()

    def ask(self, is_unwanted: Callable[[], bool] | None) -> None:
        """Make the watchdog's thread call `is_unwanted` during runs, and stop the run if it returns True.

        If `is_unwanted` is None, no function is called.
        """
        self._is_unwanted = is_unwanted
        # Order matters, as in _guard: either the thread sees the new function, or this code sees its long
        # sleep.
        if is_unwanted is not None and self._sleeps_long:
            self._wake.set()

    def arm(self, budget: float | None = None) -> None:
        """Begin to measure the time of a run.

        `budget`: maximum CPU time of this run in seconds; None selects the property `budget`.

        Raises: KernelError ENOMEM (the host has no thread; a run without a watchdog isn't allowed).
        """
        self._allowed = self._budget if budget is None else budget
        self._runner = self._calling.number
        self._ident = get_ident()
        self._started = monotonic()
        # Order matters: the thread sets _parked before it reads _started a second time.
        if self._parked:
            self._wake.set()
        elif self._thread is None:
            self._thread = start_thread("run-budget", self._watch)

    def disarm(self) -> bool:
        """Stop measuring the time of a run; return True if the watchdog has stopped the run.

        After this method has returned, the watchdog does not stop the run any more.
        """
        started = self._started
        self._started = 0.0
        # Order matters, as in _expire: either the thread sees the end, or this code sees that it is stopping.
        while self._stopping == started:
            sleep(0)
        if not self._handler_time.is_continued:
            self._handler_time.is_measured = False
        return self._expired == started

    @property
    def has_expired(self) -> bool:
        """Whether the current run was stopped by the watchdog."""
        return self._expired == self._started

    def close(self) -> None:
        """End the watchdog's thread, and wait until it has ended."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        while not self._closed:
            try:
                self._watch_runs()
            # Without this thread a run might never end. Even waiting allocates memory.
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
        """Stop the run if its budget is used up, or if it is unwanted or interrupted.

        Then sleep until the next check. `started` is the monotonic() time at which the run began.
        """
        self._sleeps_long = True
        is_unwanted = self._is_unwanted
        remaining = self._remaining(started)
        is_main = self._ident == threading.main_thread().ident
        self._sleeps_long = is_unwanted is None and not is_main
        was_unwanted = is_unwanted is not None and is_unwanted()
        was_interrupted = is_main and self._is_interrupted()
        if remaining > 0 and not (was_unwanted or was_interrupted):
            longest = max(remaining, self._allowed / 100)
        else:
            self._expire(started, was_unwanted=was_unwanted, was_interrupted=was_interrupted)
            longest = self._allowed / 10
        self._sleep(min(longest, LOOK) if is_unwanted or is_main else longest)

    def _remaining(self, started: float) -> float:
        """Return a lower bound, in seconds, of the time that the run may still take.

        `started`: the monotonic() time at which the run began. After the first half of the budget, also begin
        to measure the callbacks' time.
        """
        half = self._allowed / 2
        handlers = self._handler_time
        cpu = self._cpu_of_run(started)
        used = cpu - self._last_cpu
        if self._half is None:
            remaining = max(started + half - monotonic(), half - used)
            if remaining > 0:
                return remaining
            handlers.is_measured = True
            # The current callback isn't measured: the second half of the budget begins after it.
            if handlers.is_within(self._ident):
                return half / 10
            self._half = used - HANDLERS_FREE * handlers.seconds
        return self._half + half - (used - HANDLERS_FREE * handlers.until(cpu))

    def _cpu_of_run(self, started: float) -> float:
        """Return the CPU time, in seconds, of the thread that runs the guest.

        At the first call for a run, also store this time as that of the run's start, in `_last_cpu`.
        `started`: the monotonic() time at which the run began; another value means another run. CPU time is
        used because, on a busy host, a run that waits for a CPU must not count as an endless loop.
        """
        cpu = self._last_cpu
        # The thread may have ended. Its clock, addressed by its id, can't be read then.
        with suppress(OSError):
            cpu = clock_gettime(~self._runner << 3 | _THREAD_CPU_CLOCK)
        if self._seen != started:
            self._seen = started
            self._last_cpu = cpu
            self._half = None
        return cpu

    def _expire(self, started: float, *, was_unwanted: bool, was_interrupted: bool) -> None:
        self._stopping = started
        try:
            if self._started == started:
                self._stop()
                self._expired = started
                self.was_unwanted = was_unwanted
                self.was_interrupted = was_interrupted
        finally:
            # Otherwise disarm() would wait forever.
            self._stopping = -1.0

    def _sleep(self, seconds: float) -> None:
        # A late set() in arm() must not leave the event set: each further sleep would return at once.
        if self._wake.wait(seconds) and not self._closed:
            self._wake.clear()
