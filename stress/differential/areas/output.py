"""Area of the trace file under options and clocks: markers, raw markers, and records of probes."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import BASE, EVENTS, KNOWN, OTHER, QUIET, SLEPT
from stress.differential.rules import text
from stress.differential.steps import Area, Case, Step, read, write

_OPTIONS = {
    "raw": False, "hex": False, "bin": False, "verbose": False, "sym-offset": False, "sym-addr": False,
        "context-info": True,
    "irq-info": True, "latency-format": False, "record-cmd": True, "record-tgid": False,
        "print-parent": True, "annotate": True,
    "printk-msg-only": False, "overwrite": True, "markers": True,
}  # fmt: skip
_CLOCKS = ("local", "local", "local", "global", "counter", "mono", "x86-tsc")
_EVENTS = (
    BASE,
    OTHER,
    "events/syscalls/sys_enter_write",
    "events/syscalls/sys_exit_write",
    "events/syscalls/sys_enter_read",
)


def _case(dice: Random, _number: int) -> Case:
    chosen = dice.sample([*_OPTIONS], dice.choice((0, 1, 1, 2, 3)))
    steps: list[Step] = []
    events = dice.sample(_EVENTS, dice.choice((0, 1, 1, 2)))
    steps += [
        write("trace_clock", dice.choice(_CLOCKS)),
        *(write(f"{event}/enable", "1") for event in events),
    ]
    options = [write(f"options/{name}", f"{not _OPTIONS[name]:d}") for name in chosen]
    # Linux saves a task's name at the task switch after a record, the built-in kernel with the record. The
    # kernels differ if the options for that are switched before the records.
    is_early = dice.random() < 0.3 and not {"record-cmd", "record-tgid"} & set(chosen)
    steps += options if is_early else []
    for _ in range(dice.choice((1, 2, 3))):
        if dice.random() < 0.5:
            steps.append(write("trace_marker", text(dice, "marker")))
        elif dice.random() < 0.4:
            steps.append(write("trace_marker_raw", text(dice, "raw")))
        else:
            steps.append(write("/scratch/file", text(dice, "marker").replace("\0", "") + "\0"))
    steps += [write("tracing_on", "0"), *(write(f"{event}/enable", "0") for event in events)]
    steps += [] if is_early else [*(SLEPT if "record-tgid" in chosen else ()), *options]
    return [*steps, read("trace")]


AREA = Area(
    "output", _case, prepare=(*EVENTS, *KNOWN, Step("create", "/scratch/file")),
    reset=(*(write(f"options/{name}", f"{on:d}") for name, on in _OPTIONS.items()), write("trace_clock",
        "local"),
           *(write(f"{event}/enable", "0") for event in _EVENTS), *QUIET),
)  # fmt: skip
