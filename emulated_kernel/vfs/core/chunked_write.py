"""Writes in several steps: long writes in pieces, and actions that run at most once during a guest's call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import WouldBlock, YieldLock
from emulated_kernel.vfs.core.open_file import OpenFile, Piece

T = TypeVar("T")
WritePiece = Callable[[Piece, int], int]
"""Do a step of a piece at an offset. After its last step, return the bytes taken, which may be fewer.

Raises: YieldLock (the piece has more steps), KernelError.
"""


class RunOnce(Generic[T]):
    """An action of one of kprobefs's own files that runs once, during or after the guest's system call.

    The request returns the result of the action, even if the guest's system call fails or never runs it.
    """

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self.answer: T
        self._error: Exception | None = None
        self.is_done = False
        """True if the action has returned. Its result is in `answer`."""

    def __call__(self) -> T:
        """Run the action, or return its earlier result.

        Raises: the action's exception, each time; WouldBlock (the next call runs the action again).
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


class ChunkedWrite:
    """One write(2) to an open file, in pieces, which may have several steps.

    Linux: the effects before an error are kept.
    """

    def __init__(self, opened: OpenFile, data: bytes, offset: int, write: WritePiece) -> None:
        self._pieces = opened.pieces(data)
        self._offset = offset
        self._write = write
        self._done = 0
        self._taken = 0

    def __call__(self) -> int:
        """Do the next step. After the last one, return the bytes that all pieces have taken.

        Raises: YieldLock (there are further steps), KernelError.
        """
        piece = self._pieces[self._done]
        taken = self._write(piece, self._offset + self._taken)
        self._done += 1
        self._taken += taken
        # If a piece is not taken whole, the writer must write the rest again.
        if taken == len(piece.data) and self._done < len(self._pieces):
            raise YieldLock
        return self._taken


def retry_yielding_lock(lock: ControlLock, step: Callable[[], T], check: Callable[[], None]) -> T:
    """Call `step` until it does not raise YieldLock, and return its result.

    `step` takes the lock by itself. Between the calls other threads get the lock, and another thread serves
    requests in place of this one.
    Raises: errors of `step`, and of `check`, which is called between two steps.
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
