"""Hooked calls that sleep, are interrupted, or never return: the task that a call belongs to, and what
becomes of the call.
"""

from __future__ import annotations

import errno
import os

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.kprobes.return_hook.conftest import Boot, dmesg
from tests.kprobes.return_hook.test_kretprobe import PER_TASK, accounted
from tests.kprobes.test_functions import _session as session
from tests.sample import share

PIPE = "/tracing/trace_pipe"
ACCOUNTED = [
    (stack, (1, 0)[(number + second) % 2]) for number, stack in enumerate(SHADOW_STACKS) for second in (0, 1)
]
"""Each shadow stack with both values of maxactive, every other one with 0 first."""


def sleepers(mount: Mount, number: int) -> tuple[int, list[Client]]:
    """Open a pipe, and let `number` processes wait in vfs_read of the pipe.

    Return its handle and the processes.
    """
    clients = [Client(700 + n, 0, 0) for n in range(number)]
    pipe = mount.open(clients[0], PIPE, os.O_RDONLY)
    for client in clients:
        with pytest.raises(WouldBlock):
            mount.read(client, pipe, 100, 0)
    return pipe, clients


def test_eight_sleepers_and_one_instance(kernel: Kernel, stack: str) -> None:
    """Of eight calls that sleep at the same time, a probe with maxactive=1 sees one and misses seven
    (samples/quirks.json, maxactive1_8_sleepers).

    With a shadow stack per task, the probe sees all.
    """
    mount = kernel.mount()
    rp = Kretprobe(symbol_name="vfs_read", handler=lambda *_: None, maxactive=1)
    kernel.register_kretprobe(rp)
    pipe, clients = sleepers(mount, 8)
    assert rp.hook is not None
    kept = 8 if stack in PER_TASK else 1
    assert (rp.hook.active, rp.nmissed, rp.returns) == (kept, 8 - kept, 0)
    for client in clients:
        mount.give_up(client, pipe, errno.EINTR)
    assert (rp.hook.active, rp.nmissed, rp.returns) == (0, 8 - kept, kept)


def test_unregistered_while_calls_are_pending(kernel: Kernel) -> None:
    """Calls pending at the unregistration return to their callers without the handler.

    Only then is the return hook unused.
    """
    mount = kernel.mount()
    hooks = kernel.kretprobes.hooks
    keep = Kprobe(symbol_name="strlen", pre_handler=lambda *_: None)
    kernel.register_kprobe(keep)
    rp = Kretprobe(symbol_name="vfs_read", handler=lambda *_: None)
    kernel.register_kretprobe(rp)
    pipe, clients = sleepers(mount, 3)
    kernel.unregister_kretprobe(rp)
    with pytest.raises(KernelError) as caught:
        hooks.select_return_hook("objpool")
    assert caught.value.errno == errno.EBUSY
    for client in clients:
        mount.give_up(client, pipe, errno.EINTR)
    assert rp.returns == 0
    assert not [line for line in dmesg(kernel) if "BUG" in line or "Oops" in line]
    hooks.select_return_hook("objpool")
    kernel.register_kretprobe(rp)


def test_a_task_that_ends_in_a_hooked_call(kernel: Kernel) -> None:
    """A task that exits in a hooked call frees the call's node: each pending call is counted as flushed.

    do_exit and exit_group never return. Their nodes are flushed when the memory of the task is freed.
    """
    guest = kernel.guest
    rp = Kretprobe(symbol_name="__x64_sys_exit_group", handler=lambda *_: None, maxactive=1)
    nested = Kretprobe(symbol_name="do_exit", handler=lambda *_: None, maxactive=1)
    kernel.register_kretprobes([rp, nested])
    for pid in range(600, 605):
        guest.processes.task_of(pid, 0, 0)
        guest.processes.exit(pid)
    guest.processes.task_of(605, 0, 0)
    for probe in (rp, nested):
        assert probe.hook is not None
        assert (probe.hook.active, probe.returns, probe.nmissed) == (0, 0, 0)
        assert probe.hook.flushed == 5


def test_a_killed_task_gives_its_instances_back(kernel: Kernel) -> None:
    rp = Kretprobe(symbol_name="crc32_le", handler=lambda *_: None, maxactive=1)
    kernel.register_kretprobe(rp)
    for flushed in (1, 2, 3):
        with pytest.raises(KernelError) as caught:
            kernel.call("crc32_le", 0, 0x5000, 4)
        assert caught.value.errno == errno.EFAULT
        kernel.guest.processes.worker()
        assert rp.hook is not None
        assert rp.hook.flushed == flushed
    kernel.call("crc32_le", 0, "four", 4)
    assert (rp.returns, rp.nmissed) == (1, 0)


def _entries(kernel: Kernel) -> list[int]:
    """Return the addresses of the fentry sites on which a kprobe can be registered."""
    found = []
    for entry in sorted(kernel.image.mcount):
        probe = Kprobe(addr=entry, disabled=True)
        try:
            kernel.kprobes.register_kprobe(probe)
        except KernelError:
            continue
        kernel.kprobes.unregister_kprobe(probe)
        found.append(entry)
    return found


@pytest.fixture(scope="module")
def counted() -> tuple[object, dict[int, int]]:
    """Return the results of a session without hooks, and function -> number of its calls in the session."""
    with Kernel(MachineConfig(profile="linux-6.1")) as kernel:
        entered = dict.fromkeys(_entries(kernel), 0)

        def count(kprobe: Kprobe, _regs: object) -> None:
            entered[kprobe.address] += 1

        kernel.register_kprobes([Kprobe(addr=entry, pre_handler=count) for entry in entered])
        return session(kernel), entered


@pytest.mark.parametrize(("stack", "maxactive"), share(ACCOUNTED, 0, 2))
def test_every_entry_is_accounted_for(
    boot: Boot, counted: tuple[object, dict[int, int]], stack: str, maxactive: int
) -> None:
    """With all functions hooked, a session with task switches, an exit and a fork has the same results.

    Each kretprobe counts every call of its function once.
    """
    hooking, (expected, entered) = boot(return_hook=stack), counted
    hooked = [Kretprobe(addr=entry, handler=lambda *_: None, maxactive=maxactive) for entry in entered]
    hooking.register_kretprobes(hooked)
    assert session(hooking) == expected
    wrong = {
        hex(rp.address): (entered[rp.address], rp) for rp in hooked if accounted(rp) != entered[rp.address]
    }
    assert wrong == {}
    assert sum(rp.returns for rp in hooked) > 800
    hooking.unregister_kretprobes(hooked)
