"""A progress bar on standard error, for who watches a terminal."""

from __future__ import annotations

import sys
import time

_WIDTH = 30
_INTERVAL = 0.1
"""Seconds between two pictures of it."""


class Progress:
    """How much of something is done; prints nothing where standard error is no terminal."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = max(total, 1)
        self._done = 0
        self._next = 0.0
        self._shown = sys.stderr.isatty()

    def add(self, amount: int) -> None:
        """More is done."""
        self._done += amount
        if self._shown and time.monotonic() >= self._next:
            self._next = time.monotonic() + _INTERVAL
            share = min(self._done / self._total, 1)
            bar = "#" * int(_WIDTH * share)
            print(f"\r{self._what} [{bar:<{_WIDTH}}] {share:4.0%}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leaves an empty line to whatever is printed next."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
