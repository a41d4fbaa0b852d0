"""kprobefs's answers to a sample of random cases are the answers of a distribution's kernel."""

from __future__ import annotations

import pytest

from stress.differential import sides
from stress.differential.areas import AREAS
from stress.differential.compare import ResetError, Tally, answers_of, prepared
from stress.differential.normal import Normal
from stress.differential.recorded import Recorded, Sample
from stress.differential.steps import read

FEWEST = 15
"""Least number of answers that an area must have."""


@pytest.fixture(scope="module")
def sample() -> Sample:
    return Sample.load()


@pytest.mark.usefixtures("objects_excluded")
@pytest.mark.parametrize("name", AREAS)
def test_answers(sample: Sample, name: str) -> None:
    area, tally, normal = AREAS[name], Tally(), Normal(sample.events)
    side = prepared(sides.ours(), area)
    for number, (case, linux) in enumerate(sample.cases(name)):
        try:
            ours = answers_of(side, normal, area, case)
        except ResetError:
            side.close()
            side = prepared(sides.ours(), area)
            ours = answers_of(side, normal, area, case)
        tally.add(name, number, case, linux, ours)
    side.close()
    assert not tally.differences, "\n".join(map(str, tally.differences[:5]))
    assert tally.answers >= FEWEST
    assert any(answer for _, answers in sample.cases(name) for answer in answers)


def test_a_difference_is_seen(sample: Sample) -> None:
    """If the recorded answer of a case is changed, the case is counted as differing, and the report names the
    steps and the answer.
    """
    area, tally, normal = AREAS["settings"], Tally(), Normal(sample.events)
    side = prepared(sides.ours(), area)
    case = [read("tracing_on"), read("buffer_percent")]
    changed = Recorded(case, ["1\n", "51\n"])
    assert not tally.add(area.name, 0, changed.case, changed.answers, answers_of(side, normal, area, case))
    side.close()
    assert (tally.answers, tally.differing, tally.differences[0].steps) == (2, 1, case)
    assert "O 50" in str(tally.differences[0])


def test_cases_are_made_again(sample: Sample) -> None:
    """The same seed gives the same cases, however many are made. Another seed gives other cases."""
    for area in AREAS.values():
        first = list(area.cases(5, 4))
        assert list(area.cases(5, 2)) == first[:2] != list(area.cases(6, 2))
        assert len(list(sample.cases(area.name))) > 4
