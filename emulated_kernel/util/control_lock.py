"""ControlLock: the one lock that serialises all users of a kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic, sleep
from typing import Self

GIVING_WAY = 0.05
"""Longest time in seconds for which yield_lock() waits."""
PATIENCE = 0.1
"""Seconds that a thread waits for the lock before it enters `ControlLock.waiting`."""


class _Pause(str):
    __slots__ = ()


PAUSE = _Pause()
"""Part of a text without characters, after which its reader gives up the control lock for a moment."""


class ControlLock:
    """Re-entrant lock, taken at each entry from outside: a request, an API call, a background load.

    Inner methods that need the lock call assert_held(), like lockdep_assert_held(). A probe hit needs no
    check, because the guest only runs while its runner holds the lock.
    """

    __slots__ = ("_acquire", "_depth", "_owner", "_release", "_waiters", "is_abandoned", "turn", "waiting")

    def __init__(self) -> None:
        # An RLock is acquired and gets its owner in one C call, which a KeyboardInterrupt can't split.
        lock = threading.RLock()
        self._acquire = lock.acquire
        self._release = lock.release
        self._owner = 0
        """Identifier of the owning thread, 0 if there is none; only assert_held() uses it."""
        self._depth = 0
        self._waiters: set[object] = set()
        """A token for each thread that waits now; a thread that waits a second time gets a new token."""
        self.turn = 0
        """Number of the latest entry from outside; quotas that hold for one entry restart when it changes."""
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Makes a context manager for a wait longer than PATIENCE.

        A thread that serves requests uses it to let another thread serve them while it waits.
        """
        self.is_abandoned: Callable[[], bool] = lambda: False
        """Whether the process was killed whose write the calling thread serves. Long writes then stop."""

    def __enter__(self) -> Self:
        if not self._acquire(False):
            self._wait()
        if not self._depth:
            self._owner = threading.get_ident()
            self.turn += 1
        self._depth += 1
        return self

    def __exit__(self, _kind: object = None, _error: object = None, _traceback: object = None) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._release()

    def _wait(self) -> None:
        """Acquire the lock after a failed first attempt."""
        wait = object()
        self._waiters.add(wait)
        try:
            if not self._acquire(timeout=PATIENCE):
                with self.waiting():
                    self._acquire()
        finally:
            self._waiters.discard(wait)

    def yield_lock(self) -> None:
        """Wait until all threads that wait for the lock now have got it, for GIVING_WAY seconds at most.

        The caller has just released the lock and will take it again.
        """
        waiters = self._waiters.copy()
        end = monotonic() + GIVING_WAY
        while not waiters.isdisjoint(self._waiters) and monotonic() < end:
            sleep(GIVING_WAY / 50)

    def assert_held(self) -> None:
        """Assert that the calling thread holds the lock. Raises: AssertionError."""
        assert self._owner == threading.get_ident(), "the control lock isn't held"
