"""A recorded sample of cases, with answers of a distribution's kernel, for tests without such a kernel."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stress.differential.steps import Case, Step

SAMPLE = Path(__file__).with_name("sample.json.gz")


class Recorded(NamedTuple):
    """One case, and the normalized answers of the distribution's kernel to its steps."""

    case: Case
    answers: list[str]


class Sample:
    """Contents of a file of recorded cases."""

    def __init__(self, events: frozenset[str] = frozenset()) -> None:
        self.events = events
        """The static events that both kernels have, each as GROUP:EVENT."""
        self._areas: dict[str, list[Recorded]] = {}

    def add(self, area: str, case: Case, answers: list[str]) -> None:
        """Add a case with its answers to an area."""
        self._areas.setdefault(area, []).append(Recorded(case, answers))

    def forget(self, area: str) -> None:
        """Remove the cases of an area."""
        self._areas.pop(area, None)

    def cases(self, area: str) -> Iterator[Recorded]:
        """Yield the cases of an area, in the order in which they were added."""
        return iter(self._areas.get(area, ()))

    def save(self, path: Path = SAMPLE) -> None:
        """Write the file; its bytes depend only on the cases."""
        # An answer that occurs in many cases is written once.
        texts: dict[str, int] = {}
        areas = {
            name: [[_numbers(texts, [*each.case]), _answers(texts, each.answers)] for each in cases]
            for name, cases in self._areas.items()
        }
        whole = {"events": sorted(self.events), "areas": areas, "texts": [*texts]}
        data = json.dumps(whole, separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(data, 9, mtime=0))

    @classmethod
    def load(cls, path: Path = SAMPLE) -> Sample:
        """Read a file of recorded cases."""
        whole: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        texts = whole["texts"]
        sample = cls(frozenset(whole["events"]))
        for area, cases in whole["areas"].items():
            for steps, answers in cases:
                case = [Step(*(texts[number] for number in step)) for step in steps]
                sample.add(area, case, [texts[number] for number in answers])
        return sample


def _numbers(texts: dict[str, int], case: list[Step]) -> list[list[int]]:
    return [_answers(texts, [*step]) for step in case]


def _answers(texts: dict[str, int], words: list[str]) -> list[int]:
    return [texts.setdefault(word, len(texts)) for word in words]
