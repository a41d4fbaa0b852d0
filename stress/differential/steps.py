"""What a case is made of: accesses to files of tracefs, and things that a client does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class Step(NamedTuple):
    """One thing to do; a path is below tracing/, or from the mount's root on where it begins with a slash."""

    verb: str
    """One of sides.VERBS."""
    path: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.path}" + (f" {self.text!r}" if self.text else "")


Case = Sequence[Step]


@dataclass(frozen=True)
class Area:
    """A part of tracefs, with its cases."""

    name: str
    case: Callable[[Random, int], Case]
    """The case of that number; what of it is random is the dice's."""
    prepare: Case = ()
    """Done once, behind the start."""
    reset: Case = ()
    """Done before each case; must succeed in both kernels."""

    def cases(self, seed: int, count: int) -> Iterator[Case]:
        """The first so many of a seed; each has dice of its own, so that any can be made alone."""
        for number in range(count):
            yield self.case(Random(f"{self.name} {seed} {number}"), number)


def write(path: str, text: str) -> Step:
    """One write(2)."""
    return Step("write", path, text)


def append(path: str, text: str) -> Step:
    """One write(2), of a shell's `>>`."""
    return Step("append", path, text)


def truncate(path: str, text: str = "") -> Step:
    """A shell's `>`."""
    return Step("truncate", path, text)


def read(path: str) -> Step:
    """The whole file."""
    return Step("read", path)
