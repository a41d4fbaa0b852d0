"""Area of instances: their names, their files, and their isolation from the top-level trace array."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import EVENTS, QUIET
from stress.differential.rules import text
from stress.differential.steps import Area, Case, Step, append, read, truncate, write

_HERE = "instances/here"


def _inside(dice: Random) -> list[Step]:
    match dice.randrange(8):
        case 0:
            return [
                write(f"{_HERE}/events/k/base/enable", "1"),
                write("/scratch/file", "some\0"),
                read(f"{_HERE}/trace"),
                read("trace"),
            ]
        case 1:
            return [
                write(f"{_HERE}/trace_marker", text(dice, "marker")),
                read(f"{_HERE}/trace"),
                read("trace"),
            ]
        case 2:
            return [
                write(f"{_HERE}/events/k/base/filter", text(dice, "filter")),
                read(f"{_HERE}/events/k/base/filter"),
                read("events/k/base/filter"),
                read(f"{_HERE}/error_log"),
                read("error_log"),
            ]
        case 3:
            return [
                write(f"{_HERE}/events/k/base/trigger", text(dice, "trigger")),
                read(f"{_HERE}/events/k/base/trigger"),
                read(f"{_HERE}/error_log"),
            ]
        case 4:
            return [
                write(f"{_HERE}/set_event", text(dice, "set_event")),
                read(f"{_HERE}/set_event"),
                read("set_event"),
            ]
        case 5:
            return [
                write(f"{_HERE}/trace_options", text(dice, "option")),
                read(f"{_HERE}/trace_options"),
                read("trace_options"),
            ]
        case 6:
            return [
                append("kprobe_events", "p:k/later vfs_mkdir"),
                Step("list", f"{_HERE}/events/k"),
                Step("rmdir", _HERE),
                Step("list", "instances"),
            ]
        case _:
            setting = dice.choice(
                ("tracing_on", "buffer_size_kb", "set_event_pid", "trace_clock", "current_tracer")
            )
            value = dice.choice(
                {
                    "tracing_on": ("0", "1", "x"),
                    "buffer_size_kb": ("8", "16", "0"),
                    "set_event_pid": ("1", "1 2", "x"),
                    "trace_clock": ("global", "mono", "x"),
                    "current_tracer": ("function", "nop", "function_graph"),
                }[setting]
            )
            return [write(f"{_HERE}/{setting}", value), read(f"{_HERE}/{setting}"), read(setting)]


def _case(dice: Random, _number: int) -> Case:
    name = text(dice, "directory").replace("/", "").replace("\0", "") or "one"
    if name in (".", ".."):
        name = "one"
    steps = [
        Step("mkdir", f"instances/{name}"),
        Step("list", "instances"),
        Step("mkdir", f"instances/{name}"),
        Step("rmdir", f"instances/{name}"),
        Step("rmdir", f"instances/{name}"),
    ]
    if dice.random() < 0.8:
        steps = [Step("mkdir", _HERE)]
        for _ in range(dice.choice((1, 2, 3))):
            steps += _inside(dice)
        steps += [
            write(f"{_HERE}/events/enable", "0"),
            Step("untrigger", f"{_HERE}/events/k/base/trigger"),
            Step("rmdir", _HERE),
        ]
    return steps


AREA = Area(
    "instances", _case, prepare=(Step("create", "/scratch/file"),),
    reset=(truncate("set_event"), truncate("dynamic_events"), *EVENTS, *QUIET),
)  # fmt: skip
