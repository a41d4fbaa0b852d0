"""Random hist triggers, and the comparison of the answers to them."""

from __future__ import annotations

import os
import random
import re

from emulated_kernel.vfs.mount import Mount
from tests.oracle.inside.definitions import TIME
from tests.oracle.inside.mount_files import read, release_of, write
from tests.oracle.inside.tally import Tally, is_listed

ENTRIES = re.compile(r"^\{.*?(?=^\nTotals:)|^    .*\n", re.MULTILINE | re.DOTALL)
"""Pattern of a histogram's entries and its totals, which depend on the tasks that run meanwhile."""
HISTOGRAMS = (
    "keys=prev_pid",
    "keys=prev_pid:vals=next_prio",
    "keys=stacktrace",
    "keys=common_stacktrace",
    "keys=prev_pid,stacktrace",
    "keys=common_cpu",
    "keys=common_comm",
    "keys=comm",
    "keys=common_comm,prev_pid",
    "keys=prev_comm:vals=next_prio",
    "keys=prev_pid:vals=hitcount",
    "keys=prev_pid:vals=next_prio.percent",
    "keys=prev_pid:vals=next_prio.graph",
    "keys=nothing",
    "key=prev_pid.hex",
    "keys=prev_pid.execname",
    "keys=common_pid.execname",
    "vals=next_prio",
    "keys=prev_pid:x=next_prio",
    "keys=prev_pid:vals=nothing",
    "keys=prev_state.log2",
    "keys=prev_pid.buckets=10",
    "keys=prev_pid:s=common_stacktrace",
    "keys=prev_pid:s=stacktrace,t=$s",
    "keys=common_stacktrace.hex",
    "keys=STACKTRACE",
    "keys=common_stacktrace.stacktrace",
    "keys=prev_pid.stacktrace",
    "keys=prev_pid:vals=common_stacktrace",
    "keys=prev_pid:vals=stacktrace",
    "keys=common_stacktrace.log2",
    "keys=common_stacktrace,prev_comm,next_comm",
    "keys=common_stacktrace,stacktrace",
    "keys=prev_pid:s=common_stacktrace:onchange($s).save(next_comm,common_stacktrace)",
    "keys=prev_pid:s=common_stacktrace,p=prev_pid:onmax($p).trace(asked_chain,prev_pid,$s)",
    "keys=prev_pid:s=common_stacktrace,p=prev_pid:onmax($p).trace(asked_chain,$s,prev_pid)",
    "keys=prev_pid:p=prev_pid:onmax($p).trace(asked_chain,prev_pid,common_stacktrace)",
    "keys=prev_pid:p=prev_pid:onmax($p).trace(asked_chain,prev_pid,prev_state)",
    "keys=prev_pid:s=common_stacktrace+1",
    "keys=prev_pid:s=common_stacktrace,d=$s-1",
)
CHAIN_HISTOGRAMS = (
    "keys=stack", "keys=stack.stacktrace", "keys=pid,stack.stacktrace", "keys=pid.stacktrace",
    "keys=stack.hex", "keys=pid:vals=stack", "keys=pid:s=stack", "keys=pid:s=stack.stacktrace,t=$s",
    "keys=stack.stacktrace,common_stacktrace", "keys=stack,stack", "keys=stack.log2",
    "keys=pid:p=pid:onmax($p).save(stack)", "keys=pid:s=stack,p=pid:onmax($p).trace(asked_chain,pid,stack)",
    "keys=stack.execname", "keys=stack.sym", "keys=stack.sym-offset", "keys=stack.syscall",
    "keys=stack.buckets=2", "keys=stack.usecs",
)  # fmt: skip
ATTRIBUTES = (
    "", "", ":nohitcount", ":NOHC", ":sort=hitcount", ":sort=next_prio", ":size=256", ":size=1", ":pause",
    ":clear",
    ":name=x", ":nothing", ":nohitcount:nohitcount", ":sort=prev_pid.descending", ":vals=next_prio",
    ":sort=stacktrace", ":sort=common_stacktrace", " if prev_pid > 0", " if nothing",
    ":nohitcount if prev_pid==0",
)  # fmt: skip


def histogram(
    mount: Mount, command: str, path: str = "/tracing/events/sched/sched_switch"
) -> tuple[str, str, str, str]:
    """Set a hist trigger; return the errno, the trigger file, error_log and the hist file. Remove the trigger
    again.
    """
    write(mount, "/tracing/error_log", "", os.O_TRUNC)
    result = write(mount, f"{path}/trigger", command)
    log = TIME.sub("", read(mount, "/tracing/error_log"))
    # Linux 7.2 shows this key in a form that no trigger file accepts.
    shown = read(mount, f"{path}/trigger").replace("common_cpu" * 2, "common_cpu")
    counted = read(mount, f"{path}/hist").replace("common_cpu" * 2, "common_cpu")
    # A trigger that is shown with a wrong sort key is removed only by its own command.
    shown_commands = [re.sub(r" \[\w+\]$", "", line) for line in shown.splitlines() if line[0] != "#"]
    for each in (command, *shown_commands):
        write(mount, f"{path}/trigger", f"!{each}")
    return result, shown, log, ENTRIES.sub("", counted)


def compare_histograms(linux: Mount, ours: Mount, count: int, seed: int) -> Tally:
    """Compare both kernels' answers to random hist triggers. The counts of hits are not compared."""
    tally = Tally()
    if all(entry.name != "hist" for entry in linux.readdir("/tracing/events/sched/sched_switch")):
        print("the kernel was built without histograms")
        return tally
    dice, release = random.Random(seed), release_of(linux)
    for each in (linux, ours):
        write(each, "/tracing/synthetic_events", "asked_chain pid_t pid; unsigned long[] stack")
    for _ in range(count):
        command = f"hist:{dice.choice(HISTOGRAMS)}{dice.choice(ATTRIBUTES)}{dice.choice(ATTRIBUTES)}"
        theirs = histogram(linux, command)
        mine = histogram(ours, command)
        if not is_listed(release, command, theirs[2]):
            tally.add(command, theirs, mine, is_refused=bool(theirs[0]))
    for question in CHAIN_HISTOGRAMS:
        command = f"hist:{question}"
        path = "/tracing/events/synthetic/asked_chain"
        theirs = histogram(linux, command, path)
        mine = histogram(ours, command, path)
        if not is_listed(release, command, theirs[2]):
            tally.add(command, theirs, mine, is_refused=bool(theirs[0]))
    for each in (linux, ours):
        write(each, "/tracing/synthetic_events", "!asked_chain")
    return tally
