"""Tracepoints of Debian's kernel as events of kprobefs: the records are those of the kernel's own tracefs."""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import suppress

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.initramfs import BUFFER
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.trace.events.static_event import StaticEvent
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux import debian_kernel
from tests.guests.linux.parts import guest_of
from tests.oracle.inside.mount_files import CLIENT, read, write
from tests.sample import share

EVENTS = (
    "task/task_newtask", "sched/sched_process_fork", "sched/sched_wakeup_new", "sched/sched_process_exit",
    "signal/signal_generate",
)  # fmt: skip
WHO_AND_WHEN = re.compile(r"^.*?-(?=\d+ )| +\d+\.\d{6}:")
"""Pattern of a record's task name and time. Linux saves the name of a task only at the next switch
of tasks.
"""
WHO = re.compile(r"^.*?-(?=\d+ )")
ID = re.compile(r"^ID: \d+$", re.MULTILINE)


@pytest.fixture(scope="module")
def engine() -> LinuxEngine:
    return LinuxEngine(*debian_kernel.with_kernel())


@pytest.fixture(scope="module")
def ours(engine: LinuxEngine) -> Iterator[Mount]:
    mount = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    yield mount
    mount.close()


@pytest.fixture(scope="module")
def linux() -> Iterator[Mount]:
    mount = debian_kernel.mount()
    yield mount
    mount.close()


def switch(mount: Mount, event: str, *, on: bool) -> None:
    assert not write(mount, f"/tracing/events/{event}/enable", str(int(on))), event


LISTED = ("available_filter_functions", "printk_formats")


@pytest.mark.parametrize("name", LISTED)
def test_lists_are_those_of_its_own_tracefs(name: str, linux: Mount, ours: Mount) -> None:
    assert read(ours, f"/tracing/{name}") == read(linux, f"/tracing/{name}")


def test_system_calls_that_have_events_are_its_own_tracefs_s(linux: Mount, ours: Mount) -> None:
    """Exactly the system calls that have events in the kernel's own tracefs have events in kprobefs's.

    sys_ni_syscall(), the call of unused numbers, has no events.
    """
    calls = [
        {name for name in read(mount, "/tracing/available_events").split() if name.startswith("syscalls:")}
        for mount in (ours, linux)
    ]
    assert calls[0] == calls[1]
    assert len(calls[0]) > 500


def test_sites_of_dropped_functions_are_nobody_s(linux: Mount, ours: Mount) -> None:
    """As in Linux, set_ftrace_filter selects ftrace sites of dropped functions by number, but not by name."""
    names = read(ours, "/tracing/available_filter_functions").splitlines()
    number = next(at for at, name in enumerate(names, 1) if name.startswith("__ftrace_invalid_address__"))
    found = []
    for mount in (ours, linux):
        shown = []
        for pattern in ("do_one_initcall", "sys_ni_syscall", "*initcall*", "__ftrace_invalid*", f"{number}"):
            refused = write(mount, "/tracing/set_ftrace_filter", f"{pattern}\n", os.O_TRUNC)
            shown.append((refused, read(mount, "/tracing/set_ftrace_filter")))
        write(mount, "/tracing/set_ftrace_filter", "", os.O_TRUNC)
        found.append(shown)
    assert found[0] == found[1]
    assert names.count("do_one_initcall") == 1


def families(tasks: LinuxTasks) -> None:
    child = tasks.fork(tasks.init, 4100)
    tasks.exit(tasks.fork(child, 4101))
    tasks.exit(child)


def recorded(mount: Mount, tasks: LinuxTasks) -> list[str]:
    """Return the records of tasks that are forked and end, without names and times."""
    write(mount, "/tracing/trace", "", os.O_TRUNC)
    for event in EVENTS:
        switch(mount, event, on=True)
    families(tasks)
    for event in EVENTS:
        switch(mount, event, on=False)
    lines = read(mount, "/tracing/trace").splitlines()
    return [WHO_AND_WHEN.sub("", line) for line in lines if re.search(r"\b410[01]\b", line)]


def test_records_are_those_of_its_own_tracefs(linux: Mount, ours: Mount, engine: LinuxEngine) -> None:
    """Records have the same fields, the same flags of interrupts and preemption, and the same order as in
    Linux.
    """
    found = recorded(ours, engine.tasks)
    assert found == recorded(linux, guest_of(linux).tasks)
    assert {line.split(": ")[0].split()[-1] for line in found} >= {
        event.split("/")[1] for event in EVENTS[:4]
    }


PROBES = "p:opens do_open_execat\nr:shares unshare_files $retval\np:made begin_new_exec"

MMAP = 9
ON_THE_WAY = "kprobes", "sched/sched_process_exec", "task/task_rename", "mmap/vm_unmapped_area"
ADDRESS = re.compile(r"0x7f[0-9a-f]+")


def executed(mount: Mount, tasks: LinuxTasks) -> list[str]:
    """Return the records of three execve() calls of a task, without times, with probes on functions of
    execve().
    """
    write(mount, "/tracing/trace", "", os.O_TRUNC)
    assert not write(mount, "/tracing/kprobe_events", PROBES)
    for event in ON_THE_WAY:
        switch(mount, event, on=True)
    task = tasks.fork(tasks.init, 4103)
    for number in range(3):
        guest_of(mount).clients._executions.execute(task, f"/usr/bin/program{number}", f"program{number}")
    tasks.call(task, MMAP, 0, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, (1 << 64) - 1, 0)
    tasks.exit(task)
    for event in ON_THE_WAY:
        switch(mount, event, on=False)
    lines = read(mount, "/tracing/trace").splitlines()
    assert not write(mount, "/tracing/kprobe_events", "", os.O_TRUNC)
    return [ADDRESS.sub("ADDRESS", WHO_AND_WHEN.sub("", line)) for line in lines if "-4103 " in line]


def test_executions_are_those_of_its_own_tracefs(linux: Mount, ours: Mount, engine: LinuxEngine) -> None:
    found = executed(ours, engine.tasks)
    assert found == executed(linux, guest_of(linux).tasks)
    assert [sum(f" {name}: " in line for line in found) for name in ("opens", "shares", "made")] == [3, 3, 3]
    assert [line.partition("filename=")[2] for line in found if "sched_process_exec" in line] == [
        f"/usr/bin/program{number} pid=4103 old_pid=4103" for number in range(3)
    ]
    areas = [line for line in found if " vm_unmapped_area: " in line]
    assert [line.partition(": ")[2].partition(" total_vm=0x")[0] for line in areas] == ["addr=ADDRESS err=0"]


def faults(mount: Mount, tasks: LinuxTasks) -> list[str]:
    """Return the records of page faults of a forked child that writes to its memory, without times."""
    write(mount, "/tracing/trace", "", os.O_TRUNC)
    switch(mount, "exceptions/page_fault_user", on=True)
    child = tasks.fork(tasks.init, 4200)
    tasks.copy_to_user(child, BUFFER, b"written")
    tasks.exit(child)
    switch(mount, "exceptions/page_fault_user", on=False)
    lines = read(mount, "/tracing/trace").splitlines()
    return [WHO_AND_WHEN.sub("", line) for line in lines if re.search(r"\b4200\b", line)]


def test_page_faults_are_those_of_its_own_tracefs(linux: Mount, ours: Mount, engine: LinuxEngine) -> None:
    """Records of page faults are those of the kernel's own tracefs.

    While such an event is on, the kernel handles page faults by another entry, which the event's regfunc
    switches on.
    """
    key = engine.kernel.kallsyms.lookup_name("trace_pagefault_key")
    assert key is not None
    found = faults(ours, engine.tasks)
    assert found == faults(linux, guest_of(linux).tasks)
    assert any(f"address={BUFFER:#x}" in line for line in found)
    # Both events are counted in the same key.
    assert not write(ours, "/tracing/events/exceptions/enable", "1")
    assert engine.machine.memory.read_u32(key) == 2
    assert not write(ours, "/tracing/events/exceptions/enable", "0")
    assert engine.machine.memory.read_u32(key) == 0


def test_a_regfunc_that_refuses(ours: Mount, engine: LinuxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the regfunc of an event fails, enabling the event fails with the same errno, and the event stays
    off.
    """
    monkeypatch.setattr(engine.kernel_calls, "call_at", lambda _address: (1 << 64) - errno.ENOMEM)
    event = "/tracing/events/mmap_lock/mmap_lock_released/enable"
    assert write(ours, event, "1") == "ENOMEM"
    assert read(ours, event) == "0\n"
    monkeypatch.undo()
    assert not write(ours, event, "1")
    families(engine.tasks)
    assert not write(ours, event, "0")
    assert "mmap_lock_released: mm=" in read(ours, "/tracing/trace")
    assert not engine.tasks.machine.death


def test_events_with_a_regfunc_that_nobody_can_call(ours: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host does not know the kernel's work queues, events with a regfunc are missing.

    All other events exist.
    """
    tasks, kernel = debian_kernel.with_kernel()

    def unknown(name: str) -> int:
        raise KernelError(errno.ENOENT, name)

    monkeypatch.setattr(kernel.btf, "constant", unknown)
    engine = LinuxEngine(tasks, kernel)
    with pytest.raises(KernelError) as refusal:
        _ = engine.kernel_calls
    assert refusal.value.errno == errno.ENOEXEC
    mount = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    listed, whole = (set(read(each, "/tracing/available_events").split()) for each in (mount, ours))
    mount.close()
    plain = {f"{event.system}:{event.name}" for event in kernel.events if event.is_plain}
    assert {"mmap_lock:mmap_lock_released", "exceptions:page_fault_user"} <= whole - listed
    assert not (whole - listed) & plain
    assert {"sched:sched_process_fork", "raw_syscalls:sys_enter", "syscalls:sys_enter_kill"} <= listed


SYSCALLS = ("sys_enter_getpid", "sys_exit_getpid", "sys_enter_kill", "sys_exit_kill", "sys_enter_getppid")
GETPID, KILL, GETPPID, GETUID = 39, 62, 110, 102


def calls(mount: Mount, tasks: LinuxTasks) -> list[str]:
    """Return the records of system calls of two tasks: one exists before the events are enabled, and one is
    forked later.
    """
    before = tasks.fork(tasks.init, 4200)
    write(mount, "/tracing/trace", "", os.O_TRUNC)
    for event in (*(f"syscalls/{name}" for name in SYSCALLS), "raw_syscalls/sys_enter"):
        switch(mount, event, on=True)
    child = tasks.fork(before, 4201)
    for task in (before, child):
        for number, *arguments in ((GETPID,), (KILL, 9_999_999, 5), (GETUID,), (GETPPID,)):
            with suppress(KernelError):
                tasks.call(task, number, *arguments)
    for event in (*(f"syscalls/{name}" for name in SYSCALLS), "raw_syscalls/sys_enter"):
        switch(mount, event, on=False)
    tasks.call(before, GETPID)
    tasks.exit(child)
    tasks.exit(before)
    lines = read(mount, "/tracing/trace").splitlines()
    return [re.sub(r" +\d+\.\d{6}:", "", line) for line in lines if re.search(r"-420[01]\b", line)]


def test_a_kernel_without_jump_labels_tests_a_variable(
    ours: Mount, engine: LinuxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel built without CONFIG_JUMP_LABEL enables a static event without a change of its text."""
    (event,) = [each for each in engine.kernel.events if each.name == "sched_stat_runtime"]
    labels = [label.code for label in engine.kernel.jump_labels if label.key == event.key]
    monkeypatch.setitem(vars(engine.kernel), "jump_labels", ())

    def state() -> tuple[int, list[bytes]]:
        memory = engine.machine.memory
        return int.from_bytes(memory.read(event.key, 4), "little"), [memory.read(at, 2) for at in labels]

    before = state()
    switch(ours, "sched/sched_stat_runtime", on=True)
    assert state() == (1, before[1])
    switch(ours, "sched/sched_stat_runtime", on=False)
    assert state() == before
    assert before[0] == 0


def test_system_calls_are_those_of_its_own_tracefs(linux: Mount, ours: Mount, engine: LinuxEngine) -> None:
    found = calls(ours, engine.tasks)
    assert [WHO.sub("", line) for line in found] == [
        WHO.sub("", line) for line in calls(linux, guest_of(linux).tasks)
    ]
    assert sum("sys_kill(pid: 98967f, sig: 5)" in line for line in found) == 2
    assert sum("sys_kill -> 0xfffffffffffffffd" in line for line in found) == 2
    assert sum("NR 102 (" in line for line in found) == 2
    again = calls(ours, engine.tasks)
    assert len(again) == len(found)


FOLLOWED = ("raw_syscalls", "sched/sched_switch", "sched/sched_waking", "sched/sched_process_exit")


OTHER_TASK = re.compile(r"comm=(?!init |swapper/0 )")
"""Pattern for a kernel thread in a record; its timers are due at different times in the two guests."""


def followed(mount: Mount, tasks: LinuxTasks, listed: str, first: int) -> list[str]:
    """Return the records of a task on a list of pids, of its child, and of the child's child.

    `listed`: name of the file with the list. The pids are `first` and the next two, and are shown as A, B and
    C. A pid must not be that of an earlier task, because the kernel takes the pid off the list when the
    earlier task is freed. If a kernel thread wakes up meanwhile, try again.
    """
    for start in range(first, first + 30, 3):
        lines = followed_once(mount, tasks, listed, start)
        if not any(OTHER_TASK.search(line) for line in lines):
            return lines
    raise AssertionError("kernel threads woke up in each of ten tries")


def followed_once(mount: Mount, tasks: LinuxTasks, listed: str, first: int) -> list[str]:
    """Return the lines of one try of followed(), including the lines of kernel threads."""
    pids = [str(first + number) for number in range(3)]
    parent = tasks.fork(tasks.init, first)
    write(mount, "/tracing/trace", "", os.O_TRUNC)
    write(mount, "/tracing/options/event-fork", "1")
    write(mount, f"/tracing/{listed}", pids[0])
    for event in FOLLOWED:
        switch(mount, event, on=True)
    child = tasks.fork(parent, first + 1)
    grandchild = tasks.fork(child, first + 2)
    for task in (parent, child, grandchild):
        tasks.call(task, GETUID)
    shown = read(mount, f"/tracing/{listed}").split()
    tasks.exit(grandchild)
    for event in FOLLOWED:
        switch(mount, event, on=False)
    write(mount, f"/tracing/{listed}", "", os.O_TRUNC)
    write(mount, "/tracing/options/event-fork", "0")
    tasks.exit(child)
    tasks.exit(parent)
    assert read(mount, "/tracing/set_event_pid").split() == []
    assert shown == pids
    lines = read(mount, "/tracing/trace").splitlines()
    own = [line for line in lines if re.search(rf"-(?:{'|'.join(pids)})\b", line)]
    names = dict(zip(pids, "ABC", strict=True))
    each = re.compile(rf"\b(?:{'|'.join(pids)})\b")
    return [each.sub(lambda pid: names[pid[0]], WHO_AND_WHEN.sub("", line)) for line in own]


def test_forks_are_followed_from_their_first_instruction_on(
    linux: Mount, ours: Mount, engine: LinuxEngine
) -> None:
    """If pids of children are followed, a forked task is on its parent's list of pids from its first
    instruction on.

    A task whose events are left out can still be seen when it wakes up another task.
    """
    for listed, calls_seen, first in (("set_event_notrace_pid", 0, 4300), ("set_event_pid", 3, 4400)):
        found = followed(ours, engine.tasks, listed, first)
        expected = followed(linux, guest_of(linux).tasks, listed, first)
        assert [WHO.sub("", line) for line in found] == expected
        assert sum("NR 102 (" in line for line in found) == calls_seen


def test_formats_are_those_of_its_own_tracefs(linux: Mount, ours: Mount) -> None:
    events = read(ours, "/tracing/available_events").split()
    assert len(events) > 250
    for event in share(events, 3, 8):
        path = f"/tracing/events/{event.replace(':', '/')}/format"
        assert ID.sub("", read(ours, path)) == ID.sub("", read(linux, path)), event


def test_print_formats_are_understood(engine: LinuxEngine) -> None:
    """All print formats are understood, except some that call unknown functions, of events of missing
    hardware.
    """
    events = [event for event in engine.components.tracing.system.events if isinstance(event, StaticEvent)]
    names = engine.components.tracing.system.symbols
    bare = set()
    for event in events:
        try:
            vars(StaticEvent)["_print"].func(event)
        except ValueError:
            bare.add(event.group)
            event.print_record(bytes(256), names)
    assert bare <= {"xen", "nvme", "intel_iommu", "ras"}
    assert len(events) > 600


def test_all_at_once(ours: Mount, engine: LinuxEngine) -> None:
    """After all events were on at once, the kernel works, its text is restored, and its log has no
    warning.
    """
    assert not write(ours, "/tracing/events/enable", "1")
    families(engine.tasks)
    engine.tasks.idle(20_000)
    assert not write(ours, "/tracing/events/enable", "0")
    lines = [line for line in read(ours, "/tracing/trace").splitlines() if not line.startswith("#")]
    names = {match[1] for line in lines if (match := re.search(r"\d+\.\d{6}: (\w+): ", line))}
    assert names > {"sched_switch", "sched_waking", "task_newtask", "timer_start", "kmem_cache_alloc"}
    assert not engine.machine.text.ledger
    assert not engine.tasks.machine.death
    log = LinuxSyscalls(engine.tasks).log().decode()
    assert "WARN" not in log
    assert "BUG" not in log


def test_filters_and_triggers_know_their_fields(ours: Mount, engine: LinuxEngine) -> None:
    event = "/tracing/events/sched/sched_process_exit"
    write(ours, "/tracing/trace", "", os.O_TRUNC)
    assert not write(ours, f"{event}/filter", "pid == 4101")
    assert not write(ours, f"{event}/trigger", "hist:keys=comm")
    switch(ours, "sched/sched_process_exit", on=True)
    families(engine.tasks)
    switch(ours, "sched/sched_process_exit", on=False)
    lines = [line for line in read(ours, "/tracing/trace").splitlines() if not line.startswith("#")]
    assert len(lines) == 1
    assert "pid=4101" in lines[0]
    assert "Hits: 2" in read(ours, f"{event}/hist")
    # Other tests use the mount, in any order.
    assert not write(ours, f"{event}/trigger", "!hist:keys=comm")
    assert not write(ours, f"{event}/filter", "0")


@pytest.mark.parametrize("function", ["trace_event_buffer_reserve", "trace_event_buffer_commit"])
def test_functions_that_we_take_over_arent_probed(engine: LinuxEngine, function: str) -> None:
    with engine.lock, pytest.raises(KernelError, match="blacklist") as refused:
        engine.kprobes.register_kprobe(Kprobe(symbol_name=function))
    assert refused.value.errno == errno.EINVAL


def test_the_deepest_stack(ours: Mount, engine: LinuxEngine) -> None:
    """The stack tracer shows the chain of callers from the system call on, and how much of the stack each
    caller uses.
    """
    assert not write(ours, "/tracing/stack_trace_filter", "vfs_* shmem_*")
    assert not write(ours, "/sysctl/kernel/stack_tracer_enabled", "1")
    handle = ours.create(CLIENT, "/scratch/deep", 0o600, os.O_RDWR)
    ours.write(CLIENT, handle, b"some", 0)
    ours.release(handle)
    assert not write(ours, "/sysctl/kernel/stack_tracer_enabled", "0")
    lines = [line.split() for line in read(ours, "/tracing/stack_trace").splitlines()[2:]]
    deepest = int(read(ours, "/tracing/stack_max_size"))
    assert 0 < deepest == int(lines[0][1])
    depths = [int(words[1]) for words in lines]
    assert depths == sorted(depths, reverse=True)
    assert sum(int(words[2]) for words in lines) == deepest
    assert {"do_syscall_64", "entry_SYSCALL_64_after_hwframe"} <= {words[3].split("+")[0] for words in lines}
    assert not engine.tasks.machine.death
