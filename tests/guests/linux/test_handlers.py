"""Compiled handlers in Debian's kernel make the same records as handlers in Python, and time never
goes back.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux import debian_kernel
from tests.oracle.inside.mount_files import CLIENT, read, write

DEFINITIONS = (
    "p:called vfs_write count=$arg3 task=$comm",
    "p:begun shmem_write_begin at=%dx:x32 first=+0(+0(%si)):x64",
    "p:within shmem_write_end+5 copied=%r8:u32",
    # In an interrupt.
    "p:tick update_process_times user=%di:u8",
    # Nested calls: one is hooked by ftrace, and one without a fentry site by a breakpoint.
    "r:returned vfs_write size=$retval:s64 first=+0($stack):x64",
    "r:ended shmem_write_end copied=$retval",
    # A task that goes on after others have run.
    "r:slept schedule task=$comm",
    # Python handles this probe, because it asks for symbols.
    "p:named ksys_write caller=+0($stack):symstr",
)
EVENT = re.compile(r"^ *(\S+)-\d+ +\[000\] (\S+) +(\d+\.\d{6}): (\w+): (.*)")


@cache
def recorded(*, compiled: bool) -> tuple[LinuxEngine, list[tuple[Any, ...]], Counter[int]]:
    """Run a workload twice; return the engine, its records, and the hits in Python of the second run."""
    # Without the optimizer: the time when a breakpoint becomes a jump would differ between the runs.
    profile = replace(PROFILES[DEFAULT], compiled=compiled, optimizer=False)
    engine = LinuxEngine(*debian_kernel.with_kernel(), profile)
    # Calls on control files would be hits, too, and their duration depends on the host.
    mount = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False, keeps_tracefs=True)
    for definition in DEFINITIONS:
        assert not write(mount, "/kprobe_events", definition, os.O_APPEND), definition
    assert not write(mount, "/tracing/events/kprobes/enable", "1")
    workload(engine, mount)
    taken: Counter[int] = Counter()
    breakpoints = engine.machine.breakpoints
    for address, handler in [*breakpoints.items()]:
        breakpoints[address] = counting(address, handler, taken)
    workload(engine, mount)
    lines = read(mount, "/tracing/trace").splitlines()
    return engine, [match.groups() for line in lines if (match := EVENT.match(line))], taken


def counting(address: int, handler: Callable[[Any], object], taken: Counter[int]) -> Callable[[Any], object]:
    def count(regs: Any) -> object:
        taken[address] += 1
        return handler(regs)

    return count


def workload(engine: LinuxEngine, mount: Mount) -> None:
    handle = mount.create(CLIENT, "/scratch/file", 0o600, os.O_RDWR)
    for size in range(1, 40):
        mount.write(CLIENT, handle, bytes(size), 0)
    mount.release(handle)
    engine.tasks.idle(20_000)


def test_records_are_those_that_python_makes() -> None:
    engine, records, _ = recorded(compiled=True)
    _, expected, _ = recorded(compiled=False)
    assert engine.kprobes.compiler.made >= 4
    without_time = [(task, flags, *rest) for task, flags, _, *rest in records]
    assert without_time == [(task, flags, *rest) for task, flags, _, *rest in expected]
    names = {record[3] for record in records}
    assert names >= {"called", "begun", "within", "named", "tick", "returned", "ended", "slept"}
    assert any("h" in record[1] for record in records)


def test_hits_stay_in_the_guest() -> None:
    engine, records, taken = recorded(compiled=True)
    in_python, _, by_python = recorded(compiled=False)
    assert len(records) > 200
    # These traps were taken in the first run, in which handlers were not yet wrapped.
    hooks = engine.machine.hooks
    assert hooks.native_traps > 50 or not hooks.is_native
    assert in_python.machine.hooks.native_traps < hooks.native_traps / 2 or not hooks.is_native
    # These are the trampoline of fentry sites and the return trampoline.
    for trampoline, trapped in by_python.most_common(2):
        assert trapped > 70
        assert taken[trampoline] < 3


def test_time_never_goes_back() -> None:
    """The times of records never decrease, also if guest code reads the clock after Python, or Python after
    guest code.
    """
    for compiled in (True, False):
        _, records, _ = recorded(compiled=compiled)
        times = [float(record[2]) for record in records]
        assert times == sorted(times)
        assert len(set(times)) > len(times) // 6
