"""sched_setaffinity and sched_getaffinity: on which CPUs a task may run, and how the task moves to another
CPU.
"""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask, Request
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.errors import KernelError
from tests.smp.conftest import Boot, clients
from tests.smp.seeds import seeds
from tests.smp.test_cpus import SHELL, write
from tests.smp.test_races import assert_well, function_calls, together

ARCHITECTURES = ("x86_64", "i386", "riscv64")
SEEDS = seeds(3, 3)
CPUS = 4
SIGCHLD = 17


@pytest.fixture(params=ARCHITECTURES)
def kernel(boot: Boot, request: Any) -> Kernel:
    """Return a kernel of each architecture, with four CPUs."""
    return boot(CPUS, request.param)


def set_affinity(kernel: Kernel, caller: GuestTask, pid: int, cpus: int) -> None:
    """Set the mask of CPUs on which the task `pid` may run; 0 is the caller.

    Raises: KernelError if the system call fails.
    """
    with kernel.guest.buffers.borrowed() as mask:
        kernel.machine.memory.write(mask, cpus.to_bytes(8, "little"))
        assert kernel.guest.syscalls.call(caller, "sched_setaffinity", pid, 8, mask) == 0


def get_affinity(kernel: Kernel, caller: GuestTask, pid: int, size: int = 8) -> int:
    """Return the mask of CPUs on which the task `pid` may run; 0 is the caller. Raises: KernelError if the
    system call fails.

    `size`: number of bytes of the mask that the caller offers.
    """
    with kernel.guest.buffers.borrowed() as mask:
        count = kernel.guest.syscalls.call(caller, "sched_getaffinity", pid, size, mask)
        assert count == 8
        return int.from_bytes(kernel.machine.memory.read(mask, count), "little")


@contextmanager
def refused(code: int) -> Iterator[None]:
    """Assert that the block raises KernelError with the errno `code`."""
    with pytest.raises(KernelError) as raised:
        yield
    assert raised.value.errno == code


def cpu_of(kernel: Kernel, task: GuestTask) -> int:
    return kernel.guest.kernel.cpu_of(task.addr)


def test_a_task_moves_itself(kernel: Kernel) -> None:
    task, *others = clients(kernel, 3)
    assert get_affinity(kernel, task, 0) == (1 << CPUS) - 1
    for cpu in (2, 0, 3, 1):
        set_affinity(kernel, task, 0, 1 << cpu)
        assert cpu_of(kernel, task) == cpu
        assert get_affinity(kernel, task, 0) == 1 << cpu
        for other in others:
            set_affinity(kernel, other, 0, 1 << cpu)
        assert kernel.guest.syscalls.call(task, "getpid") == task.pid
        assert {cpu_of(kernel, each) for each in (task, *others)} == {cpu}


def test_a_task_is_moved_by_another_one(kernel: Kernel) -> None:
    task, other = clients(kernel, 2)
    kernel.guest.syscalls.call(other, "getpid")
    for cpu in (3, 1, 0, 2):
        set_affinity(kernel, task, other.pid, 1 << cpu)
        assert kernel.guest.syscalls.call(other, "getpid") == other.pid
        assert cpu_of(kernel, other) == cpu


def test_children_inherit_it(kernel: Kernel) -> None:
    (parent,) = clients(kernel, 1)
    set_affinity(kernel, parent, 0, 1 << 2)
    kernel.guest.kernel.set_field(parent.addr, "host_clone_pid", 700)
    nr = kernel.guest.syscalls.number("clone")
    assert kernel.guest.runner.syscall(parent, nr, SIGCHLD, 0, 0, 0, 0) == 700
    assert get_affinity(kernel, parent, 700) == 1 << 2


def test_what_is_refused(kernel: Kernel) -> None:
    task, other = clients(kernel, 2)
    stranger = kernel.guest.processes.task_of(900, 1000, 1000)
    for code, pid, cpus in (
        (errno.EINVAL, 0, 0),
        (errno.EINVAL, 0, 1 << CPUS),
        (errno.ESRCH, 12345, 1),
    ):
        with refused(code):
            set_affinity(kernel, task, pid, cpus)
    with refused(errno.EPERM):
        set_affinity(kernel, stranger, other.pid, 1)
    with refused(errno.EFAULT):
        kernel.guest.syscalls.call(task, "sched_setaffinity", 0, 8, 0)
    with refused(errno.ESRCH):
        get_affinity(kernel, task, 12345)
    with refused(errno.EINVAL):
        get_affinity(kernel, task, 0, size=3)
    assert get_affinity(kernel, task, 0) == get_affinity(kernel, stranger, 0) == (1 << CPUS) - 1


def test_the_event_says_from_where_to_where(kernel: Kernel) -> None:
    (task,) = clients(kernel, 1)
    set_affinity(kernel, task, 0, 1 << 1)
    mount = kernel.mount()
    write(mount, "/tracing/events/sched/sched_migrate_task/enable", "1")
    set_affinity(kernel, task, 0, 1 << 3)
    write(mount, "/tracing/events/sched/sched_migrate_task/enable", "0")
    handle = mount.open(SHELL, "/tracing/trace", 0)
    text = mount.read(SHELL, handle, 1 << 20, 0).decode()
    pattern = rf"sched_migrate_task: comm=\S+ pid={task.pid} prio=120 orig_cpu=1 dest_cpu=3\n"
    assert len(re.findall(pattern, text)) == 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", SEEDS)
def test_all_move_each_other_at_once(boot: Boot, arch: str, seed: int) -> None:
    kernel = boot(CPUS, arch, seed=seed, quantum=400)
    tasks = clients(kernel, 6)
    number = kernel.guest.syscalls.number("sched_setaffinity")
    masks = [kernel.guest.buffers.get() for _ in tasks]
    chooser = random.Random(seed)
    for _ in range(6):
        order = chooser.sample(tasks, len(tasks))
        wanted = [1 << chooser.randrange(CPUS) for _ in tasks]
        for mask, cpus in zip(masks, wanted, strict=True):
            kernel.machine.memory.write(mask, cpus.to_bytes(8, "little"))
        calls = [
            (task, Request(number, (other.pid, 8, mask), None))
            for task, other, mask in zip(tasks, order, masks, strict=True)
        ]
        assert together(kernel, calls) == [0] * len(tasks)
        for task, cpus in zip(order, wanted, strict=True):
            assert kernel.guest.syscalls.call(task, "getpid") == task.pid
            assert 1 << cpu_of(kernel, task) == cpus
    assert_well(kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_cpu_without_work_takes_a_task_that_waits(boot: Boot, arch: str) -> None:
    kernel = boot(CPUS, arch, seed=1, quantum=200)
    taken = []
    kernel.register_kprobe(
        Kprobe(symbol_name="detach_one_task", pre_handler=lambda _kprobe, _regs: taken.append(1))
    )
    with function_calls(kernel, clients(kernel, 1), "load_locks", 40) as calls:
        (result,) = together(kernel, calls)
    assert result > 0
    assert taken
    assert_well(kernel)
