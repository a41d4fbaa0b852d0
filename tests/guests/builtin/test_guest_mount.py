"""The mount over the guest: the task that makes a request, and what a failed or interrupted request leaves
behind.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from emulated_kernel.guests.builtin.builtin_kernel import MAX_BUFFERS
from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.builtin.conftest import FIRST_PID, ScriptedWatch, dmesg, tasks
from tests.kprobes.listed import list_lines

FIRST, SECOND = Client(FIRST_PID, 0, 0), Client(FIRST_PID + 1, 0, 0)
PIPE = "/tracing/trace_pipe"
GUEST_FILES = 4096
"""Number of descriptors that the guest has for files of the mount."""


@pytest.fixture
def mount(kernel: Kernel, watch: ScriptedWatch) -> Mount:
    watch.comms = {FIRST.pid: "first", SECOND.pid: "second"}
    return kernel.mount()


@pytest.fixture
def watched(kernel: Kernel, mount: Mount) -> Mount:
    """Return the mount of a kernel with a probe, so that requests run through the guest."""
    kernel.register_kprobe(Kprobe(symbol_name="strlen", pre_handler=lambda _kprobe, _regs: None))
    return mount


def errno_of(action: Callable[[], object]) -> int:
    with pytest.raises(KernelError) as caught:
        action()
    return caught.value.errno or 0


def test_a_marker_is_its_writers(kernel: Kernel, mount: Mount) -> None:
    """Without a probe, a write to trace_marker does not run the guest, but the record has the pid of the
    writer.
    """
    marker = {client: mount.open(client, "/tracing/trace_marker", os.O_WRONLY) for client in (FIRST, SECOND)}
    for client in (FIRST, SECOND, SECOND, FIRST):
        mount.write(client, marker[client], b"here", 0)
    text = kernel.trace.trace_text()
    writers = [line.split()[0] for line in text.splitlines() if "tracing_mark_write" in line]
    assert writers == ["<...>-500", "<...>-501", "<...>-501", "<...>-500"]


def test_an_open_that_fails_in_the_guest_is_ours_alone(kernel: Kernel, watched: Mount) -> None:
    """If an open kills the guest's task, the file stays open on the host: trace_pipe takes no second reader
    until the release.
    """

    def kill(_kprobe: Kprobe, regs: Any) -> None:
        regs.di = 0xFFFFFFFF

    killer = Kprobe(symbol_name="fd_install", pre_handler=kill)
    kernel.register_kprobe(killer)
    handle = watched.open(FIRST, PIPE, os.O_RDONLY)
    assert "end trace" in dmesg(kernel)
    kernel.unregister_kprobe(killer)
    assert errno_of(lambda: watched.open(SECOND, PIPE, os.O_RDONLY)) == errno.EBUSY
    watched.release(handle)
    watched.release(watched.open(FIRST, PIPE, os.O_RDONLY))


def test_files_that_the_guest_has_no_room_for(kernel: Kernel, mount: Mount) -> None:
    """If more files are open before the first probe than the guest has descriptors, the host alone serves the
    rest.
    """
    opened = [mount.open(FIRST, "/machine/version", os.O_RDONLY) for _ in range(GUEST_FILES + 1)]
    reads: list[Kprobe] = []
    kprobe = Kprobe(symbol_name="vfs_read", pre_handler=lambda kprobe, _regs: reads.append(kprobe))
    kernel.register_kprobe(kprobe)
    assert len(list_lines(kernel.kprobes)) == 1
    texts = {mount.read(FIRST, handle, 100, 0) for handle in (opened[0], opened[-1])}
    assert len(texts) == 1
    assert reads == [kprobe]
    for handle in opened:
        mount.release(handle)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR])
def test_reads_given_up_keep_no_buffers(kernel: Kernel, watched: Mount, error: int) -> None:
    """A read that a client gives up ends in the guest, and its buffer is free again.

    Otherwise, sleeping reads would use up all buffers.
    """
    pipe = watched.open(FIRST, PIPE, os.O_RDONLY)
    for pid in range(FIRST_PID, FIRST_PID + MAX_BUFFERS + 1):
        client = Client(pid, 0, 0)
        with pytest.raises(WouldBlock):
            watched.read(client, pipe, 100, 0)
        assert tasks(kernel)[pid].state == "S"
        watched.give_up(client, pipe, error)
        assert kernel.guest.processes.known(pid).request is None


def test_a_read_given_up_ends_in_the_guest_with_its_errno(kernel: Kernel, watched: Mount) -> None:
    pipe = watched.open(FIRST, PIPE, os.O_RDONLY)
    with pytest.raises(WouldBlock):
        watched.read(FIRST, pipe, 100, 0)
    ended = kernel.guest.processes.known(FIRST.pid).request
    assert ended is not None
    watched.give_up(FIRST, pipe, errno.EAGAIN)
    assert ended.result == (1 << 64) - errno.EAGAIN
    watched.give_up(FIRST, pipe, errno.EAGAIN)
    watched.give_up(SECOND, pipe, errno.EAGAIN)


def test_tracefs_at_the_root_has_no_scratch(kernel: Kernel) -> None:
    mount = kernel.mount(RootLayout.TRACEFS)
    assert errno_of(lambda: mount.getattr("/scratch")) == errno.ENOENT
    assert errno_of(lambda: mount.create(FIRST, "/scratch/file", 0o644, os.O_RDWR)) == errno.ENOENT


def test_data_that_the_guest_has_corrupted(kernel: Kernel, mount: Mount) -> None:
    """If the guest's log and task list are damaged, intact data is shown, and each damage is reported once in
    machine/dmesg.
    """
    log = mount.open(FIRST, "/machine/dmesg", os.O_RDONLY)
    before = mount.read(FIRST, log, 1 << 16, 0)
    symbols, memory = kernel.image.kallsyms, kernel.machine.memory
    for symbol, offset in (("log_next_seq", 0), ("init_task", kernel.image.abi["task_struct.tasks"])):
        address = symbols.lookup_name(symbol)
        assert address is not None
        memory.write(address + offset, b"\xff" * 8)
    for _ in range(2):
        text = mount.read(FIRST, log, 1 << 16, 0)
        assert text.startswith(before)
        assert text.count(b"the log is damaged") == 1
        listed = mount.open(FIRST, "/machine/tasks", os.O_RDONLY)
        _, *tasks = mount.read(FIRST, listed, 1 << 16, 0).splitlines()
        assert [line.split()[0] for line in tasks] == [b"0"]
    assert mount.read(FIRST, log, 1 << 16, 0).count(b"the task list is damaged") == 1


def test_truncation_may_run_the_guest(kernel: Kernel, watched: Mount) -> None:
    """An open of synthetic_events with O_TRUNC deletes all synthetic events, and the guest removes the
    events' directories.
    """
    path = "/tracing/synthetic_events"
    made = watched.open(FIRST, path, os.O_WRONLY)
    watched.write(FIRST, made, b"made u64 x\n", 0)
    watched.release(made)
    watched.release(watched.open(FIRST, path, os.O_WRONLY | os.O_TRUNC))
    assert list(kernel.tracing.synthetic_events.records()) == []
    assert kernel.call("strlen", "four") == 4
    assert errno_of(lambda: watched.open(FIRST, "/tracing/events", os.O_WRONLY | os.O_TRUNC)) == errno.EISDIR


def test_two_mounts_of_a_kernel(kernel: Kernel, watch: ScriptedWatch) -> None:
    """When the first probe is registered, the guest opens the files that are open on either mount, so that
    reads hit.
    """
    watch.comms = {FIRST.pid: "first"}
    mounts = kernel.mount(), kernel.mount()
    handles = [mount.open(FIRST, "/machine/version", os.O_RDONLY) for mount in mounts]
    seen: list[int] = []
    kernel.register_kprobe(Kprobe(symbol_name="vfs_read", pre_handler=lambda _kprobe, _regs: seen.append(1)))
    for mount, handle in zip(mounts, handles, strict=True):
        before = len(seen)
        mount.read(FIRST, handle, 100, 0)
        assert len(seen) == before + 1
