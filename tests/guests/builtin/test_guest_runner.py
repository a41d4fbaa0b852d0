"""System calls of the guest on a file that the host serves: sleep, resumption, interruption, calls of the
guest, errors.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from emulated_kernel.guests.builtin.builtin_kernel import MAX_BUFFERS
from emulated_kernel.guests.builtin.runner.guest_runner import NSEC_PER_JIFFY, DeferToGuest, GuestTask
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.errors import KernelError, WouldBlock
from tests.guests.builtin.conftest import FIRST_PID, dmesg, tasks


@pytest.fixture
def task(kernel: Kernel) -> GuestTask:
    return kernel.guest.processes.task_of(FIRST_PID, 0, 0)


@pytest.fixture
def fd(kernel: Kernel, task: GuestTask) -> int:
    """Return a descriptor of a file that the host serves."""
    return open_ours(kernel, task)


def open_ours(kernel: Kernel, task: GuestTask) -> int:
    """Return a descriptor, for reading and writing, of a file that the host serves."""
    return kernel.guest.syscalls.open(task, "/ours", os.O_RDWR, hostfs=lambda _op, _buffer, _count: 0)


def block() -> bytes:
    raise WouldBlock


def block_in(kernel: Kernel, task: GuestTask, fd: int) -> None:
    with pytest.raises(WouldBlock):
        kernel.guest.read_file(task, fd, 100, block)


@pytest.fixture
def entries(kernel: Kernel) -> Counter[str]:
    """Return a counter whose item "vfs_read" is the number of times that the guest has entered vfs_read."""
    hits: Counter[str] = Counter()

    def count(kprobe: Kprobe, _regs: Any) -> None:
        hits[kprobe.symbol_name or ""] += 1

    kernel.register_kprobe(Kprobe(symbol_name="vfs_read", pre_handler=count))
    return hits


def test_results_and_errnos_of_system_calls(kernel: Kernel, task: GuestTask) -> None:
    calls = kernel.guest.syscalls
    assert calls.call(task, "getpid") == FIRST_PID
    with pytest.raises(KernelError) as caught:
        calls.call(task, "close", 999)
    assert caught.value.errno == errno.EBADF
    assert kernel.guest.runner.syscall(task, 9999) == (1 << 64) - errno.ENOSYS


def test_a_blocked_read_is_one_system_call(
    kernel: Kernel, task: GuestTask, fd: int, entries: Counter[str]
) -> None:
    for _ in range(3):
        block_in(kernel, task, fd)
        assert tasks(kernel)[FIRST_PID].state == "S"
    assert kernel.call("gcd", 12, 18) == 6
    other = kernel.guest.processes.task_of(FIRST_PID + 1, 0, 0)
    assert kernel.guest.syscalls.call(other, "getpid") == FIRST_PID + 1
    assert kernel.guest.read_file(task, fd, 100, lambda: b"data") == b"data"
    assert entries["vfs_read"] == 1
    assert task.request is None
    assert kernel.guest.read_file(task, fd, 100, lambda: b"") == b""
    assert entries["vfs_read"] == 2


def test_a_read_of_another_size_is_another_call(
    kernel: Kernel, task: GuestTask, fd: int, entries: Counter[str]
) -> None:
    """A read of another size than the sleeping read of the task is a new call: the host has interrupted the
    earlier read.
    """
    block_in(kernel, task, fd)
    assert kernel.guest.read_file(task, fd, 4, lambda: b"data that is cut") == b"data"
    assert entries["vfs_read"] == 2


def test_another_call_interrupts_a_blocked_one(kernel: Kernel, task: GuestTask, fd: int) -> None:
    """A system call of a task interrupts the sleeping read of the same task, which gives its buffer back."""
    for _ in range(2 * MAX_BUFFERS):
        block_in(kernel, task, fd)
        assert kernel.guest.syscalls.call(task, "getpid") == FIRST_PID
        assert task.request is None
    block_in(kernel, task, fd)
    kernel.guest.runner.interrupt(task)
    assert task.request is None


def test_a_process_ends_while_its_read_blocks(kernel: Kernel, task: GuestTask, fd: int) -> None:
    block_in(kernel, task, fd)
    kernel.guest.processes.exit(FIRST_PID)
    assert FIRST_PID not in [t.pid for t in kernel.guest.processes]
    assert kernel.call("gcd", 12, 18) == 6


def elsewhere(action: Callable[[], int]) -> Callable[[], int]:
    def consume() -> int:
        raise DeferToGuest(action)

    return consume


def test_a_file_that_needs_the_guest(kernel: Kernel, task: GuestTask, fd: int) -> None:
    """If a write needs a kernel function, the writer sleeps until another task has run the function, and then
    gets the result.
    """
    action = elsewhere(lambda: kernel.call("gcd", 12, 18))
    assert kernel.guest.write_file(task, fd, b"gcd 12 18", action, ExitStack()) == 6

    fails = elsewhere(lambda: kernel.call("strlen", 0))
    with pytest.raises(KernelError) as caught:
        kernel.guest.write_file(task, fd, b"strlen 0", fails, ExitStack())
    assert caught.value.errno == errno.EFAULT
    assert "Oops" in dmesg(kernel)
    assert kernel.guest.write_file(task, fd, b"", lambda: 5, ExitStack()) == 5


def test_an_unexpected_error_of_a_file_is_raised_outside(kernel: Kernel, task: GuestTask, fd: int) -> None:
    def fail() -> bytes:
        raise ZeroDivisionError

    for _ in range(MAX_BUFFERS + 1):
        with pytest.raises(ZeroDivisionError):
            kernel.guest.read_file(task, fd, 10, fail)
    assert kernel.guest.read_file(task, fd, 10, lambda: b"fine") == b"fine"


def test_errno_of_a_file(kernel: Kernel, task: GuestTask, fd: int) -> None:
    def fail() -> int:
        raise KernelError(errno.ENODEV)

    with pytest.raises(KernelError) as caught:
        kernel.guest.write_file(task, fd, b"x", fail, ExitStack())
    assert caught.value.errno == errno.ENODEV


def test_a_panic_ends_blocked_calls(kernel: Kernel, task: GuestTask, fd: int) -> None:
    block_in(kernel, task, fd)
    with pytest.raises(KernelError):
        kernel.call("panic", "by a test")
    for _ in range(2):
        with pytest.raises(KernelError) as caught:
            kernel.guest.read_file(task, fd, 100, lambda: b"data")
        assert caught.value.errno == errno.EIO
    with pytest.raises(KernelError) as caught:
        kernel.guest.processes.exit(FIRST_PID)
    assert caught.value.errno == errno.EIO


def test_a_run_that_breaks_off_is_the_guests_end(kernel: Kernel, task: GuestTask) -> None:
    """An exception such as KeyboardInterrupt in the middle of a run ends the guest, whose state is then
    unknown.
    """

    def interrupted(_regs: Any) -> None:
        raise KeyboardInterrupt

    address = kernel.image.kallsyms.lookup_name("__x64_sys_getpid")
    assert address is not None
    kernel.machine.breakpoints[address] = interrupted
    kernel.machine.text.poke(address, b"\xcc")
    with pytest.raises(KeyboardInterrupt):
        kernel.guest.syscalls.call(task, "getpid")
    kernel.machine.text.poke(address, kernel.machine.text.original(address, 1))
    assert kernel.guest.is_dead
    with pytest.raises(KernelError) as caught:
        kernel.guest.syscalls.call(task, "getpid")
    assert caught.value.errno == errno.EIO


def test_a_stack_that_takes_no_interrupt_is_the_guests_end(kernel: Kernel, task: GuestTask) -> None:
    assert kernel.guest.syscalls.call(task, "getpid") == FIRST_PID
    kernel.machine.regs.sp = 0
    kernel.machine.clock.advance(NSEC_PER_JIFFY)
    for _ in range(2):
        with pytest.raises(KernelError) as caught:
            kernel.guest.syscalls.call(task, "getpid")
        assert caught.value.errno == errno.EIO
    assert kernel.guest.is_dead


@pytest.mark.parametrize("event", ["call_begins", "call_ended"])
def test_an_observer_that_raises_leaves_no_call_under_way(
    kernel: Kernel, task: GuestTask, event: str
) -> None:
    executive = kernel.guest.runner
    told = getattr(executive.events, event)

    def fail(**_kwargs: bool) -> None:
        told.remove(fail)
        raise RuntimeError("an observer's fault")

    told.append(fail)
    with pytest.raises(RuntimeError, match="an observer's fault"):
        kernel.guest.syscalls.call(task, "getpid")
    assert not executive.is_busy
    assert task.request is None
    other = kernel.guest.processes.task_of(FIRST_PID + 1, 0, 0)
    assert kernel.guest.syscalls.call(other, "getpid") == FIRST_PID + 1
    assert kernel.guest.syscalls.call(task, "getpid") == FIRST_PID
