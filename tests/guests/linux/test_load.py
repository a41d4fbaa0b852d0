"""Loads in a distribution's kernel: system calls of the loads' own tasks, which probes count."""

from __future__ import annotations

import pytest

from emulated_kernel.guests.common.workloads import WorkloadKind
from emulated_kernel.guests.linux.guest.execve import ExecObserver
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.workload import LinuxWorkload
from emulated_kernel.guests.linux.initramfs import TMPFS
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.errors import KernelError
from tests.guests.linux.probing import PLAIN, engine

ROUNDS = 3
PER_ROUND = {
    WorkloadKind.FORK: ("kernel_clone", 1),
    WorkloadKind.FILES: ("vfs_unlink", 1),
    WorkloadKind.PIPE: ("create_pipe_files", 1),
    WorkloadKind.TCP: ("tcp_sendmsg", 2),
    WorkloadKind.LOSS: ("tcp_sendmsg", 2),
    WorkloadKind.UDP: ("udp_sendmsg", 1),
    WorkloadKind.TIMERS: ("hrtimer_nanosleep", 1),
}
"""Kind of a load -> a function, and its calls in one round."""
PID = 77_777


@pytest.fixture(scope="module")
def probed() -> tuple[LinuxEngine, ExecObserver]:
    found = engine(PLAIN)
    return found, ExecObserver(found.tasks)


@pytest.mark.parametrize("kind", list(WorkloadKind))
def test_each_kind_is_seen(probed: tuple[LinuxEngine, ExecObserver], kind: WorkloadKind) -> None:
    """The rounds of each kind of load cause the expected number of hits, and no task of the load is left at
    its end.
    """
    found, executions = probed
    tasks = found.tasks
    syscalls = LinuxSyscalls(tasks)
    symbol, calls = PER_ROUND[kind]
    comms: list[str] = []
    load = LinuxWorkload(tasks, syscalls, executions.execute, kind, PID)
    probe = Kprobe(
        symbol_name=symbol,
        pre_handler=lambda _probe, _regs: comms.append(tasks.table.by_address[tasks.running()].comm),
    )
    before = set(tasks.table.by_address)
    # The first round also forks the task itself, and binds its socket.
    load.round()
    found.kprobes.register_kprobe(probe)
    try:
        for _ in range(ROUNDS):
            load.round()
    finally:
        found.kprobes.unregister_kprobe(probe)
        load.end()
    assert comms == [f"load/{kind.value}"] * (ROUNDS * calls)
    assert set(tasks.table.by_address) == before
    assert not [entry.name for entry in syscalls.listdir(TMPFS) if entry.name.startswith(".load")]


@pytest.mark.parametrize("kind", [WorkloadKind.TCP, WorkloadKind.LOSS])
def test_only_lost_packets_are_retransmitted(
    probed: tuple[LinuxEngine, ExecObserver], kind: WorkloadKind
) -> None:
    found, executions = probed
    hits: list[int] = []
    load = LinuxWorkload(found.tasks, LinuxSyscalls(found.tasks), executions.execute, kind, PID)
    probe = Kprobe(symbol_name="tcp_retransmit_skb", pre_handler=lambda _probe, regs: hits.append(regs.ip))
    found.kprobes.register_kprobe(probe)
    try:
        for number in range(1, ROUNDS + 1):
            load.round()
            assert (len(hits) >= number) == (kind is WorkloadKind.LOSS)
    finally:
        found.kprobes.unregister_kprobe(probe)
        load.end()


def test_a_killed_task_is_replaced(probed: tuple[LinuxEngine, ExecObserver]) -> None:
    found, executions = probed
    load = LinuxWorkload(found.tasks, LinuxSyscalls(found.tasks), executions.execute, WorkloadKind.PIPE, PID)
    load.round()
    task = load._task
    assert task is not None
    found.tasks.exit(task)
    load.round()
    assert load._task is not None
    assert (load._task is task, load._task.alive) == (False, True)
    load.end()


def test_a_round_that_fails_says_why(probed: tuple[LinuxEngine, ExecObserver]) -> None:
    """A round fails with the reason, here a port that another load uses, and works after the other load has
    ended.
    """
    found, executions = probed
    syscalls = LinuxSyscalls(found.tasks)
    one, other = (
        LinuxWorkload(found.tasks, syscalls, executions.execute, WorkloadKind.UDP, PID + number)
        for number in range(2)
    )
    one.round()
    with pytest.raises(KernelError, match="Address already in use"):
        other.round()
    one.end()
    other.round()
    other.end()
