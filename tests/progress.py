"""Progress bar of long commands at a terminal."""

from __future__ import annotations

import sys
import time

_EVERY = 20


def show_progress(done: int, total: int, start: float, note: str) -> None:
    """Print a progress bar if standard error is a terminal; `start` is a time of time.monotonic()."""
    if not sys.stderr.isatty() or (done % _EVERY and done != total):
        return
    bar = "#" * (30 * done // total)
    rate = done / max(time.monotonic() - start, 0.001)
    line = f"[{bar:<30}] {done}/{total}, {rate:.0f}/s, {note} "
    print(line, end="\n" if done == total else "\r", file=sys.stderr, flush=True)
