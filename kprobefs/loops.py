"""libfuse's request loop in threads of our own: a few that stay, and one more for each that blocks."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from emulated_kernel.errors import KernelError

FREE_LOOPS = 3
"""Threads that take requests while others block. More only wait for the interpreter's lock."""

MOST_WAITING = 32
"""Threads that wait for the kernel's lock for long and are replaced meanwhile; beyond that, requests wait."""


FAILED = -1
"""What a loop returns that ended before the session."""


class Loops:
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
        self._lost = 0
        """Threads that take no requests, for want of memory."""
        self._blocked = 0
        self._replaceable = threading.Semaphore(MOST_WAITING)
        self._has_ended = False
        """The loops have nothing to take requests from any more."""

    def run(self) -> None:
        """Start the threads; return when each has left its loop."""
        with self._lock:
            self._refill()
        ended = 0
        while (thread := self._next(ended)) is not None:
            thread.join()
            ended += 1

    def _next(self, ended: int) -> threading.Thread | None:
        """The one to wait for behind so many; None where all have ended, and no more are started."""
        with self._lock:
            self._has_ended = ended == len(self._threads)
            return None if self._has_ended else self._threads[ended]

    @contextmanager
    def blocking(self) -> Iterator[int]:
        """The calling thread waits for something: another one takes requests meanwhile; how many wait now.

        Raises: KernelError ENOMEM, where the host has no thread for that: the last one may not wait.
        """
        with self._lock:
            self._refill(1)
            if len(self._threads) - self._lost == self._blocked + 1:
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
        while not self._has_ended and len(self._threads) - self._lost - self._blocked - blocking < self._free:
            try:
                thread = threading.Thread(target=self._serve, name="fuse-loop", daemon=True)
                thread.start()
            except (RuntimeError, MemoryError):
                return
            self._threads.append(thread)

    def _serve(self) -> None:
        # libfuse's has had no memory for its buffer.
        if self._loop() == FAILED:
            with self._lock:
                self._lost += 1
