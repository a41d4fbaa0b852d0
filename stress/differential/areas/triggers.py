"""Area of triggers: errnos, the texts of the files, and the effects of triggers at hits."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import BASE, EVENTS, KNOWN, OTHER, QUIET
from stress.differential.rules import text
from stress.differential.steps import Area, Case, Step, read, truncate, write

_EVENTS = (BASE, BASE, BASE, OTHER, "events/sched/sched_process_fork")


def _case(dice: Random, number: int) -> Case:
    steps: list[Step] = []
    for _ in range(dice.choice((1, 1, 2, 3))):
        event = dice.choice(_EVENTS)
        steps += [
            write(f"{event}/trigger", text(dice, "trigger")),
            read(f"{event}/trigger"),
            read(f"{event}/enable"),
        ]
    steps.append(read("error_log"))
    if number % 2:
        steps.append(write(f"{BASE}/enable", "1"))
        steps += [write("/scratch/file", "hello" * dice.choice((1, 2, 30)) + "\0") for _ in range(2)]
        steps += [
            read("tracing_on"),
            read(f"{BASE}/enable"),
            read(f"{OTHER}/enable"),
            read(f"{BASE}/trigger"),
        ]
        steps += [write(f"{BASE}/enable", "0"), read("trace")]
    return steps


AREA = Area(
    "triggers",
    _case,
    prepare=(*KNOWN, *EVENTS, Step("create", "/scratch/file")),
    reset=(
        *(Step("untrigger", f"{event}/trigger") for event in dict.fromkeys(_EVENTS)),
        truncate("set_event"),
        *QUIET,
    ),
)
