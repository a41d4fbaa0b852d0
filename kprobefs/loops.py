"""libfuse's request loop in threads of our own: one, and one more for each that blocks or takes long."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from time import monotonic, sleep

from emulated_kernel.errors import KernelError
from emulated_kernel.threads import start_thread

FREE_LOOPS = 1
"""Threads that take requests while others block.

With two, each request goes to the one that has waited longer, and that waits for the interpreter's lock.
"""

LONG = 0.1
"""Seconds between two looks; a request that is under way at both counts as one that blocks."""

MOST_WAITING = 32
"""Threads that wait for the kernel's lock for long and are replaced meanwhile; beyond that, requests wait."""

RETRY = 1.0
"""Seconds without another try where there was no thread, or one had no memory: each blocked request asks."""

FAILED = -1
"""What a loop returns that ended before the session."""


class Loops:
    """Runs `loop` in threads until all of them have ended.

    libfuse's own pool makes a thread whenever all of them are busy, and ends it when too many are idle.
    With the interpreter's lock between them that is every few requests, and 50 us each time. Threads of
    Python's own also keep their interpreter state from one callback to the next.
    """

    def __init__(self, loop: Callable[[], object], free: int = FREE_LOOPS, *, watches: bool = True) -> None:
        """`watches`: a request that takes long is replaced, too."""
        self._loop = loop
        self._watches = watches
        self._free = free
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        """All but those that took no requests, for want of memory."""
        self._next_try = 0.0
        self._blocked = 0
        self._replaceable = threading.Semaphore(MOST_WAITING)
        self._has_ended = False
        """The loops have nothing to take requests from any more."""
        self._numbers = count(1)
        self._under_way: dict[int, int] = {}
        """By thread, the number of the request that it answers, until that blocks."""
        self._long: set[int] = set()
        """Those that are counted as blocked."""
        self._begun = 0
        self._is_parked = False
        self._wake = threading.Event()

    def run(self) -> None:
        """Start the threads; return when each has left its loop."""
        with self._lock:
            self._refill()
        watch = None
        if self._watches:
            # Without it a long request keeps the others waiting, and nothing else.
            with suppress(KernelError):
                watch = start_thread("fuse-watch", self._watch)
        while (thread := self._next()) is not None:
            thread.join()
        self._wake.set()
        if watch is not None:
            watch.join()

    def request_begins(self) -> None:
        """The calling thread has a request to answer."""
        self._under_way[threading.get_ident()] = self._begun = next(self._numbers)
        if self._is_parked:
            self._wake.set()

    def request_ended(self) -> None:
        """It has the answer."""
        number = self._under_way.pop(threading.get_ident(), None)
        if number in self._long:
            with self._lock:
                self._blocked -= self._is_counted(number)

    def _is_counted(self, number: int | None) -> bool:
        """Whether it counts as blocked because it takes long; afterwards it doesn't."""
        is_counted = number in self._long
        self._long.discard(number or 0)
        return is_counted

    def _watch(self) -> None:
        """Look for requests that take long; with none to look at it sleeps."""
        seen = 0
        while not self._has_ended:
            if not self._under_way and self._begun == seen:
                # Order matters: it says that it parks, then looks for a request once more.
                self._is_parked = True
                if not self._under_way and self._begun == seen and not self._has_ended:
                    self._wake.wait()
                self._is_parked = False
                self._wake.clear()
            seen, found = self._begun, self._under_way.copy()
            sleep(LONG)
            for thread, number in found.items():
                if self._under_way.get(thread) == number:
                    self._replace(thread, number)

    def _replace(self, thread: int, number: int) -> None:
        with self._lock:
            if number in self._long:
                # There may have been no thread for it.
                self._refill()
                return
            if len(self._long) == MOST_WAITING:
                return
            # Order matters: what ends now sees itself here, or is seen to have ended.
            self._long.add(number)
            if self._under_way.get(thread) != number:
                self._long.discard(number)
                return
            self._blocked += 1
            self._refill()

    def _next(self) -> threading.Thread | None:
        """One to wait for; None where all have ended, and no more are started."""
        with self._lock:
            alive = next(filter(threading.Thread.is_alive, self._threads), None)
            self._has_ended = alive is None
            return alive

    @contextmanager
    def blocking(self) -> Iterator[int]:
        """The calling thread waits for something: another one takes requests meanwhile; how many wait now.

        Raises: KernelError ENOMEM, where the host has no thread for that: the last one may not wait.
        """
        thread = threading.get_ident()
        with self._lock:
            number = self._under_way.pop(thread, None)
            is_counted = self._is_counted(number)
            self._refill(0 if is_counted else 1)
            self._blocked += not is_counted
            blocked = self._blocked
            if len(self._threads) <= blocked:
                self._goes_on(thread, number)
                raise KernelError(errno.ENOMEM, "no thread to take requests meanwhile")
        try:
            yield blocked
        finally:
            with self._lock:
                self._goes_on(thread, number)

    def _goes_on(self, thread: int, number: int | None) -> None:
        """A request that has waited is under way again, and may take long."""
        self._blocked -= 1
        if number is not None:
            self._under_way[thread] = number
            if self._is_parked:
                self._wake.set()

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
        # libfuse's has had no memory for its buffer.
        if self._loop() == FAILED:
            with self._lock:
                self._threads.remove(threading.current_thread())
                self._next_try = monotonic() + RETRY
