"""Area of event probes: values fetched from the entries of other events, and the order of all entries."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import KNOWN, PROBED, QUIET
from stress.differential.steps import Area, Case, Step, append, read, truncate, write

_EVENTS: Case = (
    append("kprobe_events", "p:k/base vfs_write n=%dx:u32 t=+0(%si):ustring"),
    append("synthetic_events", "syn u32 n; char[] d"),
    write("events/k/base/trigger", "hist:keys=common_pid:a=n,e=t:onchange($a).trace(syn,$a,$e)"),
)
_NUMBERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "x8", "x16", "x32", "b4@1/8", "b7@3/32")
_COMMON = ("$comm:string", "$COMM:string", '\\"imm":string', "\\42:s16")
_FIELDS = {
    "synthetic.syn": (
        *("$n", "$n:<number>", "$d:string", "+0($d):string", "+1($d):string", "$d:ustring"),
        *("+0($d):ustring", "+<small>($d):u8", "+0($d):u16", "+0($d):x8", "+0($d):u8[<count>]"),
        *("+0($d):s8[2]", "+0($d):b4@2/8", "$d:string[2]", "+0($d):char", "$no"),
    ),
    "syscalls.sys_enter_write": (
        *("$count:<number>", "$count", "$buf:string", "$buf:ustring", "+0($buf):ustring", "+u0($buf):u8"),
        *("+u0($buf):string", "+u0($buf):u8[<count>]", "$__syscall_nr:<number>"),
    ),
    "syscalls.sys_exit_write": ("$ret", "$ret:<number>", "$__syscall_nr"),
    "raw_syscalls.sys_exit": ("$id:<number>", "$id"),
}
"""Event -> fetch arguments for event probes on it.

Each argument can be read at a hit. If an argument cannot be read, Linux leaves old data of the buffer in the
entry.
"""
_FILTERS = {
    "synthetic.syn": ("n > 5", 'd ~ "h*"', "n & 1", "common_pid == 4001", 'n != 5 && d != "x"'),
    "syscalls.sys_enter_write": ("count > 5", "count == 1", 'comm == "client"'),
    "syscalls.sys_exit_write": ("ret > 5", "ret != 1"),
    "raw_syscalls.sys_exit": ("id == 1", "ret > 2 && id == 1"),
}
_TEXTS = ("hello", "hello there", "other", "abcdefg", "half a line of text\n", "three")


def _argument(dice: Random, target: str, number: int) -> str:
    body = dice.choice(_FIELDS[target]) if dice.random() < 0.85 else dice.choice(_COMMON)
    body = body.replace("<number>", dice.choice(_NUMBERS)).replace("<small>", dice.choice("01"))
    body = body.replace("<count>", dice.choice("12"))
    return body if "=" in body or dice.random() < 0.2 else f"a{number}={body}"


def _case(dice: Random, _number: int) -> Case:
    targets = [dice.choice(list(_FIELDS)) for _ in range(dice.choice((1, 1, 2, 3)))]
    steps: list[Step] = []
    for number, target in enumerate(targets):
        words = " ".join(_argument(dice, target, index) for index in range(dice.choice((1, 2, 3, 4))))
        condition = f" if {dice.choice(_FILTERS[target])}" if dice.random() < 0.3 else ""
        steps.append(append("dynamic_events", f"e:ep/e{number} {target} {words}{condition}"))
        steps.append(read(f"events/ep/e{number}/format"))
        if dice.random() < 0.2:
            steps.append(write(f"events/ep/e{number}/filter", "common_pid == 4001"))
    sources = [f"events/{target.replace('.', '/')}" for target in dict.fromkeys(targets)]
    for target, source in zip(dict.fromkeys(targets), sources, strict=True):
        if dice.random() < 0.3:
            steps.append(write(f"{source}/filter", dice.choice(_FILTERS[target])))
        if dice.random() < 0.5 and target != "raw_syscalls.sys_exit":
            steps.append(write(f"{source}/enable", "1"))
    steps += [read("error_log"), read("dynamic_events"), write("events/ep/enable", "1")]
    steps += [read(f"{source}/enable") for source in sources]
    steps += [write("/scratch/file", dice.choice(_TEXTS) + "\0") for _ in range(dice.choice((1, 2, 3)))]
    steps += [write("tracing_on", "0"), write("events/ep/enable", "0")]
    steps += [write(f"{source}/filter", "0") for source in sources]
    return [*steps, read("trace")]


AREA = Area(
    "eprobes",
    _case,
    prepare=(
        *KNOWN,
        *_EVENTS,
        Step("create", "/scratch/file"),
        write("events/k/base/enable", "1"),
    ),
    reset=(
        truncate("set_event"),
        Step("untrigger", "events/k/base/trigger"),
        truncate("dynamic_events"),
        *PROBED,
        *_EVENTS,
        *QUIET,
    ),
)
