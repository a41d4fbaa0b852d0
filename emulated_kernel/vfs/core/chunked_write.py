"""Requests to control files that take several steps: long writes, and actions that must run only once.

ChunkedWrite does one step of a long write(2) at each call. RunOnce keeps the result of its action, so that
no later call repeats the action. retry_yielding_lock() lets other threads take the control lock between two
steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import WouldBlock, YieldLock
from emulated_kernel.vfs.core.open_file import OpenFile, Piece

T = TypeVar("T")
WritePiece = Callable[[Piece, int], int]
"""Function that takes a piece and the offset at which the piece is written, and does one step of this write.

After the last step, the function returns the number of the piece's bytes that were taken.
Raises: YieldLock (more steps follow), KernelError (the errno of the write(2)).
"""


class RunOnce(Generic[T]):
    """An action of a client's request that runs only once, within the guest's system call or after it.

    The request returns the result of the action, whatever the guest's system call returns.
    """

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self.answer: T
        self._error: Exception | None = None
        self.is_done = False
        """Whether the action has returned its result, which is then in `answer`."""

    def __call__(self) -> T:
        """Run the action at the first call, and return its result at each call.

        Raises: the action's exception, at each call; WouldBlock (the next call runs the action again).
        """
        if self._error is not None:
            raise self._error
        if not self.is_done:
            try:
                self.answer = self._action()
                self.is_done = True
            except WouldBlock:
                raise
            except Exception as error:
                self._error = error
                raise
        return self.answer

    def finish(self) -> T:
        """Return the result of the action at the end of the request; run the action if it has not run yet.

        Raises: as __call__(). After WouldBlock, the request calls this method again.
        """
        try:
            return self()
        finally:
            # The traceback of the exception refers to this object: kept, it would never be freed.
            self._error = None


class ChunkedWrite:
    """One write(2) to an open file, which is done in pieces. Each piece has one or more steps.

    As in Linux, an error does not undo the effects of earlier data.
    """

    __slots__ = ("_done", "_offset", "_pieces", "_taken")

    def __init__(self, opened: OpenFile, data: bytes, offset: int) -> None:
        self._pieces = opened.pieces(data)
        self._offset = offset
        self._done = 0
        self._taken = 0

    def step(self, write: WritePiece) -> int:
        """Do the next step of the write by a call of `write`. Raise YieldLock unless it was the last step.

        After the last step, return the number of bytes taken from all pieces. If only a part of a piece is
        taken, the later pieces are not written. Raises: YieldLock (more steps follow), KernelError (the errno
        of the write(2)).
        """
        piece = self._pieces[self._done]
        taken = write(piece, self._offset + self._taken)
        self._done += 1
        self._taken += taken
        # If only a part of a piece is taken, the write ends: the client must write the rest again.
        if taken == len(piece.data) and self._done < len(self._pieces):
            raise YieldLock
        return self._taken


def retry_yielding_lock(lock: ControlLock, step: Callable[[], T], check: Callable[[], None]) -> T:
    """Call `step` again whenever it raises YieldLock, and return its result.

    `step` takes the control lock itself. Between two calls, other threads get the lock, and `check` is
    called. To end the request, `check` raises an error. From the second call on, the thread counts as
    waiting, so that another thread serves requests in its place.
    Raises: the errors of `step` and of `check`.
    """
    try:
        return step()
    except YieldLock:
        pass
    with lock.waiting():
        while True:
            check()
            lock.yield_lock()
            with suppress(YieldLock):
                return step()
