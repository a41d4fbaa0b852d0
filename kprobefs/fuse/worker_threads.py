"""WorkerThreads: the threads that read FUSE requests, with an additional thread for each blocked request."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.threads import start_thread

FREE_LOOPS = 3
"""Number of threads that are kept free to read requests.

More threads would only wait for Python's global lock.
"""

MAX_WAITING = 32
"""Maximum number of threads that have a replacement at the same time while they wait for the control lock.

If more threads wait, requests may have to wait, too.
"""

RETRY = 1.0
"""Seconds from a failed attempt to start a thread until the next attempt."""

FAILED = -1
"""Result of `loop` if it ended because of an error, before the session ended."""


class WorkerThreads:
    """Runs the function `loop`, which reads FUSE requests, in several threads.

    libfuse's own pool is not used: it starts a thread whenever all threads are busy, and ends a thread when
    too many are idle. Because of Python's global lock, the pool does this every few requests, and starting or
    ending a thread takes 50 us. Threads of Python also keep their interpreter state from one callback to the
    next.
    """

    def __init__(
        self,
        loop: Callable[[], object],
        free: int = FREE_LOOPS,
        before_wait: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare to run `loop` in `free` threads, not counting the threads that wait in blocking().

        blocking() calls `before_wait` before the calling thread waits.
        """
        self._loop = loop
        self._free = free
        self._before_wait = before_wait
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        """All started threads, except those whose `loop` has returned FAILED."""
        self._next_try = 0.0
        self._blocked = 0
        self._replaceable = threading.Semaphore(MAX_WAITING)
        self._has_ended = False
        """Whether all threads have ended. No thread is started after that."""

    def run(self) -> None:
        """Start the threads, and return when all loops have ended."""
        with self._lock:
            self._refill()
        while (thread := self._next()) is not None:
            thread.join()

    def _next(self) -> threading.Thread | None:
        """Return a thread that is still alive, for run() to join.

        If no thread is alive, return None and prevent further starts.
        """
        with self._lock:
            alive = next(filter(threading.Thread.is_alive, self._threads), None)
            self._has_ended = alive is None
            return alive

    @contextmanager
    def blocking(self) -> Iterator[int]:
        """Make another thread read requests while the calling thread waits in the `with` block.

        Yield the number of threads that wait in this way, including the caller.

        Raises: KernelError ENOMEM (no thread can be started, and the last thread must not wait).
        """
        with self._lock:
            self._refill(1)
            if len(self._threads) <= self._blocked + 1:
                raise KernelError(errno.ENOMEM, "no thread to take requests meanwhile")
            self._blocked += 1
            blocked = self._blocked
        try:
            self._before_wait()
            yield blocked
        finally:
            with self._lock:
                self._blocked -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """If possible, make another thread read requests while the calling thread waits for a lock.

        Only threads of this pool get a replacement, and at most MAX_WAITING of them at once: after the wait,
        a replacement goes on reading requests as an additional thread.
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
        # The thread had no memory for its buffer.
        if self._loop() == FAILED:
            with self._lock:
                self._threads.remove(threading.current_thread())
                self._next_try = monotonic() + RETRY
