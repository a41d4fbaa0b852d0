"""Comparison of the answers of a distribution's kernel and of the built-in kernel to the steps of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stress.differential.normal import Normal
from stress.differential.sides import Side
from stress.differential.steps import Area, Case, Step, read

_REFUSED = "E"


@dataclass(frozen=True)
class Difference:
    """The steps of a case up to the first one whose answers differ, and both answers."""

    area: str
    number: int
    steps: Sequence[Step]
    linux: str
    ours: str

    def __str__(self) -> str:
        """Return the steps up to the difference, and the lines that differ."""
        theirs, mine = self.linux.splitlines(), self.ours.splitlines()
        only = [f"  L {line[:300]}" for line in theirs if line not in mine]
        only += [f"  O {line[:300]}" for line in mine if line not in theirs]
        shown = only[:16] or [f"  L {self.linux[:400]!r}", f"  O {self.ours[:400]!r}"]
        return "\n".join((f"{self.area} {self.number}", *(f"    {step}" for step in self.steps), *shown))


@dataclass
class Tally:
    """Counts of an area's cases and answers. An answer is an errno or the text of a file."""

    cases: int = 0
    answers: int = 0
    refused: int = 0
    """Number of answers that are an errno of the distribution's kernel."""
    differing: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def agreement(self) -> float:
        """Percentage of the answers that agree."""
        return 100 * (self.answers - self.differing) / max(self.answers, 1)

    def add(self, area: str, number: int, case: Case, linux: Sequence[str], ours: Sequence[str]) -> bool:
        """Count one case, and return True if all answers agree.

        `linux`, `ours`: answers of the distribution's and of the built-in kernel to the steps of `case`.
        """
        self.cases += 1
        self.answers += len(case)
        self.refused += sum(answer[:1] == _REFUSED and answer.isupper() for answer in linux)
        unlike = [at for at, (theirs, mine) in enumerate(zip(linux, ours, strict=True)) if theirs != mine]
        self.differing += len(unlike)
        if unlike:
            at = unlike[0]
            self.differences.append(Difference(area, number, case[: at + 1], linux[at], ours[at]))
        return not unlike


class Kernels:
    """A distribution's kernel and the built-in kernel, which execute the same cases.

    Callers call start() again if a case may have left the kernels in different states.
    """

    def __init__(self, start_linux: Callable[[], Side], start_ours: Callable[[], Side]) -> None:
        self._starters = start_linux, start_ours
        self._sides: tuple[Side, Side] | None = None
        self.events: frozenset[str] = frozenset()
        self.normal = Normal(self.events)

    def start(self, area: Area) -> None:
        """Start both kernels, and prepare them for an area."""
        self.close()
        linux, ours = self._sides = self._starters[0](), self._starters[1]()
        if not self.events:
            listed = [set(side.do(read("available_events")).split()) for side in (linux, ours)]
            self.events = frozenset(listed[0] & listed[1])
            self.normal = Normal(self.events)
        for side in (linux, ours):
            prepared(side, area)

    def answers(self, area: Area, case: Case) -> tuple[list[str], list[str]]:
        """Run a case, and return the normalized answers of the distribution's and the built-in kernel."""
        assert self._sides is not None, "start() first"
        linux, ours = (answers_of(side, self.normal, area, case) for side in self._sides)
        return linux, ours

    def close(self) -> None:
        """Close both kernels, and free their memory."""
        for side in self._sides or ():
            side.close()
        self._sides = None


class ResetError(Exception):
    """Exception for a failed reset of an area: a case has left a kernel in an unexpected state."""


def prepared(side: Side, area: Area) -> Side:
    """Prepare a new kernel for an area's cases, and return it. Raises: ResetError."""
    for step in area.prepare:
        _must(side, step)
    return side


def answers_of(side: Side, normal: Normal, area: Area, case: Case) -> list[str]:
    """Reset a kernel, run a case on it, and return its normalized answers. Raises: ResetError."""
    for step in area.reset:
        _must(side, step)
    return [normal.text(step.path, answer) for step, answer in zip(case, side.run(case), strict=True)]


def _must(side: Side, step: Step) -> None:
    if answer := side.do(step):
        raise ResetError(f"{step}: {answer[:300]}")


def static_formats(events: frozenset[str]) -> Iterator[Case]:
    """Yield a case for the format of each static event that both kernels have."""
    for event in sorted(events):
        yield [read(f"events/{event.replace(':', '/')}/format")]


def compare(
    kernels: Kernels, area: Area, cases: Iterable[tuple[int, Case]], progress: Callable[[Tally], None]
) -> Iterator[tuple[Case, list[str]]]:
    """Run numbered cases on started kernels; yield each case with the distribution's kernel's answers.

    `progress` is called after each case.
    """
    tally = Tally()
    for number, case in cases:
        try:
            linux, ours = kernels.answers(area, case)
        except ResetError:
            kernels.start(area)
            linux, ours = kernels.answers(area, case)
        if not tally.add(area.name, number, case, linux, ours):
            kernels.start(area)
        progress(tally)
        yield case, linux
    kernels.close()
