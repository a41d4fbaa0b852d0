"""A long write(2) of lines, piece by piece: a mount lets others have the control lock in between."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.errors import GivesWay
from emulated_kernel.lock import ControlLock
from emulated_kernel.vfs.core.open_file import OpenFile, Piece

WritePiece = Callable[[Piece, int], int]
"""Writes a piece at an offset; bytes taken, which may be fewer. Raises: KernelError."""


class WriteInPieces:
    """One write(2) to an open file. Linux: what was done before an errno stays."""

    def __init__(self, opened: OpenFile, data: bytes, offset: int, write: WritePiece) -> None:
        self._pieces = opened.pieces(data)
        self._offset = offset
        self._write = write
        self._done = 0
        self._taken = 0

    def __call__(self) -> int:
        """One more piece; bytes taken by all. Raises: GivesWay behind all but the last; KernelError."""
        piece = self._pieces[self._done]
        taken = self._write(piece, self._offset + self._taken)
        self._done += 1
        self._taken += taken
        # Where not all is taken, the rest is the writer's again.
        if taken == len(piece.data) and self._done < len(self._pieces):
            raise GivesWay
        return self._taken


def giving_way(lock: ControlLock, write: Callable[[], int]) -> int:
    """What `write` returns, which takes the lock by itself and is asked again where it raises GivesWay."""
    while True:
        try:
            return write()
        except GivesWay:
            lock.give_way()
