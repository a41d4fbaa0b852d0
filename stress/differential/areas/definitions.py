"""Area of definitions of dynamic events: errnos, error_log, and the files that list events."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import EVENTS, NO_EVENTS
from stress.differential.rules import text
from stress.differential.steps import Area, Case, Step, append, read, truncate, write

_KINDS = {
    "kprobe_events": ("kprobe", "kprobe", "kprobe", "kprobe", "delete"),
    "dynamic_events": ("kprobe", "uprobe", "eprobe", "eprobe", "delete", "s_synthetic"),
    "synthetic_events": ("synthetic", "synthetic", "synthetic", "n_synthetic"),
    "uprobe_events": ("uprobe", "uprobe", "uprobe", "delete"),
}


def _line(dice: Random, rule: str) -> str:
    if rule == "s_synthetic":
        return "s:" + text(dice, "synthetic")
    if rule == "n_synthetic":
        return "!" + text(dice, "synthetic")
    return text(dice, rule)


def _case(dice: Random, _number: int) -> Case:
    path = dice.choice(list(_KINDS))
    steps: list[Step] = [*EVENTS] if dice.random() < 0.5 and path != "uprobe_events" else []
    for _ in range(dice.choice((1, 1, 2, 3))):
        lines = [_line(dice, dice.choice(_KINDS[path])) for _ in range(dice.choice((1, 1, 1, 1, 2, 3)))]
        steps.append(append(path, "\n".join(lines) + dice.choice(("", "\n"))))
        steps += [read("error_log"), read("dynamic_events")]
        if dice.random() < 0.7:
            steps.append(truncate("error_log"))
    if dice.random() < 0.2:
        steps += [read("kprobe_events"), read("uprobe_events"), read("synthetic_events")]
    if dice.random() < 0.1:
        steps += [
            write("events/kprobes/enable", "1"),
            truncate("kprobe_events"),
            write("events/kprobes/enable", "0"),
        ]
    return steps


AREA = Area("definitions", _case, reset=NO_EVENTS)
