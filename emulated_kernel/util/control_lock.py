"""ControlLock: the one lock that serialises all users of a kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic, sleep
from typing import Self

MAX_YIELD_SECONDS = 0.05
"""Maximum time in seconds for which yield_lock() waits."""
PATIENCE = 0.1
"""Time in seconds for which a thread waits for the lock before it enters `ControlLock.waiting`."""


class _Pause(str):
    __slots__ = ()


PAUSE = _Pause()
"""Empty part of a file's text, after which the reading thread releases the control lock for a moment."""


class ControlLock:
    """Re-entrant lock, taken at each entry from outside: a request, an API call, a background load.

    Inner methods that need the lock call assert_held(), like lockdep_assert_held(). A probe hit needs no
    check, because the guest only runs while its runner holds the lock.
    """

    __slots__ = (
        "_acquire",
        "_depth",
        "_owner",
        "_release",
        "_waiters",
        "at_release",
        "is_abandoned",
        "turn",
        "user",
        "waiting",
    )

    def __init__(self) -> None:
        # An RLock is acquired and gets its owner in one C call, which a KeyboardInterrupt can't split.
        lock = threading.RLock()
        self._acquire = lock.acquire
        self._release = lock.release
        self._owner = 0
        """Identifier of the thread that holds the lock; 0 if it is free. Only assert_held() uses it."""
        self._depth = 0
        self._waiters: set[object] = set()
        """One token for each thread that waits for the lock; each wait has a new token."""
        self.turn = 0
        """Count of the entries from outside so far. Quotas for one entry restart when it changes."""
        self.user = 0
        """User id of the client whose change is made under the lock; 0 for root and the owner of the mount.

        Each entry from outside sets it to 0.
        """
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Returns a context manager, which a thread enters while it waits longer than PATIENCE.

        A thread that serves requests uses it to let another thread serve them while it waits.
        """
        self.at_release: Callable[[], object] | None = None
        """Function to call once, without the lock, when the thread that holds the lock releases it."""
        self.is_abandoned: Callable[[], bool] = lambda: False
        """Function that returns True if the calling thread serves a write(2) of a process that was killed.

        Such a write must stop with EINTR. The FUSE daemon sets this attribute; without it, no write stops.
        """

    def __enter__(self) -> Self:
        if not self._acquire(False):
            self._wait()
        if not self._depth:
            self._owner = threading.get_ident()
            self.turn += 1
            self.user = 0
        self._depth += 1
        return self

    def __exit__(self, _kind: object = None, _error: object = None, _traceback: object = None) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            if self.at_release is not None:
                self._release_and_call(self.at_release)
                return
        self._release()

    def _release_and_call(self, action: Callable[[], object]) -> None:
        self.at_release = None
        self._release()
        action()

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
        """Wait until the threads that wait for the lock have taken it, for at most MAX_YIELD_SECONDS.

        The caller has just released the lock and will take it again.
        """
        waiters = self._waiters.copy()
        end = monotonic() + MAX_YIELD_SECONDS
        while not waiters.isdisjoint(self._waiters) and monotonic() < end:
            sleep(MAX_YIELD_SECONDS / 50)

    def assert_held(self) -> None:
        """Assert that the calling thread holds the lock. Raises: AssertionError."""
        assert self._owner == threading.get_ident(), "the control lock isn't held"
