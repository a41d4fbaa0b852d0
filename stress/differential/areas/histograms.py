"""Areas of histograms: definitions with their errors, and the counts of accepted histograms."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import BASE, EVENTS, OTHER, QUIET
from stress.differential.rules import text
from stress.differential.steps import Area, Case, Step, read, truncate, write

_TRIGGER = f"{BASE}/trigger"
_FIELDS = (
    "n",
    "s",
    "x",
    "l",
    "c",
    "t",
    "common_pid",
    "n.hex",
    "n.log2",
    "n.buckets=10",
    "s.hex",
    "l.log2",
    "common_pid.execname",
    "cpu",
)
_VALUES = (
    "hitcount",
    "n",
    "s",
    "n,s",
    "hitcount,n",
    "n.hex",
    "l",
    "v=n+s:vals=$v",
    "n-l",
    "n*2",
    "x/3",
    "-n",
    "n+s*2",
)
_RESET: Case = (
    *(Step("untrigger", f"{event}/trigger") for event in (OTHER, BASE)), truncate("set_event"), *QUIET,
)  # fmt: skip
_PREPARE: Case = (*EVENTS, Step("create", "/scratch/file"))


def _defined(dice: Random, _number: int) -> Case:
    steps: list[Step] = []
    for _ in range(dice.choice((1, 2, 2))):
        event = dice.choice((BASE, BASE, OTHER))
        words = text(dice, "hist") + text(dice, "if")
        steps += [write(f"{event}/trigger", words), read(f"{event}/trigger"), read("error_log")]
    return [*steps, read(f"{BASE}/hist")]


def _counted(dice: Random, _number: int) -> Case:
    keys = dice.sample(_FIELDS, dice.choice((1, 1, 2, 2, 3)))
    words = "hist:keys=" + ",".join(keys)
    if dice.random() < 0.6:
        value = dice.choice(_VALUES)
        words += f":{value}" if value.startswith("v=") else f":vals={value}"
    if dice.random() < 0.6:
        words += ":sort=" + ",".join(
            dice.choice(("hitcount", keys[0].partition(".")[0]))
            + dice.choice(("", ".descending", ".ascending"))
            for _ in range(dice.choice((1, 1, 2)))
        )
    words += dice.choice(("", "", ":size=256", ":pause"))
    words += dice.choice(
        ("", "", f" if n > {dice.randrange(40)}", f' if c == "client" && l < {dice.randrange(99)}')
    )
    steps = [write(_TRIGGER, words), read(_TRIGGER)]
    steps += [
        write("/scratch/file", "abcdefghij"[dice.randrange(9)] * dice.randrange(90) + "\0")
        for _ in range(dice.randrange(9))
    ]
    steps.append(read(f"{BASE}/hist"))
    if dice.random() < 0.3:
        steps += [
            write(_TRIGGER, words + dice.choice((":clear", ":continue", ":pause"))),
            write("/scratch/file", "more\0"),
        ]
        steps += [read(_TRIGGER), read(f"{BASE}/hist")]
    return [*steps, read("error_log")]


DEFINED = Area("histograms", _defined, _PREPARE, _RESET)
COUNTED = Area("counts", _counted, _PREPARE, _RESET)
