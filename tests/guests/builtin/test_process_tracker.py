"""Host processes as guest tasks: adoption, forks, exec, exits, in the order of a script."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from emulated_kernel.guests.builtin.processes.process_tracker import MAX_EXITS
from emulated_kernel.guests.common.client_facts import ClientFacts
from emulated_kernel.guests.common.host_processes import Fork
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from tests.guests.builtin.conftest import FIRST_PID, OWN_PID, ScriptedWatch, tasks

SHELL = FIRST_PID
CHILD = FIRST_PID + 1


def fork(pid: int, parent: int | None, comm: str = "sh", *, alive: bool = True) -> Fork:
    return Fork(pid, parent, comm, 1000, 1000, alive)


@pytest.fixture
def counted(kernel: Kernel) -> Counter[str]:
    """Return counters of the guest's entries of kernel_clone, do_exit and do_sys_openat2."""
    hits: Counter[str] = Counter()

    def count(kprobe: Kprobe, _regs: Any) -> None:
        hits[kprobe.symbol_name or ""] += 1

    names = ("kernel_clone", "do_exit", "do_sys_openat2")
    kernel.register_kprobes([Kprobe(symbol_name=name, pre_handler=count) for name in names])
    return hits


def test_adopted_process(kernel: Kernel, watch: ScriptedWatch, counted: Counter[str]) -> None:
    """A process that is first seen at its own request becomes a guest task without a fork in the guest."""
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


def test_an_execve_is_shown_at_the_processs_own_request(kernel: Kernel, watch: ScriptedWatch) -> None:
    """The guest repeats an execve at the process's own next request.

    Until then, the task only gets the new name.
    """
    mirror = kernel.guest.processes
    watch.comms[SHELL] = watch.comms[CHILD] = "bash"
    mirror.task_of(SHELL, 0, 0)
    watch.pending_forks = [fork(CHILD, SHELL, "bash")]
    mirror.catch_up()
    paths: list[str] = []

    def note(_kprobe: Kprobe, regs: Any) -> None:
        text = kernel.machine.memory.read(regs.si, 64)
        paths.append(text.partition(b"\0")[0].decode())

    kernel.register_kprobes([Kprobe(symbol_name="strncpy_from_user", pre_handler=note)])
    watch.comms[CHILD] = "cat"
    watch.programs[CHILD, "cat"] = "/bin/cat"
    mirror.task_of(SHELL, 0, 0)
    assert tasks(kernel)[CHILD].comm == "cat"
    assert paths == []
    unshown = mirror.unshown_program(CHILD)
    assert unshown == "cat"
    mirror.task_of(CHILD, 0, 0, mirror.facts(Client(CHILD, 0, 0), unshown))
    assert paths == ["/bin/cat"]
    assert mirror.unshown_program(CHILD) is None
    mirror.task_of(CHILD, 0, 0, ClientFacts(comm="cat", program="/bin/cat"))
    assert paths == ["/bin/cat"]


def test_a_program_that_is_not_the_latest_one_is_not_shown(kernel: Kernel, watch: ScriptedWatch) -> None:
    """If the facts about a process name an older program than its present one, the task gets the present
    program's name.
    """
    mirror = kernel.guest.processes
    watch.comms[SHELL] = "bash"
    mirror.task_of(SHELL, 0, 0)
    watch.comms[SHELL] = "dog"
    mirror.task_of(SHELL, 0, 0, ClientFacts(comm="cat", program="/bin/cat"))
    assert tasks(kernel)[SHELL].comm == "dog"


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
    mirror.task_of(SHELL, 1000, 1000)
    watch.pending_forks = [fork(CHILD, SHELL), fork(CHILD, SHELL)]
    mirror.catch_up()
    assert counted == {"kernel_clone": 1}
    assert tasks(kernel)[CHILD].parent == SHELL


@pytest.mark.parametrize("parent", [None, 4242])
def test_a_fork_by_nobody_knows_whom(
    kernel: Kernel, watch: ScriptedWatch, counted: Counter[str], parent: int | None
) -> None:
    """A fork with an unknown parent is not shown in the guest.

    The child becomes a task at its own first request.
    """
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


def test_strangers_are_never_seen(kernel: Kernel, watch: ScriptedWatch, counted: Counter[str]) -> None:
    """Until a process makes a request, the guest shows neither the process nor its forks and exits."""
    stranger, its_child = 4242, 4250
    watch.comms = {SHELL: "bash", stranger: "cc", its_child: "as"}
    mirror = kernel.guest.processes
    mirror.task_of(SHELL, 0, 0)
    watch.pending_forks = [fork(CHILD, SHELL), fork(its_child, stranger), fork(4300, its_child, alive=False)]
    mirror.task_of(SHELL, 0, 0)
    assert counted == {"kernel_clone": 1}
    assert {pid for pid in tasks(kernel) if pid > 100} == {SHELL, CHILD}
    watch.pending_exits = [stranger, its_child]
    mirror.task_of(SHELL, 0, 0)
    assert counted == {"kernel_clone": 1}
    mirror.task_of(its_child, 0, 0)
    watch.pending_forks = [fork(4301, its_child, alive=False)]
    mirror.task_of(SHELL, 0, 0)
    assert counted == {"kernel_clone": 2, "do_exit": 1}


def test_descendants_of_clients_are_seen(kernel: Kernel, watch: ScriptedWatch, counted: Counter[str]) -> None:
    watch.comms = {SHELL: "bash"}
    mirror = kernel.guest.processes
    mirror.task_of(SHELL, 0, 0)
    watch.pending_forks = [
        fork(CHILD, SHELL),
        fork(CHILD + 1, CHILD),
        fork(CHILD + 2, CHILD + 1, alive=False),
    ]
    mirror.catch_up()
    assert counted == {"kernel_clone": 3, "do_exit": 1}
    assert tasks(kernel)[CHILD + 1].parent == CHILD


def test_a_request_replays_a_bounded_number_of_exits(
    kernel: Kernel, watch: ScriptedWatch, counted: Counter[str]
) -> None:
    """One request replays at most MAX_EXITS exits. The next request replays the rest."""
    mirror = kernel.guest.processes
    mirror.task_of(SHELL, 0, 0)
    children = range(1000, 1000 + MAX_EXITS + 10)
    watch.pending_forks = [fork(pid, SHELL) for pid in children]
    mirror.catch_up()
    watch.pending_exits = list(children)
    for expected in (MAX_EXITS, len(children), len(children)):
        mirror.task_of(SHELL, 0, 0)
        assert counted["do_exit"] == expected


def test_a_pid_of_a_process_whose_end_was_not_reported(kernel: Kernel, watch: ScriptedWatch) -> None:
    mirror = kernel.guest.processes
    first = mirror.task_of(SHELL, 0, 0)
    watch.restarted = {SHELL}
    again = mirror.task_of(SHELL, 5, 5)
    assert again is not first
    assert tasks(kernel)[SHELL].uid == 5


def test_the_worker_is_replaced_when_a_call_kills_it(kernel: Kernel) -> None:
    mirror = kernel.guest.processes
    worker = mirror.worker()
    assert (worker.pid, tasks(kernel)[worker.pid].comm) == (OWN_PID, "kprobefs")
    with pytest.raises(KernelError):
        kernel.call("strlen", 0)
    assert mirror.worker() is not worker
    assert mirror.worker().pid == OWN_PID


def test_names_of_any_bytes(kernel: Kernel, watch: ScriptedWatch) -> None:
    """A guest task has the same name as the process: up to 15 bytes, which need not be UTF-8."""
    watch.comms[SHELL] = b"\xff\xfe 0123456789abcdef".decode("utf-8", "surrogateescape")
    kernel.guest.processes.task_of(SHELL, 0, 0)
    assert os.fsencode(tasks(kernel)[SHELL].comm) == b"\xff\xfe 0123456789ab"
    watch.comms[SHELL] = "\udcff"
    kernel.guest.processes.task_of(SHELL, 0, 0)
    assert os.fsencode(tasks(kernel)[SHELL].comm) == b"\xff"


def test_a_pinned_process_runs_on_its_cpu(watch: ScriptedWatch) -> None:
    """A process pinned to CPU n of the host, and its children, run on CPU n modulo the number of CPUs of the
    guest.
    """
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


def test_an_exit_reaches_a_client_that_waits_for_records(kernel: Kernel, watch: ScriptedWatch) -> None:
    """follow_processes replays an exit without a client's request, and wakes a client that polls trace_pipe.

    If no process has ended, follow_processes does not advance the virtual clock.
    """
    mount, client = kernel.mount(), Client(SHELL, 0, 0)
    watch.comms |= {SHELL: "sh", CHILD: "sleep"}
    for pid in (SHELL, CHILD):
        mount.release(mount.open(Client(pid, 0, 0), "/tracing/trace_clock", os.O_RDONLY))
    enable = mount.open(client, "/tracing/events/sched/sched_process_exit/enable", os.O_WRONLY)
    mount.write(client, enable, b"1", 0)
    mount.release(enable)
    pipe = mount.open(client, "/tracing/trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
    woken: list[bool] = []
    assert mount.poll(pipe, lambda: woken.append(True)) == 0
    before = kernel.machine.clock.now_ns()
    mount.follow_processes()
    assert (kernel.machine.clock.now_ns(), woken) == (before, [])
    watch.pending_exits.append(CHILD)
    mount.follow_processes()
    assert woken == [True]
    assert f"sched_process_exit: comm=sleep pid={CHILD} " in mount.read(client, pipe, 4096, 0).decode()
