"""System calls that tasks make on several CPUs at the same time, with switches of CPU that a seed chooses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask, Request
from emulated_kernel.guests.builtin.runner.smp import SmpGuestRunner
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import ARCHITECTURES
from tests.smp.conftest import Boot, clients
from tests.smp.seeds import seeds

SEEDS = seeds(5, 3)
GFP_KERNEL = 0xCC0
SIGCHLD = 17
AT_FDCWD = -100


def together(kernel: Kernel, calls: Sequence[tuple[GuestTask, Request]]) -> list[int]:
    """Run system calls of several tasks, as many at the same time as there are CPUs.

    Return the results in the order of `calls`.
    """
    executive = kernel.guest.runner
    assert isinstance(executive, SmpGuestRunner)
    for task, request in calls:
        assert task.request is None, "a task makes one call at a time"
        task.request = request
    executive._depth += 1
    for tell in executive.events.call_begins:
        tell()
    try:
        _run_all(executive, calls)
    finally:
        executive._depth -= 1
        for tell in executive.events.call_ended:
            tell()
        for task, _ in calls:
            task.request = None
    return [-errno.EIO if request.result is None else request.result for _, request in calls]


def _run_all(executive: SmpGuestRunner, calls: Sequence[tuple[GuestTask, Request]]) -> None:
    executive._tick()
    slept = 0
    while waiting := [(task, request) for task, request in calls if request.result is None]:
        assert not executive.is_dead, "the emulated kernel has stopped"
        told = [executive._resume_cpu_of(task, may_rouse=not request.started) for task, request in waiting]
        if not any(told):
            _, request = waiting[0]
            assert not request.waits_for_host, "a file of ours waits in the middle of calls together"
            assert request.elsewhere is None, "a file of ours waits in the middle of calls together"
            executive._await_time(request, slept)
            slept += 1
        executive._step()


@contextmanager
def function_calls(
    kernel: Kernel, tasks: Sequence[GuestTask], name: str, *args: int
) -> Iterator[list[tuple[GuestTask, Request]]]:
    """Yield one request per task that calls the kernel function `name` with `args`.

    The caller runs the requests.
    """
    address = kernel.image.kallsyms.lookup_name(name)
    assert address is not None
    nr, size = kernel.guest.syscalls.number("host_call"), kernel.machine.memory.word_size
    words = b"".join(word.to_bytes(size, "little") for word in (*args, *[0] * (6 - len(args))))
    with ExitStack() as stack:
        calls = []
        for task in tasks:
            buffer = stack.enter_context(kernel.guest.buffers.borrowed())
            kernel.machine.memory.write(buffer, words)
            calls.append((task, Request(nr, (address, buffer), None)))
        yield calls


def assert_well(kernel: Kernel) -> None:
    """Assert that the guest is alive, and that its log has no BUG, WARNING or Oops."""
    texts = [message.text for message in kernel.guest.kernel.messages()]
    assert not [text for text in texts if "BUG" in text or "WARNING" in text or "Oops" in text], texts
    assert not kernel.guest.is_dead


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("quantum", "cpus"), [(1, 4), (2, 2), (5, 3)])
def test_turns_may_be_short(boot: Boot, arch: str, quantum: int, cpus: int) -> None:
    """System calls on several CPUs end with the right result even if a turn of a CPU has only one
    instruction.
    """
    kernel = boot(cpus, arch, quantum=quantum)
    with function_calls(kernel, clients(kernel, cpus), "gcd", 12, 18) as calls:
        assert together(kernel, calls) == [6] * cpus
    assert_well(kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", SEEDS)
def test_memory_is_given_once(boot: Boot, arch: str, seed: int) -> None:
    kernel = boot(4, arch, seed=seed, quantum=30)
    tasks = clients(kernel, 4)
    held: list[int] = []
    for _ in range(6):
        with function_calls(kernel, tasks, "__kmalloc", 64, GFP_KERNEL) as calls:
            held += together(kernel, calls)
    assert len(set(held)) == len(held) == 24
    assert 0 not in held
    assert_well(kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_of_forks_and_exits(boot: Boot, arch: str, seed: int) -> None:
    kernel = boot(4, arch, seed=seed, quantum=25)
    before = {task.pid for task in kernel.guest.kernel.tasks()}
    tasks = clients(kernel, 4)
    clone, leave = (kernel.guest.syscalls.number(name) for name in ("clone", "exit"))
    children: list[GuestTask] = []
    for round_ in range(4):
        calls = []
        for number, task in enumerate(tasks):
            pid = 1000 + 4 * round_ + number
            kernel.guest.kernel.set_field(task.addr, "host_clone_pid", pid)
            calls.append((task, Request(clone, (SIGCHLD, 0, 0, 0, 0), None)))
        calls += [(child, Request(leave, (0,), None)) for child in children]
        pids = together(kernel, calls)[:4]
        assert pids == [1000 + 4 * round_ + number for number in range(4)]
        found = {t.pid: t for t in kernel.guest.kernel.tasks()}
        assert set(found) == before | {task.pid for task in tasks} | set(pids)
        children = [GuestTask(pid, found[pid].addr, "child", 0, 0) for pid in pids]
        for child in children:
            kernel.guest.runner.add(child)
    assert_well(kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", SEEDS)
def test_files_in_one_directory(boot: Boot, arch: str, seed: int) -> None:
    """Four tasks create, write, read and remove files in one directory at the same time; pairs of tasks use
    the same name.
    """
    kernel = boot(4, arch, seed=seed, quantum=40)
    tasks, calls = clients(kernel, 4), kernel.guest.syscalls
    here = AT_FDCWD & (1 << kernel.arch.bits) - 1
    free = kernel.machine.call(address(kernel, "nr_free_pages"))
    with ExitStack() as stack:
        names, data = [stack.enter_context(kernel.guest.buffers.borrowed()) for _ in range(2)]
        for number in range(4):
            kernel.machine.memory.write(names + 64 * number, b"/scratch/file%d\0" % (number // 2))
        for _ in range(4):
            opens = [
                Request(calls.number("openat"), (here, names + 64 * n, os.O_RDWR | os.O_CREAT, 0o644), None)
                for n in range(4)
            ]
            fds = together(kernel, list(zip(tasks, opens, strict=True)))
            assert len(set(fds)) == 4
            for name in ("write", "read", "getdents64"):
                run = [
                    Request(calls.number(name), (fd, data + 1024 * n, 512), None) for n, fd in enumerate(fds)
                ]
                together(kernel, list(zip(tasks, run, strict=True)))
            unlinks = [Request(calls.number("unlinkat"), (here, names + 64 * n, 0), None) for n in range(4)]
            results = together(kernel, list(zip(tasks, unlinks, strict=True)))
            assert results.count(0) == 2
            closes = [Request(calls.number("close"), (fd,), None) for fd in fds]
            assert together(kernel, list(zip(tasks, closes, strict=True))) == [0] * 4
    assert kernel.machine.call(address(kernel, "nr_free_pages")) > free - 20
    assert_well(kernel)


def address(kernel: Kernel, name: str) -> int:
    """Return the address of the kernel symbol `name`."""
    found = kernel.image.kallsyms.lookup_name(name)
    assert found is not None
    return found
