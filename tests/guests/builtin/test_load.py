"""Loads of machine/load: system calls of the guest's own tasks, with a rate and a duration.

Nothing is left at the end.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from emulated_kernel.guests.builtin.workloads.workload import SYSTEM_CALLS, BackgroundWorkload
from emulated_kernel.guests.common import workloads
from emulated_kernel.guests.common.workloads import WorkloadKind, WorkloadOrder
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.errors import KernelError
from tests.guests.builtin.conftest import dmesg, tasks

PID = 77_777


@pytest.fixture(scope="module")
def idle() -> Iterator[Kernel]:
    """Yield a kernel that the tests of refused commands share, because a refused command starts no load."""
    with Kernel() as kernel:
        yield kernel


def load_of(kernel: Kernel, kind: WorkloadKind) -> BackgroundWorkload:
    return BackgroundWorkload(kernel.guest, kind, PID)


def count(kernel: Kernel, symbol: str) -> list[int]:
    """Register a probe at `symbol`. Return a list that gets one item at each hit of this probe."""
    hits: list[int] = []
    kernel.register_kprobe(Kprobe(symbol_name=symbol, pre_handler=lambda _kprobe, _regs: hits.append(1)))
    return hits


def await_state(kernel: Kernel, *states: str) -> str:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with kernel.lock:
            text = "".join(kernel.loads.text())
        if any(f"state={state} " in text for state in states):
            return text
        time.sleep(0.01)
    raise AssertionError(text)


def command(kernel: Kernel, line: str) -> None:
    kernel.loads.parsed(line)()


def refusal(action: Callable[[], object]) -> int:
    with pytest.raises(KernelError) as caught:
        action()
    return caught.value.errno or 0


ENTRIES = {
    WorkloadKind.FORK: "kernel_clone",
    WorkloadKind.FILES: "vfs_rename",
    WorkloadKind.PIPE: "pipe_read",
    WorkloadKind.TCP: "tcp_v4_rcv",
    WorkloadKind.TIMERS: "__x64_sys_nanosleep",
}


@pytest.mark.parametrize("kind", list(SYSTEM_CALLS))
def test_rounds_are_system_calls(kind: WorkloadKind, kernel: Kernel) -> None:
    load = load_of(kernel, kind)
    load.round()
    hits = count(kernel, ENTRIES[kind])
    for _ in range(5):
        load.round()
    assert len(hits) >= 5
    assert tasks(kernel)[PID].comm == f"load/{kind.value}"
    load.end()
    assert PID not in tasks(kernel)
    assert not list(kernel.guest.syscalls.look_entries("/scratch"))


@pytest.mark.parametrize("kind", list(SYSTEM_CALLS))
def test_memory_is_flat(kind: WorkloadKind, kernel: Kernel) -> None:
    def used_after(rounds: int) -> int:
        load = load_of(kernel, kind)
        for _ in range(rounds):
            load.round()
        load.end()
        return kernel.call("nr_free_pages")

    used_after(2)
    assert used_after(100) == used_after(100)


def test_a_killed_task_is_replaced(kernel: Kernel) -> None:
    load = load_of(kernel, WorkloadKind.FILES)
    load.round()

    def wild(_kprobe: Kprobe, regs: object) -> None:
        regs.di = 8  # type: ignore[attr-defined]

    probe = Kprobe(symbol_name="vfs_read", pre_handler=wild)
    kernel.register_kprobe(probe)
    assert refusal(load.round) == errno.EIO
    kernel.unregister_kprobe(probe)
    load.round()
    load.end()


def test_ends_by_itself(kernel: Kernel) -> None:
    with kernel.lock:
        kernel.loads.start(WorkloadOrder(WorkloadKind.FORK, rate=30, duration=1))
    text = await_state(kernel, "done")
    rounds = int(text.split("rounds=")[1].split()[0])
    assert 1 <= rounds <= 30
    assert text.endswith(" failed=0\n")
    assert not any(task.comm.startswith("load/") for task in tasks(kernel).values())


def test_a_load_whose_thread_is_late_makes_one_round(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(workloads, "monotonic", lambda: now)
    with kernel.lock:
        kernel.loads.start(WorkloadOrder(WorkloadKind.FORK, rate=30, duration=1))
        now = 5.0
    assert " rounds=1 failed=0\n" in await_state(kernel, "done")


def test_is_stopped(kernel: Kernel) -> None:
    with kernel.lock:
        kernel.loads.parsed("all rate=1000 duration=60")()
        assert refusal(lambda: command(kernel, "files")) == errno.EBUSY
    time.sleep(0.1)
    with kernel.lock:
        kernel.loads.parsed("stop files")()
        assert refusal(lambda: command(kernel, "stop files")) == errno.ENOENT
        kernel.loads.parsed("stop")()
        assert all("state=stopped" in line and "failed=0" in line for line in kernel.loads.text())
        assert not any(task.comm.startswith("load/") for task in tasks(kernel).values())
        kernel.loads.parsed("stop")()


def test_ends_with_a_guest_that_panics(kernel: Kernel) -> None:
    with kernel.lock:
        kernel.loads.start(WorkloadOrder(WorkloadKind.FILES, rate=1000, duration=60))
    time.sleep(0.05)
    with kernel.lock:
        assert refusal(lambda: kernel.call("panic", "why")) == errno.EFAULT
    assert "the emulated kernel has stopped" in await_state(kernel, "failed")
    with kernel.lock:
        assert refusal(lambda: command(kernel, "files")) == errno.EIO


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("storm", errno.EINVAL),
        ("fork 100", errno.EINVAL),
        ("fork rate", errno.EINVAL),
        ("fork rate=x", errno.EINVAL),
        ("fork rate=0", errno.ERANGE),
        ("fork rate=0.5", errno.ERANGE),
        ("fork rate=-1", errno.ERANGE),
        ("fork rate=nan", errno.ERANGE),
        ("fork rate=1e9", errno.ERANGE),
        ("fork duration=inf", errno.ERANGE),
        ("fork speed=3", errno.EINVAL),
        ("fork rate=5 rate=6", errno.EINVAL),
        ("fork duration=5 rate=6 duration=5", errno.EINVAL),
        ("stop storm", errno.EINVAL),
        ("stop fork", errno.ENOENT),
    ],
)
def test_malformed(line: str, number: int, idle: Kernel) -> None:
    with idle.lock:
        assert refusal(lambda: command(idle, line)) == number
        assert list(idle.loads.text()) == []


def test_a_closed_kernel_has_none() -> None:
    with Kernel() as kernel:
        with kernel.lock:
            kernel.loads.start(WorkloadOrder(WorkloadKind.FORK, rate=1000, duration=60))
        time.sleep(0.05)
        assert "oops" not in dmesg(kernel).lower()
    assert "state=stopped" in "".join(kernel.loads.text())


@pytest.mark.parametrize("lack", [RuntimeError("can't start new thread"), MemoryError()])
def test_without_a_thread_of_the_hosts_there_is_no_load(
    lack: Exception, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_thread: threading.Thread) -> None:
        raise lack

    with monkeypatch.context() as patch, kernel.lock:
        patch.setattr(threading.Thread, "start", none)
        for _ in range(2):
            assert refusal(lambda: command(kernel, "fork")) == errno.ENOMEM
    with kernel.lock:
        kernel.loads.parsed("fork duration=0.01")()
    await_state(kernel, "done")
