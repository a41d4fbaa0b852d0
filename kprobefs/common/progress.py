"""Progress: a progress bar on standard error, if that is a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

from kprobefs.common import terminal

T = TypeVar("T")
_WIDTH = 30
"""Maximum length of the bar in characters."""
_SHARE_WIDTH = 7
"""Number of columns for a space, the percentage, and the ^C that a terminal shows if the user presses it."""
_INTERVAL = 0.1
"""Minimum seconds between two updates of the bar."""


class Progress:
    """A progress bar. It is printed only if standard error is a terminal that can move its cursor.

    The constructor's `what` is the text before the bar, and `total` is the amount of all the work, in any
    unit.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = max(total, 1)
        self._done = 0
        self._next = 0.0
        self._shown = terminal.is_interactive(sys.stderr)

    def __enter__(self) -> Self:
        self.add(0)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def add(self, amount: int) -> None:
        """Add an amount of finished work, in the unit of the constructor's `total`, and update the bar."""
        self._done += amount
        if self._shown and time.monotonic() >= self._next:
            self._next = time.monotonic() + _INTERVAL
            share = min(self._done / self._total, 1)
            columns = shutil.get_terminal_size().columns
            # A longer line would continue in the next one, which \r does not clear.
            what = self._what[: max(columns - _SHARE_WIDTH, 0)]
            # Two brackets and a space.
            width = min(_WIDTH, columns - _SHARE_WIDTH - len(what) - 3)
            bar = f"[{'#' * int(width * share):<{width}}] " if width > 0 else ""
            print(f"\r{what} {bar}{share:4.0%}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line of the progress bar for the next output."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """Yield the items, and advance a progress bar after each item. `what`: text before the bar."""
    with Progress(what, len(items)) as progress:
        for item in items:
            yield item
            progress.add(1)
