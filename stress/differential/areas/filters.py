"""Area of event filters: errnos, the text of the file after a write, and the hits that pass."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import BASE, EVENTS, KNOWN, OTHER, QUIET
from stress.differential.rules import text
from stress.differential.steps import Area, Case, Step, read, write

_WORDS = ("hello", "a", "a longer text of more than thirty bytes", "x", "client", "abc")


def _case(dice: Random, number: int) -> Case:
    event = dice.choice((BASE, BASE, BASE, OTHER))
    steps: list[Step] = []
    for _ in range(dice.choice((1, 2))):
        steps += [write(f"{event}/filter", text(dice, "filter")), read(f"{event}/filter")]
    steps.append(read("error_log"))
    if number % 2:
        steps.append(write(f"{event}/enable", "1"))
        steps += [
            write("/scratch/file", dice.choice(_WORDS) * dice.choice((1, 1, 9)) + "\0") for _ in range(3)
        ]
        steps += [write(f"{event}/enable", "0"), read("trace")]
    return steps


AREA = Area(
    "filters",
    _case,
    prepare=(*KNOWN, *EVENTS, Step("create", "/scratch/file")),
    reset=(write(f"{BASE}/filter", "0"), write(f"{OTHER}/filter", "0"), *QUIET),
)
