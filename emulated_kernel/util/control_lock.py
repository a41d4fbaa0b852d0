"""ControlLock: the one lock that serialises all users of a kernel."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic, sleep
from typing import Self

from emulated_kernel.util.errors import KernelError

MAX_YIELD_SECONDS = 0.05
"""Maximum time in seconds for which yield_lock() waits."""
PATIENCE = 0.1
"""Time in seconds for which a thread waits for the lock before it enters `ControlLock.waiting`."""


LOAN_SLICE = 0.25
"""Seconds between two checks whether a client that waits for a debugger was killed or interrupted."""


class _Pause(str):
    __slots__ = ()


PAUSE = _Pause()
"""Empty part of a file's text, after which the reading thread releases the control lock for a moment."""
END = "\0end\0"
"""Part of a file's text at which read(2) returns 0, although a later read may find further text."""


class _Observation:
    """Context manager that ControlLock.observing() returns: it holds the lock, even while the lock is lent.

    One object serves all threads, because it holds no state.
    """

    __slots__ = ("_lock",)

    def __init__(self, lock: ControlLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire_to_observe()

    def __exit__(self, _kind: object = None, _error: object = None, _traceback: object = None) -> None:
        self._lock.__exit__()


class ControlLock:
    """Re-entrant lock, taken at each entry from outside: a request, an API call, a background load.

    Inner methods that need the lock call assert_held(), like lockdep_assert_held(). A probe hit needs no
    such check, because the guest only runs while the thread that runs it holds the lock.
    While a debugger holds the guest, the lock is *lent*: only a thread that uses observing() gets it.
    """

    __slots__ = (
        "_acquire",
        "_depth",
        "_observation",
        "_owner",
        "_release",
        "_returned",
        "_waiters",
        "at_release",
        "end_debugging",
        "is_dying",
        "is_interrupted",
        "is_lent",
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
        """Identifier of the thread that holds the lock; 0 if no thread holds it.

        Only assert_held() uses this value.
        """
        self._depth = 0
        self._waiters: set[object] = set()
        """One token for each thread that waits for the lock; each wait has a new token."""
        self.turn = 0
        """Number of requests and other entries from outside so far.

        Code that has a quota for each entry starts a new quota when this number has changed.
        """
        self.user = 0
        """User id of the client that changes something under the lock; 0 for root and the owner of the mount.

        Each entry from outside sets the attribute to 0.
        """
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Function that returns a context manager, which a thread enters once it has waited for PATIENCE.

        In the context, another thread serves requests in place of the thread that waits for the lock.
        """
        self.at_release: Callable[[], object] | None = None
        """Function to call once, without the lock, when the thread that holds the lock releases it."""
        self.is_dying: Callable[[int], bool] = lambda _thread: False
        """Function that returns True if the process whose request a thread serves was killed.

        The argument is the thread's threading.get_ident(). Any thread may call the function. A long write(2)
        of such a process must stop with EINTR. The FUSE daemon sets this attribute; without it, no write
        stops.
        """
        self.is_interrupted: Callable[[int], bool] = lambda _thread: False
        """Function that returns True if the process whose request a thread serves has got a signal.

        The argument is that of `is_dying`. While a debugger holds the guest, such a request fails with EINTR,
        because the guest has done nothing for it. So a user can interrupt a debugger even if a request of the
        debugger itself waits for the loan to end.
        """
        self.end_debugging: Callable[[], object] = lambda: None
        """Function that ends a debugger's session, before the kernel is closed; call it without the lock."""
        self._observation = _Observation(self)
        self.is_lent = False
        """Whether a debugger holds the guest, so that only observers get the lock.

        Only methods of this class change the attribute.
        """
        self._returned = threading.Event()

    def __enter__(self) -> Self:
        if not self._acquire(False):
            self._wait()
        if not self._depth:
            if self.is_lent:
                self._await_return()
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
        """Wait until the other threads have released the lock, and acquire it.

        If this takes longer than PATIENCE, the rest of the wait is in the context of `waiting`.
        """
        wait = object()
        self._waiters.add(wait)
        try:
            if not self._acquire(timeout=PATIENCE):
                with self.waiting():
                    self._acquire()
        finally:
            self._waiters.discard(wait)

    # Loans to a debugger

    def acquire_to_observe(self) -> None:
        """Acquire the lock as __enter__() does, but also while the lock is lent."""
        if not self._acquire(False):
            self._wait()
        if not self._depth:
            self._owner = threading.get_ident()
            self.turn += 1
            self.user = 0
        self._depth += 1

    def observing(self) -> _Observation:
        """Return a context manager that holds the lock in the `with` block, even while the lock is lent.

        The block must run no guest code.
        """
        return self._observation

    def try_lend(self, timeout: float = 0.0) -> bool:
        """Lend the lock to a debugger, and return True.

        Return False if the lock is lent already, if this thread holds it, or if another thread still holds it
        after `timeout` seconds.
        """
        if not (self._acquire(timeout=timeout) if timeout else self._acquire(False)):
            return False
        try:
            if self.is_lent or self._depth:
                return False
            self._lend()
            return True
        finally:
            self._release()

    def end_loan(self) -> None:
        """End a loan of the lock, so that all threads can acquire it again."""
        self.is_lent = False
        self._returned.set()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the lock during the `with` block. The calling thread must hold the lock before the block.

        At the end of the block, the calling thread gets the lock back before all other threads except
        observers.
        """
        self.assert_held()
        depth = self._depth
        user = self.user
        self._lend()
        self._depth = 0
        self._owner = 0
        for _ in range(depth):
            self._release()
        try:
            # Other threads serve requests meanwhile.
            with self.waiting():
                yield
        finally:
            for _ in range(depth):
                self._acquire()
            self._depth = depth
            self._owner = threading.get_ident()
            self.user = user
            self.end_loan()

    def _lend(self) -> None:
        self._returned.clear()
        self.is_lent = True

    def _await_return(self) -> None:
        """If the lock is lent, release it, wait for the end of the loan, and acquire it again.

        The calling thread has just acquired the lock.

        Raises: KernelError EINTR (the client of the request was killed or interrupted).
        """
        while self.is_lent:
            self._release()
            with self.waiting():
                while not self._returned.wait(LOAN_SLICE):
                    thread = threading.get_ident()
                    if self.is_interrupted(thread) or self.is_dying(thread):
                        raise KernelError(errno.EINTR, "a debugger holds the guest")
            self._acquire()

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
