"""ControlLock: the one lock that serialises whatever uses a kernel, and the check that it is held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic, sleep
from typing import Self

GIVING_WAY = 0.05
"""Seconds at most that who goes on afterwards leaves the lock to those that wait for it."""
PATIENCE = 0.1
"""Seconds that a thread waits for the lock like any other; then it counts as one that blocks."""


class ControlLock:
    """Re-entrant; taken at each entry from outside: a request, a call, a background load.

    Inside, methods that need it say so by assert_held(), as lockdep_assert_held() does. A probe hit needs no
    check: the guest only runs while its runner holds the lock.
    """

    __slots__ = ("_acquire", "_depth", "_owner", "_release", "_waiters", "turn", "waiting")

    def __init__(self) -> None:
        # An RLock: an interrupt between two bytecodes can't leave it held by nobody.
        lock = threading.RLock()
        self._acquire = lock.acquire
        self._release = lock.release
        self._owner = 0
        """Identifier of the thread that holds it; 0: nobody. For assert_held() alone."""
        self._depth = 0
        self._waiters: set[object] = set()
        """A token for each wait under way: who has been served and waits again is another."""
        self.turn = 0
        """Number of the latest entry from outside: what is bounded for one begins anew with the next."""
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Around a wait beyond PATIENCE: who answers requests has another thread do so meanwhile."""

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
        """Until it is this thread's."""
        wait = object()
        self._waiters.add(wait)
        try:
            if not self._acquire(timeout=PATIENCE):
                with self.waiting():
                    self._acquire()
        finally:
            self._waiters.discard(wait)

    def yield_lock(self) -> None:
        """Let all have it who wait for it now; for a thread that has just released it, and wants it again."""
        waiters = self._waiters.copy()
        end = monotonic() + GIVING_WAY
        while not waiters.isdisjoint(self._waiters) and monotonic() < end:
            sleep(GIVING_WAY / 50)

    def assert_held(self) -> None:
        """Raises: AssertionError (unless the calling thread holds it)."""
        assert self._owner == threading.get_ident(), "the control lock isn't held"
