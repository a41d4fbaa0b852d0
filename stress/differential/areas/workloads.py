"""Area of workloads: a client's accesses to its own files, recorded by probes and system call events."""

from __future__ import annotations

from random import Random

from stress.differential.areas.common import KNOWN, NO_EVENTS, PROBED, QUIET
from stress.differential.steps import Area, Case, Step, append, read, write

_PROBES = (
    "p:k/w vfs_write n=%dx:u64 t=+0(%si):ustring", "r:k/wr vfs_write v=$retval:s64",
        "p:k/r vfs_read n=%dx:u32", "r:k/rr vfs_read v=$retval",
    "p:k/o do_sys_openat2 f=+0(%si):ustring d=%di:s32", "p:k/m do_mkdirat f=+0(+0(%si)):string m=%dx:x16",
        "r:k/mr vfs_mkdir v=$retval:s32",
    "p:k/u vfs_unlink c=$comm", "r:k/ur vfs_unlink v=$retval", "p:k/n vfs_rename",
        "r5:k/rm vfs_rmdir $comm:string v=$retval:s8",
    "p:k/k ksys_write n=%dx fd=%di:s32 c=$comm",
        "r:k/kr ksys_read v=$retval:s32 w=$retval:u8 x=$retval:x16",
        "p:k/i vfs_write a=\\42:u8 b=\\\"imm\":string",
)  # fmt: skip
_SYSCALLS = (
    "sys_enter_write",
    "sys_exit_write",
    "sys_exit_read",
    "sys_exit_openat",
    "sys_exit_close",
)


def activity(dice: Random, number: int) -> list[Step]:
    """Return the steps of a random access of the client to its own files, whose names contain `number`."""
    name = f"/scratch/w{number}"
    match dice.randrange(5):
        case 0:
            return [Step("create", name, "text" * dice.randrange(9) + "\0"), read(name), Step("unlink", name)]
        case 1:
            return [Step("mkdir", name), Step("mkdir", name), Step("rmdir", name), Step("rmdir", name)]
        case 2:
            return [Step("create", name, "x\0"), Step("rename", name, f"{name}b"), Step("unlink", f"{name}b")]
        case 3:
            return [
                read(f"{name}none"),
                Step("create", name, "some\nlines\n\0"),
                write(name, "other\0"),
                read(name),
                Step("unlink", name),
            ]
        case _:
            return [write("trace_marker", f"mark {number}\0")]


def _case(dice: Random, number: int) -> Case:
    probes = dice.sample(_PROBES, dice.choice((1, 2, 3, 4)))
    calls = dice.sample(_SYSCALLS, dice.choice((0, 0, 1, 2)))
    steps: list[Step] = [append("kprobe_events", probe) for probe in probes]
    steps += [
        write("events/k/enable", "1"),
        *(write(f"events/syscalls/{call}/enable", "1") for call in calls),
    ]
    steps += activity(dice, number)
    if dice.random() < 0.5:
        steps += activity(dice, number)
    steps += [write("tracing_on", "0"), write("events/k/enable", "0"), read("kprobe_profile")]
    return [*steps, *(write(f"events/syscalls/{call}/enable", "0") for call in calls), read("trace")]


AREA = Area("workloads", _case, KNOWN, (*NO_EVENTS, *PROBED, *QUIET))
