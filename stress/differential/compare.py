"""Runs cases on both kernels and tells where their answers differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stress.differential.normal import Normal
from stress.differential.sides import Side
from stress.differential.steps import Area, Case, Step, read

_REFUSED = "E"


@dataclass(frozen=True)
class Difference:
    """A case up to the first step whose answers differ, and these."""

    area: str
    number: int
    steps: Sequence[Step]
    linux: str
    ours: str

    def __str__(self) -> str:
        """The lines that differ, and the steps that led there."""
        theirs, mine = self.linux.splitlines(), self.ours.splitlines()
        only = [f"  L {line[:300]}" for line in theirs if line not in mine]
        only += [f"  O {line[:300]}" for line in mine if line not in theirs]
        shown = only[:16] or [f"  L {self.linux[:400]!r}", f"  O {self.ours[:400]!r}"]
        return "\n".join((f"{self.area} {self.number}", *(f"    {step}" for step in self.steps), *shown))


@dataclass
class Tally:
    """What of an area was compared; an answer is an errno, or what a file held."""

    cases: int = 0
    answers: int = 0
    refused: int = 0
    """Answers that are an errno."""
    differing: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def agreement(self) -> float:
        """In percent of the answers."""
        return 100 * (self.answers - self.differing) / max(self.answers, 1)

    def add(self, area: str, number: int, case: Case, linux: Sequence[str], ours: Sequence[str]) -> bool:
        """One case; whether all of it agrees."""
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
    """Both, started anew where a case may have left them apart."""

    def __init__(self, start_linux: Callable[[], Side], start_ours: Callable[[], Side]) -> None:
        self._starters = start_linux, start_ours
        self._sides: tuple[Side, Side] | None = None
        self.events: frozenset[str] = frozenset()
        self.normal = Normal(self.events)

    def start(self, area: Area) -> None:
        """Both new, and prepared."""
        self.close()
        linux, ours = self._sides = self._starters[0](), self._starters[1]()
        if not self.events:
            listed = [set(side.do(read("available_events")).split()) for side in (linux, ours)]
            self.events = frozenset(listed[0] & listed[1])
            self.normal = Normal(self.events)
        for side in (linux, ours):
            prepared(side, area)

    def answers(self, area: Area, case: Case) -> tuple[list[str], list[str]]:
        """What each says to each step, without what may differ."""
        assert self._sides is not None, "start() first"
        linux, ours = (answers_of(side, self.normal, area, case) for side in self._sides)
        return linux, ours

    def close(self) -> None:
        """Free both."""
        for side in self._sides or ():
            side.close()
        self._sides = None


class ResetError(Exception):
    """A case left a kernel in a state that the area's reset doesn't end."""


def prepared(side: Side, area: Area) -> Side:
    """A new kernel, ready for an area's cases. Raises: ResetError."""
    for step in area.prepare:
        _must(side, step)
    return side


def answers_of(side: Side, normal: Normal, area: Area, case: Case) -> list[str]:
    """What it says to each step, without what may differ. Raises: ResetError."""
    for step in area.reset:
        _must(side, step)
    return [normal.text(step.path, answer) for step, answer in zip(case, side.run(case), strict=True)]


def _must(side: Side, step: Step) -> None:
    if answer := side.do(step):
        raise ResetError(f"{step}: {answer[:300]}")


def static_formats(events: frozenset[str]) -> Iterator[Case]:
    """The formats of the static events that both have."""
    for event in sorted(events):
        yield [read(f"events/{event.replace(':', '/')}/format")]


def compare(
    kernels: Kernels, area: Area, cases: Iterable[tuple[int, Case]], progress: Callable[[Tally], None]
) -> Iterator[tuple[Case, list[str]]]:
    """Numbered cases on kernels that were started: each, and the reference's answers to it.

    `progress` is told of each.
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
