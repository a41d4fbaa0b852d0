"""Area of format files: static events that both kernels have, and dynamic events with random arguments."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import NO_EVENTS
from stress.differential.rules import text
from stress.differential.steps import Area, Case, Step, append, read


def _case(dice: Random, _number: int) -> Case:
    kind = dice.choice(("p", "r"))
    steps: list[Step] = []
    for name in ("one", "two"):
        arguments = [text(dice, "arg") for _ in range(dice.choice((0, 1, 1, 2, 4)))]
        steps += [
            append("kprobe_events", f"{kind}:k/{name} vfs_read {' '.join(arguments)}"),
            read(f"events/k/{name}/format"),
        ]
    steps += [
        append("synthetic_events", f"made {text(dice, 'fields')}"),
        read("events/synthetic/made/format"),
    ]
    steps += [append("dynamic_events", f"e:k/ep k/one {text(dice, 'earg')}"), read("events/k/ep/format")]
    return [*steps, Step("list", "events/k/one"), read("error_log")]


AREA = Area("formats", _case, reset=NO_EVENTS)
