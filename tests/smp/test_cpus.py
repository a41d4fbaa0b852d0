"""Several CPUs: their boot and per-CPU areas, the spread of tasks over the CPUs, and the CPU on which a hit
is handled.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from emulated_kernel.guests.builtin.runner import guest_runner
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import ARCHITECTURES
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.builtin.test_dead_guest import read_text
from tests.smp.conftest import Boot, clients

SHELL = Client(500, 0, 0)
SYSTEM_CALL = {"x86_64": "__x64_sys_getpid", "i386": "__ia32_sys_getpid"}


def on(kernel: Kernel, cpu: int, name: str) -> int:
    """Return the value of the 32-bit per-CPU variable `name` of CPU `cpu`."""
    machine = kernel.machine
    return machine.memory.read_u32(machine.per_cpu_bases[cpu] + kernel.image.abi[f"percpu.{name}"])


def cpu_number(kernel: Kernel) -> int:
    """Return the number of the current CPU, as the guest's smp_processor_id() reads it."""
    machine = kernel.machine
    base = machine.cpus[machine.cpu].per_cpu_base
    return machine.memory.read_u32(base + kernel.image.abi["percpu.cpu_number"])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("cpus", [1, 2, 4, 64])
def test_all_come_up(boot: Boot, arch: str, cpus: int) -> None:
    kernel = boot(cpus, arch)
    assert len(set(kernel.machine.per_cpu_bases)) == cpus
    assert [on(kernel, number, "cpu_number") for number in range(cpus)] == list(range(cpus))
    assert kernel.guest.kernel.task_of(0) != 0
    for number in range(1, cpus):
        idle = kernel.guest.kernel.task_of(number)
        comm = kernel.machine.memory.read(idle + kernel.image.abi["task_struct.comm"], 16)
        assert comm.split(b"\0")[0].decode() == f"swapper/{number}"
    texts = [message.text for message in kernel.guest.kernel.messages()]
    assert (f"smp: Brought up 1 node, {cpus} CPUs" in texts) == (cpus > 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tasks_spread_over_the_cpus(boot: Boot, arch: str) -> None:
    kernel = boot(4, arch)
    where = {}
    for task in clients(kernel, 8) * 3:
        assert kernel.guest.syscalls.call(task, "getpid") == task.pid
        assert kernel.guest.kernel.current_task() == task.addr
        assert cpu_number(kernel) == kernel.machine.cpu == kernel.guest.kernel.cpu_of(task.addr)
        where[task.pid] = kernel.machine.cpu
    assert set(where.values()) == {0, 1, 2, 3}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_hit_is_on_its_cpu(boot: Boot, arch: str) -> None:
    kernel = boot(3, arch)
    tasks = clients(kernel, 5)
    seen = []

    def note(_kprobe: Kprobe, _regs: Any) -> None:
        seen.append((kernel.guest.kernel.current_task(), kernel.machine.cpu, cpu_number(kernel)))

    symbol = SYSTEM_CALL.get(arch, "__riscv_sys_getpid")
    kernel.register_kprobe(Kprobe(symbol_name=symbol, pre_handler=note))
    for task in tasks * 2:
        kernel.guest.syscalls.call(task, "getpid")
        expected = kernel.guest.kernel.cpu_of(task.addr)
        assert seen.pop() == (task.addr, expected, expected)
    assert not seen


def test_forks_go_to_other_cpus(boot: Boot) -> None:
    kernel = boot(4)
    (parent,) = clients(kernel, 1)
    nr = kernel.guest.syscalls.number("clone")
    cpus = set()
    for pid in range(700, 720):
        kernel.guest.kernel.set_field(parent.addr, "host_clone_pid", pid)
        assert kernel.guest.runner.syscall(parent, nr, 17, 0, 0, 0, 0) == pid
        tasks = kernel.guest.kernel.tasks()
        cpus.add(next(kernel.guest.kernel.cpu_of(task.addr) for task in tasks if task.pid == pid))
    assert len(cpus) > 1


@pytest.mark.parametrize("cpus", [2, 3])
def test_the_same_seed_gives_the_same_trace(boot: Boot, cpus: int) -> None:
    """Two kernels with the same seed record the same trace for the same requests, including timestamps and
    CPUs.
    """

    def story() -> str:
        mount = boot(cpus).mount()
        write(mount, "/tracing/kprobe_events", "p:reads vfs_read\nr:back vfs_read $retval\n")
        write(mount, "/tracing/events/kprobes/enable", "1")
        write(mount, "/tracing/events/sched/enable", "1")
        for number in range(12):
            use_a_file(mount, Client(600 + number % 5, 0, 0))
        handle = mount.open(SHELL, "/tracing/trace", os.O_RDONLY)
        return mount.read(SHELL, handle, 1 << 20, 0).decode()

    trace = story()
    assert trace == story()
    assert trace.count("back: (vfs_read") + trace.count(" <- vfs_read)") == 12
    assert trace.count("reads: (vfs_read") == 13
    assert trace.count("sched_switch: ") > 12


@pytest.mark.parametrize("cpu", [0, 1])
def test_a_cpu_that_waits_for_ever_loses_only_its_task(boot: Boot, cpu: int) -> None:
    """The ticks of the other CPU, which is idle, are no progress."""
    kernel = boot(2)
    lock = kernel.machine.alloc_pages(16)
    kernel.machine.memory.write_u32(lock, 1)
    kernel.call("sched_setaffinity", 0, 1 << cpu)
    with pytest.raises(KernelError) as caught:
        kernel.call("_raw_spin_lock", lock)
    assert caught.value.errno == errno.EFAULT
    assert f"soft lockup - CPU#{cpu} stuck" in read_text(kernel.mount(), "/machine/dmesg")
    assert kernel.call("int_sqrt", 16) == 4


@pytest.mark.parametrize(
    ("quantum", "limit", "end"),
    [
        (None, 10, "Kernel panic - not syncing: Aiee, killing interrupt handler!"),
        (100, 0.5, "kprobefs: the guest was given up: a system call kept it busy for 0.5 s"),
    ],
)
def test_cpus_that_wait_for_each_other_for_ever_are_given_up(
    boot: Boot, monkeypatch: pytest.MonkeyPatch, quantum: int | None, limit: float, end: str
) -> None:
    """The end of a task needs the lock for which the CPU waits.

    Without a quantum the watchdog comes first, and finds the CPU in a timer interrupt.
    """
    monkeypatch.setattr(guest_runner, "MAX_CALL", limit)
    kernel = boot(2, quantum=quantum)
    kernel.call("int_sqrt", 4)
    runqueues = kernel.image.kallsyms.lookup_name("runqueues")
    assert runqueues is not None
    # The lock is the first member of a queue. CPU 0 takes ticks, and would panic.
    kernel.machine.memory.write(kernel.machine.per_cpu_bases[1] + runqueues, b"\1")
    with pytest.raises(KernelError) as caught:
        kernel.call("_raw_spin_lock", b"held")
    assert caught.value.errno == errno.EFAULT
    log = read_text(kernel.mount(), "/machine/dmesg")
    assert log.endswith(f"{end}\n")


def write(mount: Mount, path: str, text: str) -> None:
    handle = mount.open(SHELL, path, os.O_WRONLY)
    mount.write(SHELL, handle, text.encode(), 0)
    mount.release(handle)


def use_a_file(mount: Mount, client: Client) -> None:
    handle = mount.create(client, "/scratch/file", 0o644, os.O_RDWR)
    mount.write(client, handle, b"data", 0)
    mount.read(client, handle, 4, 0)
    mount.release(handle)
