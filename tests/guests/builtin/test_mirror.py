"""Host processes as guest tasks: adoption, forks, exec, exits, in the order of a script."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from emulated_kernel.guests.builtin.processes import process_tracker as mirror_module
from emulated_kernel.guests.builtin.processes.process_tracker import ProcessTracker
from emulated_kernel.guests.common.host_processes import Fork
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.guests.builtin.conftest import FIRST_PID, ScriptedWatch, tasks

SHELL = FIRST_PID
CHILD = FIRST_PID + 1


def fork(pid: int, parent: int | None, comm: str = "sh", *, alive: bool = True) -> Fork:
    return Fork(pid, parent, comm, 1000, 1000, alive)


@pytest.fixture
def counted(kernel: Kernel) -> Counter[str]:
    """How often the guest entered the functions of a process's life."""
    hits: Counter[str] = Counter()

    def count(kprobe: Kprobe, _regs: Any) -> None:
        hits[kprobe.symbol_name or ""] += 1

    names = ("kernel_clone", "do_exit", "do_sys_openat2")
    kernel.register_kprobes([Kprobe(symbol_name=name, pre_handler=count) for name in names])
    return hits


def test_adopted_process(kernel: Kernel, watch: ScriptedWatch, counted: Counter[str]) -> None:
    """A process seen first at its request was forked in the past: no fork is shown."""
    watch.comms[SHELL] = "bash"
    task = kernel.guest.processes.task_of(SHELL, 1000, 1000)
    info = tasks(kernel)[SHELL]
    assert (info.addr, info.comm, info.uid, info.parent) == (task.addr, "bash", 1000, 1)
    assert kernel.guest.processes.task_of(SHELL, 1000, 1000) is task
    assert watch.followed == [SHELL]
    assert counted["kernel_clone"] == 0
    assert kernel.guest.runner.syscall(task, kernel.guest.syscalls.number("getpid")) == SHELL


def test_requests_without_a_process_are_inits(kernel: Kernel) -> None:
    mirror = kernel.guest.processes
    assert mirror.task_of(0, 0, 0) is mirror.task_of(1, 0, 0) is mirror.init
    mirror.exit(1)
    assert mirror.init.pid in tasks(kernel)


def test_a_fork_is_made_in_the_parent(kernel: Kernel, watch: ScriptedWatch, counted: Counter[str]) -> None:
    watch.comms = {SHELL: "bash", CHILD: "bash"}
    mirror = kernel.guest.processes
    mirror.task_of(SHELL, 1000, 1000)
    watch.pending_forks = [fork(CHILD, SHELL, "bash")]
    mirror.catch_up()
    assert counted["kernel_clone"] == 1
    info = tasks(kernel)[CHILD]
    assert (info.parent, info.comm, info.uid) == (SHELL, "bash", 1000)
    assert watch.followed == [SHELL, CHILD]
    watch.pending_exits = [CHILD]
    mirror.catch_up()
    assert counted["do_exit"] == 1
    assert CHILD not in tasks(kernel) or tasks(kernel)[CHILD].state in "ZX"
    assert [task.pid for task in mirror] == [1, SHELL]


def test_a_fork_that_is_over_already(kernel: Kernel, watch: ScriptedWatch, counted: Counter[str]) -> None:
    watch.comms[SHELL] = "bash"
    mirror = kernel.guest.processes
    mirror.task_of(SHELL, 1000, 1000)
    watch.pending_forks = [fork(CHILD, SHELL, "", alive=False), fork(CHILD + 1, SHELL, alive=False)]
    mirror.task_of(SHELL, 1000, 1000)
    assert counted == {"kernel_clone": 2, "do_exit": 2}
    assert [task.pid for task in mirror] == [1, SHELL]


def test_exec_renames(kernel: Kernel, watch: ScriptedWatch) -> None:
    mirror = kernel.guest.processes
    watch.comms[SHELL] = "bash"
    mirror.task_of(SHELL, 0, 0)
    watch.comms[SHELL] = "a name of more than fifteen bytes"
    mirror.task_of(SHELL, 0, 0)
    assert tasks(kernel)[SHELL].comm == "a name of more than fifteen bytes"[:15]
    watch.pending_forks = [fork(CHILD, SHELL, "cat")]
    mirror.catch_up()
    assert tasks(kernel)[CHILD].comm == "cat"


def test_who_executes_and_forks_in_one_breath_has_done_so_in_this_order(
    kernel: Kernel, watch: ScriptedWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = kernel.guest.processes
    watch.comms[SHELL] = watch.comms[CHILD] = "bash"
    mirror.task_of(SHELL, 0, 0)
    watch.pending_forks = [fork(CHILD, SHELL, "bash")]
    mirror.catch_up()
    executed: list[tuple[int, str]] = []
    monkeypatch.setattr(mirror_module, "program_of", lambda pid, comm: executed.append((pid, comm)))
    watch.comms[CHILD] = watch.comms[CHILD + 1] = "sh"
    watch.pending_forks = [fork(CHILD + 1, CHILD, "sh")]
    mirror.catch_up()
    assert executed == [(CHILD, "sh")]


def test_a_pid_that_is_used_again(kernel: Kernel, watch: ScriptedWatch) -> None:
    mirror = kernel.guest.processes
    first = mirror.task_of(SHELL, 0, 0)
    for _ in range(3):
        watch.pending_exits = [SHELL]
        mirror.catch_up()
        again = mirror.task_of(SHELL, 5, 5)
        assert again is not first
        assert tasks(kernel)[SHELL].uid == 5
        first = again


def test_unknown_and_repeated_news(kernel: Kernel, watch: ScriptedWatch, counted: Counter[str]) -> None:
    mirror = kernel.guest.processes
    watch.pending_exits = [4242]
    watch.comms = {SHELL: "bash"}
    watch.pending_forks = [fork(CHILD, SHELL), fork(CHILD, SHELL)]
    mirror.catch_up()
    assert counted == {"kernel_clone": 1}
    assert tasks(kernel)[CHILD].parent == SHELL


@pytest.mark.parametrize("parent", [None, 4242])
def test_a_fork_by_nobody_knows_whom(
    kernel: Kernel, watch: ScriptedWatch, counted: Counter[str], parent: int | None
) -> None:
    """It isn't the last client's, nor init's: it isn't told, and the child is adopted if it ever asks."""
    watch.comms[SHELL] = "bash"
    mirror = kernel.guest.processes
    mirror.task_of(SHELL, 1000, 1000)
    watch.pending_forks = [fork(CHILD, parent), fork(CHILD + 1, parent, alive=False)]
    mirror.task_of(SHELL, 1000, 1000)
    assert not counted
    assert CHILD not in tasks(kernel)
    mirror.task_of(CHILD, 1000, 1000)
    assert tasks(kernel)[CHILD].parent == 1
    assert not counted


def test_many_processes_come_and_go(kernel: Kernel, watch: ScriptedWatch) -> None:
    mirror = kernel.guest.processes
    before = tasks(kernel).keys()
    mirror.task_of(SHELL, 0, 0)
    for pid in range(1000, 1300):
        watch.pending_forks = [fork(pid, SHELL)]
        watch.pending_exits = [pid]
        mirror.catch_up()
    mirror.exit(SHELL)
    assert tasks(kernel).keys() == before


def test_strangers_have_a_share_of_a_request(
    kernel: Kernel, watch: ScriptedWatch, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients' forks and the asking process's own ancestors are told; exits wait, and none is lost."""
    stranger, grandchild = 4242, 4250
    watch.comms = {SHELL: "bash", stranger: "cc"}
    mirror = kernel.guest.processes
    mirror.task_of(SHELL, 0, 0)
    monkeypatch.setattr("emulated_kernel.guests.builtin.processes.process_tracker.UNRELATED_MOST", 0.0)
    watch.pending_forks = [
        *(fork(4300 + number, stranger) for number in range(5)),
        *(fork(CHILD, SHELL), fork(4249, stranger), fork(grandchild, 4249), fork(4400, grandchild)),
    ]
    mirror.task_of(grandchild, 0, 0)
    assert counted["kernel_clone"] == 3
    assert {pid for pid in tasks(kernel) if pid > 100} >= {SHELL, CHILD, 4249, grandchild}
    assert tasks(kernel)[grandchild].parent == 4249
    watch.pending_exits = [CHILD, 4249, grandchild]
    # A client that has the number of one that is over gets a task of its own.
    assert mirror.task_of(grandchild, 7, 7).uid == 7
    assert counted["do_exit"] == 2
    mirror.task_of(SHELL, 0, 0)
    assert counted["do_exit"] == 3
    assert {task.pid for task in mirror} >= {SHELL, grandchild}
    assert not {CHILD, 4249} & {task.pid for task in mirror}


def test_strangers_have_a_share_of_the_time(
    kernel: Kernel, watch: ScriptedWatch, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come one behind the other don't have as many forks of others each."""
    clock = [1000.0, 0.0]
    module = "emulated_kernel.guests.builtin.processes.process_tracker"
    mirror, fork_one = kernel.guest.processes, ProcessTracker._fork

    def slow_fork(mirror: ProcessTracker, told: Fork) -> None:
        fork_one(mirror, told)
        clock[1] += 0.03

    monkeypatch.setattr(ProcessTracker, "_fork", slow_fork)
    monkeypatch.setattr(f"{module}.monotonic", lambda: clock[0])
    monkeypatch.setattr(f"{module}.thread_time", lambda: clock[1])
    watch.comms = {SHELL: "bash", 4242: "cc"}
    told = []
    for wait in (0.0, 1.0, 0.0, 0.2, 0.01, 1.0):
        clock[0] += wait
        before, first = counted["kernel_clone"], 4300 + 10 * len(told)
        watch.pending_forks = [fork(first + number, 4242) for number in range(6)]
        mirror.task_of(SHELL, 0, 0)
        told.append(counted["kernel_clone"] - before)
    assert told[1:] == [4, 0, 2, 1, 4]


def test_the_worker_is_replaced_when_a_call_kills_it(kernel: Kernel) -> None:
    mirror = kernel.guest.processes
    worker = mirror.worker()
    assert (worker.pid, tasks(kernel)[worker.pid].comm) == (os.getpid(), "kprobefs")
    with pytest.raises(KernelError):
        kernel.call("strlen", 0)
    assert mirror.worker() is not worker
    assert mirror.worker().pid == os.getpid()


def test_names_of_any_bytes(kernel: Kernel, watch: ScriptedWatch) -> None:
    """A name has 15 bytes, which need not be UTF-8: the guest's task has the same ones."""
    watch.comms[SHELL] = b"\xff\xfe 0123456789abcdef".decode("utf-8", "surrogateescape")
    kernel.guest.processes.task_of(SHELL, 0, 0)
    assert os.fsencode(tasks(kernel)[SHELL].comm) == b"\xff\xfe 0123456789ab"
    watch.comms[SHELL] = "\udcff"
    kernel.guest.processes.task_of(SHELL, 0, 0)
    assert os.fsencode(tasks(kernel)[SHELL].comm) == b"\xff"


def test_a_pinned_process_runs_on_its_cpu(watch: ScriptedWatch) -> None:
    """Modulo the guest's CPUs; its children inherit that, until they may go anywhere."""
    watch.comms = {SHELL: "bash", CHILD: "bash"}
    with Kernel(MachineConfig(cpus=2), watch) as kernel:
        mirror, abi = kernel.guest.processes, kernel.image.abi

        def cpu_of(pid: int) -> int:
            task = mirror.task_of(pid, 0, 0)
            kernel.guest.syscalls.call(task, "getpid")
            return kernel.machine.memory.read_u32(task.addr + abi["task_struct.cpu"])

        for pin in (5, 4, 1, 0):
            watch.pins[SHELL] = watch.pins[CHILD] = pin
            assert cpu_of(SHELL) == pin % 2
            watch.pending_forks = [fork(CHILD, SHELL, "bash")]
            assert cpu_of(CHILD) == pin % 2
            watch.pending_exits = [CHILD]
        watch.pins.clear()
        assert mirror.task_of(SHELL, 0, 0).cpu is None
