"""How far a long command is, for who watches it at a terminal."""

from __future__ import annotations

import sys
import time

_EVERY = 20


def show_progress(done: int, total: int, start: float, note: str) -> None:
    """A bar on a terminal, nothing elsewhere; `start` is a time of time.monotonic()."""
    if not sys.stderr.isatty() or (done % _EVERY and done != total):
        return
    bar = "#" * (30 * done // total)
    rate = done / max(time.monotonic() - start, 0.001)
    line = f"[{bar:<30}] {done}/{total}, {rate:.0f}/s, {note} "
    print(line, end="\n" if done == total else "\r", file=sys.stderr, flush=True)
