"""Compiled return probes in Debian's kernel: hooked calls return to their callers, and all are counted."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing import probe_engine
from emulated_kernel.guests.linux.probing.kernel_stacks import KernelStacks
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.profile import DEFAULT, PROFILES, Profile
from emulated_kernel.machine.instruction_count import InstructionCount
from emulated_kernel.vfs.core.node import Owner
from stress.linux.everywhere import ALWAYS
from tests.guests.linux.probing import engine, workload
from tests.guests.linux.stack_dumps import check_stack_dumps
from tests.oracle.inside.mount_files import read, write
from tests.sample import fewer

IN_PYTHON = replace(PROFILES[DEFAULT], compiled=False, optimizer=False)


def functions(engine: LinuxEngine, seed: int) -> list[str]:
    """Return the functions that the workload calls, and a random part of all traceable functions."""
    symbols = engine.kernel.kallsyms
    traced = [found.symbol.name for site in sorted(engine.kernel.mcount) if (found := symbols.lookup(site))]
    return list(dict.fromkeys((*ALWAYS, *random.Random(seed).sample(traced, fewer(1500, 5)))))


def hooked(profile: Profile, seed: int) -> tuple[list[object], dict[str, list[str]], LinuxEngine]:
    """Run the workload with return probes on the functions that functions() returns for `seed`.

    Return the answers, event -> [hits, misses], and the engine.
    """
    guest = engine(profile)
    mount = probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    for number, name in enumerate(functions(guest, seed)):
        write(mount, "/kprobe_events", f"r:hooked/r{number} {name} v=$retval", os.O_APPEND)
    assert not write(mount, "/tracing/events/hooked/enable", "1")
    with guest.lock:
        answers = workload(guest)
    rows = map(str.split, read(mount, "/kprobe_profile").splitlines())
    counts = {name: counts for name, *counts in rows}
    assert not write(mount, "/tracing/events/hooked/enable", "0")
    assert not write(mount, "/kprobe_events", "")
    assert not [
        line for line in read(mount, "/machine/dmesg").splitlines() if "WARN" in line or "BUG" in line
    ]
    with guest.lock:
        workload(guest)
    return answers, counts, guest


@pytest.mark.parametrize("seed", [1, 2])
def test_guest_code_takes_the_returns_that_python_takes(seed: int) -> None:
    with (unprobed := engine(IN_PYTHON)).lock:
        expected = workload(unprobed)
    answers, counts, guest = hooked(replace(IN_PYTHON, compiled=True), seed)
    assert guest.kprobes.compiler.made > len(ALWAYS)
    assert sum(int(hits) for hits, _ in counts.values()) > 500
    assert (answers, counts) == hooked(IN_PYTHON, seed)[:2]
    assert answers == expected


def test_nothing_is_left_where_a_task_has_its_calls() -> None:
    """The field `rethooks` of all tasks is empty after hooked tasks have ended, because the kernel's rethooks
    use this field.
    """
    guest = engine(PROFILES[DEFAULT])
    place = guest.kernel.btf.offset("task_struct.rethooks")
    mount = probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    # At least one of these functions never returns.
    for name in ("do_exit", "do_group_exit", "vfs_write"):
        assert not write(mount, "/kprobe_events", f"r:hooked/{name} {name}", os.O_APPEND)
    assert not write(mount, "/kprobe_events", "p:hooked/exits do_exit", os.O_APPEND)
    assert not write(mount, "/tracing/events/hooked/enable", "1")
    with guest.lock:
        for _ in range(3):
            workload(guest)
        # The kernel frees an ended task once no CPU uses the task.
        guest.tasks.idle(1_000_000)
    hits = {
        name: int(count) for name, count, _ in map(str.split, read(mount, "/kprobe_profile").splitlines())
    }
    assert (hits["exits"], hits["do_exit"]) == (3, 0)
    tasks, machine = guest.tasks, guest.machine
    stacks = KernelStacks(guest.kernel, tasks.machine, machine.memory, tasks.per_cpu, tasks.current_cell)
    structs = list(stacks.task_structs())
    assert len(structs) > 5
    assert not [struct for struct in structs if machine.memory.read_word(struct + place)]
    assert not [
        line for line in read(mount, "/machine/dmesg").splitlines() if "WARN" in line or "BUG" in line
    ]


def test_stack_dumps_show_the_callers_of_hooked_calls() -> None:
    guest = engine(PROFILES[DEFAULT])
    mount = probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    check_stack_dumps(mount, guest, ("show_stack", "show_trace_log_lvl"))


def test_a_return_by_the_kernels_text_takes_as_many_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A return takes the same number of instructions, whether its trampoline uses code in the kernel's text
    or not.

    The code in the text replaces one instruction of kprobefs's trampoline.
    """

    def instructions() -> int:
        guest = engine(PROFILES[DEFAULT])
        mount = probed_mount(guest, ProcessWatch(), Owner(0, 0), is_tracefs=False)
        for name in ("vfs_write", "ksys_write"):
            assert not write(mount, "/kprobe_events", f"r:hooked/{name} {name}", os.O_APPEND)
        assert not write(mount, "/tracing/events/hooked/enable", "1")
        counter = InstructionCount(guest.machine.engine)
        with guest.lock:
            workload(guest)
            before = counter.value
            workload(guest)
        assert guest.components.engine.hook_sets.first.trampoline.native
        return counter.value - before

    with_place = instructions()
    monkeypatch.setattr(probe_engine, "return_place", lambda _kernel, _arch: {})
    assert with_place == instructions()
