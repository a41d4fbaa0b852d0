"""What is done at several goes: long writes of lines, piece by piece, and what waits for the guest's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import WouldBlock, YieldLock
from emulated_kernel.vfs.core.open_file import OpenFile, Piece

T = TypeVar("T")
WritePiece = Callable[[Piece, int], int]
"""Writes a piece at an offset; bytes taken, which may be fewer. Raises: KernelError."""


class RunOnce(Generic[T]):
    """What a file of ours does at the guest's call: once, and all the same if that never comes.

    Control files answer whatever the guest did: where its call fails, our answer stands.
    """

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self.answer: T
        self._error: Exception | None = None
        self.is_done = False
        """It was done, and `answer` is what came of it."""

    def __call__(self) -> T:
        """Raises: what the action did, WouldBlock (after which it may be asked again)."""
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
    """One write(2) to an open file. Linux: what was done before an errno stays."""

    def __init__(self, opened: OpenFile, data: bytes, offset: int, write: WritePiece) -> None:
        self._pieces = opened.pieces(data)
        self._offset = offset
        self._write = write
        self._done = 0
        self._taken = 0

    def __call__(self) -> int:
        """One more piece; bytes taken by all. Raises: YieldLock (behind all but the last), KernelError."""
        piece = self._pieces[self._done]
        taken = self._write(piece, self._offset + self._taken)
        self._done += 1
        self._taken += taken
        # Where not all is taken, the rest is the writer's again.
        if taken == len(piece.data) and self._done < len(self._pieces):
            raise YieldLock
        return self._taken


def retry_yielding_lock(lock: ControlLock, write: Callable[[], int]) -> int:
    """What `write` returns, which takes the lock by itself and is asked again where it raises YieldLock."""
    while True:
        try:
            return write()
        except YieldLock:
            lock.yield_lock()
