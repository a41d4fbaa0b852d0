"""What was found: one finding for each place in the source, and how far the search is."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_SHOWN_INPUTS = 6
_SHOWN_FRAMES = 12
SLOWEST = 2.0
"""Seconds of CPU time that a request may take, whatever else the machine does."""


class Violation(Exception):
    """Something that must hold doesn't."""


@contextmanager
def answered_in_time(path: str) -> Iterator[None]:
    """A request of this thread's to a file. Raises: Violation where it took longer than any may."""
    begun = time.thread_time()
    yield
    if (used := time.thread_time() - begun) > SLOWEST:
        raise Violation(f"{path} answered after {used:.1f} s")


@dataclass(frozen=True)
class Finding:
    """Something that must not happen, where, and the inputs before it, the guilty one last."""

    error: str
    place: str
    trace: str
    history: tuple[object, ...]

    def __str__(self) -> str:
        inputs = (f"  {entry}" for entry in self.history[-_SHOWN_INPUTS:])
        return "\n".join([f"{self.error}  [{self.place}]", *inputs, self.trace])


class Findings:
    """The first finding of each place."""

    def __init__(self) -> None:
        self._by_place: dict[str, Finding] = {}

    @property
    def all(self) -> list[Finding]:
        """In the order in which they were found."""
        return list(self._by_place.values())

    def add(self, error: Exception, history: Sequence[object]) -> None:
        """Keep it, unless the same came from there before."""
        frames = traceback.extract_tb(error.__traceback__)
        inner = [frame for frame in frames if "emulated_kernel" in frame.filename] or list(frames)
        place = f"{os.path.basename(inner[-1].filename)}:{inner[-1].lineno}"
        # Of what must hold there is one check for many things.
        title = f"{type(error).__name__} {place} {str(error)[:40] if isinstance(error, Violation) else ''}"
        if title not in self._by_place:
            shown = f"{type(error).__name__}: {str(error)[:600]}"
            trace = "".join(traceback.format_list(frames[-_SHOWN_FRAMES:]))
            self._by_place[title] = Finding(shown, place, trace, tuple(history))
