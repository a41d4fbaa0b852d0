"""Threads that take FUSE requests: a few that are always free, and one more for each blocked request."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.threads import start_thread

FREE_LOOPS = 3
"""Threads that take requests while others block. More would only wait for Python's global lock."""

MOST_WAITING = 32
"""Threads that are replaced while they wait long for the control lock. With more of them, requests wait."""

RETRY = 1.0
"""Seconds until a thread is started again after that has failed. Each blocked request tries."""

FAILED = -1
"""Result of a loop that ended before the session."""


class WorkerThreads:
    """Threads that run `loop` until all of them have ended.

    libfuse's own pool starts a thread whenever all are busy, and ends it when too many are idle. With
    Python's global lock between them this happens every few requests, and takes 50 us each time. Python's
    threads also keep their interpreter state from one callback to the next.
    """

    def __init__(self, loop: Callable[[], object], free: int = FREE_LOOPS) -> None:
        self._loop = loop
        self._free = free
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        """All threads, except those that could take no requests for want of memory."""
        self._next_try = 0.0
        self._blocked = 0
        self._replaceable = threading.Semaphore(MOST_WAITING)
        self._has_ended = False
        """Whether the session has ended, so that no thread is started any more."""

    def run(self) -> None:
        """Start the threads, and return when all loops have ended."""
        with self._lock:
            self._refill()
        while (thread := self._next()) is not None:
            thread.join()

    def _next(self) -> threading.Thread | None:
        """Return a live thread to wait for. If there is none, return None and start no more."""
        with self._lock:
            alive = next(filter(threading.Thread.is_alive, self._threads), None)
            self._has_ended = alive is None
            return alive

    @contextmanager
    def blocking(self) -> Iterator[int]:
        """Let another thread take requests while the calling one waits. Yield the number of waiting threads.

        Raises: KernelError ENOMEM (the host has no more threads, and the last one must not wait).
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
        """Let another thread take requests while the calling one waits, if possible; wait in any case.

        Only threads of this pool are replaced, and at most MOST_WAITING at once: replacements do not end.
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
        # It had no memory for its buffer.
        if self._loop() == FAILED:
            with self._lock:
                self._threads.remove(threading.current_thread())
                self._next_try = monotonic() + RETRY
