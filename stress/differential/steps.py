"""Steps and cases: accesses to files of tracefs, and a client's accesses to other files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class Step(NamedTuple):
    """One access; the path is relative to tracing/, or to the root of the mount if it begins with a slash."""

    verb: str
    """Kind of the access, such as `read` or `append`; the kinds are the keys of sides.VERBS."""
    path: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.path}" + (f" {self.text!r}" if self.text else "")


Case = Sequence[Step]


@dataclass(frozen=True)
class Area:
    """A part of tracefs, with a generator of its cases."""

    name: str
    case: Callable[[Random, int], Case]
    """Function that returns a case for a random generator and the case's number."""
    prepare: Case = ()
    """Steps that are executed once after the start of a kernel."""
    reset: Case = ()
    """Steps before each case, which must succeed in both kernels."""

    def cases(self, seed: int, count: int) -> Iterator[Case]:
        """Yield the first `count` cases of a seed.

        Each case has its own random generator, so that it does not depend on the cases before it.
        """
        for number in range(count):
            yield self.case(Random(f"{self.name} {seed} {number}"), number)


def write(path: str, text: str) -> Step:
    """Return a step that opens a file and writes a text."""
    return Step("write", path, text)


def append(path: str, text: str) -> Step:
    """Return a step that writes a text as a shell's `>>` does."""
    return Step("append", path, text)


def truncate(path: str, text: str = "") -> Step:
    """Return a step that truncates a file and writes a text as a shell's `>` does."""
    return Step("truncate", path, text)


def read(path: str) -> Step:
    """Return a step that reads a whole file."""
    return Step("read", path)
