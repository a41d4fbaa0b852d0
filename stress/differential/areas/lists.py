"""Area of set_event and the `enable` files: enabled events and their order."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import EVENTS, QUIET
from stress.differential.rules import text
from stress.differential.steps import Area, Case, Step, append, read, truncate, write

_SWITCHES = ("events/k/enable", "events/k/base/enable", "events/k/other/enable",
    "events/synthetic/enable", "events/sched/sched_switch/enable",
             "events/signal/signal_generate/enable", "events/syscalls/sys_enter_read/enable")  # fmt: skip


def _case(dice: Random, _number: int) -> Case:
    steps: list[Step] = []
    for _ in range(dice.choice((1, 2, 3))):
        if dice.random() < 0.6:
            steps.append(dice.choice((append, append, write, truncate))("set_event", text(dice, "set_event")))
        else:
            steps.append(write(dice.choice(_SWITCHES), text(dice, "switch_value")))
        steps += [read("set_event"), read(dice.choice(_SWITCHES))]
    if dice.random() < 0.1:
        steps += [
            append("kprobe_events", "p:k/zzz vfs_read"),
            append("kprobe_events", "p:a/aaa vfs_read"),
            read("available_events"),
        ]
    return steps


AREA = Area("lists", _case, reset=(truncate("set_event"), truncate("dynamic_events"), *EVENTS, *QUIET))
