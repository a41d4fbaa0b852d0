"""ControlLock: the one lock that serialises whatever uses a kernel, and the check that it is held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self

PATIENCE = 0.1
"""Seconds that a thread waits for the lock like any other; then it counts as one that blocks."""


class ControlLock:
    """Re-entrant; taken at each entry from outside: a request, a call, a background load.

    Inside, methods that need it say so by assert_held(), as lockdep_assert_held() does. A probe hit needs no
    check: the guest only runs while its runner holds the lock.
    """

    __slots__ = ("_depth", "_lock", "_owner", "turn", "waiting")

    def __init__(self) -> None:
        # An RLock: an interrupt between two bytecodes can't leave it held by nobody.
        self._lock = threading.RLock()
        self._owner = 0
        """Identifier of the thread that holds it; 0: nobody. For assert_held() alone."""
        self._depth = 0
        self.turn = 0
        """Number of the latest entry from outside: what is bounded for one begins anew with the next."""
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Around a wait beyond PATIENCE: who answers requests has another thread do so meanwhile."""

    def __enter__(self) -> Self:
        if not self._lock.acquire(timeout=PATIENCE):
            with self.waiting():
                self._lock.acquire()
        self._owner = threading.get_ident()
        self.turn += not self._depth
        self._depth += 1
        return self

    def __exit__(self, *_exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()

    def assert_held(self) -> None:
        """Raises: AssertionError unless the calling thread holds it."""
        assert self._owner == threading.get_ident(), "the control lock isn't held"
