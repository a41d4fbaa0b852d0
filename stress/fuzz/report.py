"""Findings of the fuzzers, one for each place in the source."""

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
"""Maximum CPU time of a request in seconds; other load of the machine does not count."""


class Violation(Exception):
    """Exception for a violated invariant."""


@contextmanager
def answered_in_time(path: str) -> Iterator[None]:
    """Measure the CPU time of this thread in the `with` block, which makes a request to the file `path`.

    Raises: Violation if it is more than SLOWEST.
    """
    begun = time.thread_time()
    yield
    if (used := time.thread_time() - begun) > SLOWEST:
        raise Violation(f"{path} answered after {used:.1f} s")


@dataclass(frozen=True)
class Finding:
    """An error, its place in the source, and the inputs before it; the last input caused the error."""

    error: str
    place: str
    trace: str
    history: tuple[object, ...]

    def __str__(self) -> str:
        inputs = (f"  {entry}" for entry in self.history[-_SHOWN_INPUTS:])
        return "\n".join([f"{self.error}  [{self.place}]", *inputs, self.trace])


class Findings:
    """Collection that keeps the first finding of each place."""

    def __init__(self) -> None:
        self._by_place: dict[str, Finding] = {}

    @property
    def all(self) -> list[Finding]:
        """The findings in the order of their occurrence."""
        return list(self._by_place.values())

    def add(self, error: Exception, history: Sequence[object]) -> None:
        """Add a finding, unless there is already one for the same place and kind of error."""
        frames = traceback.extract_tb(error.__traceback__)
        inner = [frame for frame in frames if "emulated_kernel" in frame.filename] or list(frames)
        place = f"{os.path.basename(inner[-1].filename)}:{inner[-1].lineno}"
        # One check raises different violations, so the start of the message distinguishes them.
        title = f"{type(error).__name__} {place} {str(error)[:40] if isinstance(error, Violation) else ''}"
        if title not in self._by_place:
            shown = f"{type(error).__name__}: {str(error)[:600]}"
            trace = "".join(traceback.format_list(frames[-_SHOWN_FRAMES:]))
            self._by_place[title] = Finding(shown, place, trace, tuple(history))
