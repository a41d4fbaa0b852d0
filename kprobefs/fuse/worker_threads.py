"""A session's loop in threads of our own: a few that stay, and one more for each that blocks."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.threads import start_thread

FREE_LOOPS = 3
"""Threads that take requests while others block. More only wait for the interpreter's lock."""

MOST_WAITING = 32
"""Threads that wait for the kernel's lock for long and are replaced meanwhile; beyond that, requests wait."""

RETRY = 1.0
"""Seconds without another try where there was no thread, or one had no memory: each blocked request asks."""

FAILED = -1
"""What a loop returns that ended before the session."""


class WorkerThreads:
    """Runs `loop` in threads until all of them have ended.

    libfuse's own pool makes a thread whenever all of them are busy, and ends it when too many are idle.
    With the interpreter's lock between them that is every few requests, and 50 us each time. Threads of
    Python's own also keep their interpreter state from one callback to the next.
    """

    def __init__(self, loop: Callable[[], object], free: int = FREE_LOOPS) -> None:
        self._loop = loop
        self._free = free
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        """All but those that took no requests, for want of memory."""
        self._next_try = 0.0
        self._blocked = 0
        self._replaceable = threading.Semaphore(MOST_WAITING)
        self._has_ended = False
        """The loops have nothing to take requests from any more."""

    def run(self) -> None:
        """Start the threads; return when each has left its loop."""
        with self._lock:
            self._refill()
        while (thread := self._next()) is not None:
            thread.join()

    def _next(self) -> threading.Thread | None:
        """One to wait for; None where all have ended, and no more are started."""
        with self._lock:
            alive = next(filter(threading.Thread.is_alive, self._threads), None)
            self._has_ended = alive is None
            return alive

    @contextmanager
    def blocking(self) -> Iterator[int]:
        """The calling thread waits for something: another one takes requests meanwhile; how many wait now.

        Raises: KernelError ENOMEM (the host has no thread for that: the last one may not wait).
        """
        with self._lock:
            self._refill(1)
            if len(self._threads) <= self._blocked + 1:
                raise KernelError(errno.ENOMEM, "no thread to take requests meanwhile")
            self._blocked += 1
            blocked = self._blocked
        try:
            yield blocked
        finally:
            with self._lock:
                self._blocked -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """As blocking(), for what is waited for even if nobody takes requests meanwhile.

        Only loops are replaced, and not more than MOST_WAITING at once: the threads for that stay.
        """
        with ExitStack() as stack:
            if threading.current_thread() in self._threads and self._replaceable.acquire(blocking=False):
                stack.callback(self._replaceable.release)
                with suppress(KernelError):
                    stack.enter_context(self.blocking())
            yield

    def _refill(self, blocking: int = 0) -> None:
        if self._has_ended or monotonic() < self._next_try:
            return
        while len(self._threads) - self._blocked - blocking < self._free:
            try:
                self._threads.append(start_thread("fuse-loop", self._serve))
            except KernelError:
                self._next_try = monotonic() + RETRY
                return

    def _serve(self) -> None:
        # It has had no memory for its buffer.
        if self._loop() == FAILED:
            with self._lock:
                self._threads.remove(threading.current_thread())
                self._next_try = monotonic() + RETRY
