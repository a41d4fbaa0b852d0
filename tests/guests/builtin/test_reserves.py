"""Reserves of limited resources: requests that sleep or use up a resource leave enough for other requests."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import pytest

from emulated_kernel.guests.builtin.builtin_kernel import MAX_BUFFERS
from emulated_kernel.guests.common.host_processes import HostProcesses
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.builtin.conftest import FIRST_PID, ScriptedWatch, tasks

READERS = [Client(FIRST_PID + number, 0, 0) for number in range(1, 1001)]
OTHER = Client(FIRST_PID, 0, 0)
PIPE = "/tracing/trace_pipe"
LIST = "/kprobes/list"
FILE = "/scratch/new"


@pytest.fixture
def mount(kernel: Kernel) -> Mount:
    """Return the mount of a kernel with a probe, so that requests run through the guest."""
    mount = kernel.mount()
    kernel.register_kprobe(Kprobe(symbol_name="strlen", pre_handler=lambda _kprobe, _regs: None))
    return mount


@contextmanager
def opened(mount: Mount, path: str, flags: int) -> Iterator[int]:
    handle = mount.open(OTHER, path, flags)
    try:
        yield handle
    finally:
        mount.release(handle)


def read(mount: Mount, path: str) -> bytes:
    with opened(mount, path, os.O_RDONLY) as handle:
        return mount.read(OTHER, handle, 65536, 0)


def write(mount: Mount, path: str, data: bytes) -> None:
    with opened(mount, path, os.O_WRONLY) as handle:
        assert mount.write(OTHER, handle, data, 0) == len(data)


def everything_answers(mount: Mount, name: str) -> None:
    """Assert that definitions, lists, the log, scratch/ and disarming work."""
    write(mount, "/tracing/kprobe_events", b"p:%s vfs_write name=+0($arg2):string" % name.encode())
    assert name in read(mount, "/tracing/kprobe_events").decode()
    write(mount, f"/tracing/events/kprobes/{name}/enable", b"1")
    assert b"vfs_write" in read(mount, LIST)
    assert read(mount, "/machine/dmesg")
    handle = mount.create(OTHER, FILE, 0o644, os.O_RDWR)
    assert mount.write(OTHER, handle, b"text", 0) == 4
    mount.release(handle)
    assert read(mount, FILE) == b"text"
    mount.unlink(OTHER, FILE)
    write(mount, f"/tracing/events/kprobes/{name}/enable", b"0")
    write(mount, "/tracing/kprobe_events", b"-:%s" % name.encode())


def test_a_thousand_readers_that_sleep_keep_nobody_waiting(
    kernel: Kernel, watch: ScriptedWatch, mount: Mount
) -> None:
    pipe = mount.open(OTHER, PIPE, os.O_RDONLY)
    everything_answers(mount, "before")
    read(mount, PIPE.replace("trace_pipe", "trace"))
    before = set(tasks(kernel))
    for client in READERS:
        with pytest.raises(WouldBlock):
            mount.read(client, pipe, 1 << 17, 0)
    assert len(tasks(kernel)) == len(before) + len(READERS)
    everything_answers(mount, "meanwhile")
    for client in READERS[::2]:
        mount.give_up(client, pipe, errno.EINTR)
        assert kernel.guest.processes.known(client.pid).request is None
    watch.pending_exits += [client.pid for client in READERS]
    everything_answers(mount, "afterwards")
    assert set(tasks(kernel)) == before
    mount.release(pipe)


def test_sleeping_readers_get_what_is_theirs(kernel: Kernel) -> None:
    """Sleeping reads of several tasks share one buffer of the guest, but every read returns its own data."""
    guest = kernel.guest

    def sleep() -> bytes:
        raise WouldBlock

    readers = [guest.processes.task_of(client.pid, 0, 0) for client in READERS[:9]]
    fds = [guest.syscalls.open(reader, "/ours", os.O_RDWR, hostfs=lambda *_: 0) for reader in readers]
    for reader, fd in zip(readers, fds, strict=True):
        with pytest.raises(WouldBlock):
            guest.read_file(reader, fd, 100, sleep)
    for number, (reader, fd) in enumerate(zip(readers, fds, strict=True)):
        data = b"data%d" % number
        assert guest.read_file(reader, fd, 100, partial(bytes, data)) == data
        assert reader.request is None
        assert kernel.machine.memory.read(guest._read_buffer, 5) == data


# If a resource is exhausted, the files that show why, and that help to free the resource, are still served.

SEEN = (LIST, "/machine/dmesg", "/machine/tasks", "/tracing/kprobe_events", "/tracing/trace")
EVENT = "/tracing/events/kprobes/kept"
NEWCOMER = Client(FIRST_PID + 5000, 0, 0)
"""A client without a guest task: its requests would need a task, a buffer and a descriptor."""


@contextmanager
def no_buffers(kernel: Kernel, _mount: Mount) -> Iterator[None]:
    buffers = [kernel.guest.buffers.get() for _ in range(MAX_BUFFERS - 1)]
    with pytest.raises(KernelError, match="under way"):
        buffers.append(kernel.guest.buffers.get())
    yield
    for buffer in buffers:
        kernel.guest.buffers.put(buffer)


@contextmanager
def no_memory(_kernel: Kernel, mount: Mount) -> Iterator[None]:
    """Use up the guest's memory with a file in scratch/ during the block."""
    handle = mount.create(OTHER, "/scratch/filler", 0o644, os.O_RDWR)
    at, size = 0, 1 << 17
    while size:
        try:
            at += mount.write(OTHER, handle, bytes(size), at)
        except KernelError:
            size //= 2
    yield
    mount.release(handle)
    mount.unlink(OTHER, "/scratch/filler")


@contextmanager
def no_descriptors(_kernel: Kernel, mount: Mount) -> Iterator[None]:
    """Use up the guest's descriptors by opening one file repeatedly, during the block."""
    with ExitStack() as files:
        for _ in range(5000):
            handle = files.enter_context(opened(mount, LIST, os.O_RDONLY))
            if getattr(mount._handles[handle], "fd", 0) is None:
                break
        else:
            pytest.fail("as many as that are to be had")
        yield


@contextmanager
def no_tasks(_kernel: Kernel, mount: Mount) -> Iterator[None]:
    """During the block, the guest's memory is used up, and clients without a task have made requests."""
    with no_memory(_kernel, mount):
        for client in READERS[:30]:
            mount.readdir("/")
            mount.opendir(client, "/")
        yield


@pytest.mark.parametrize("exhausted", [no_buffers, no_memory, no_descriptors, no_tasks])
def test_what_is_exhausted_keeps_nobody_from_looking_and_ending_it(
    exhausted: Callable[[Kernel, Mount], AbstractContextManager[None]],
    kernel: Kernel,
    mount: Mount,
) -> None:
    write(mount, "/tracing/kprobe_events", b"p:kept vfs_write")
    write(mount, f"{EVENT}/enable", b"1")
    with exhausted(kernel, mount):
        for client in (OTHER, NEWCOMER):
            for path in (
                LIST,
                "/machine/dmesg",
                "/machine/tasks",
                "/tracing/kprobe_events",
                "/tracing/trace",
            ):
                handle = mount.open(client, path, os.O_RDONLY)
                assert mount.read(client, handle, 65536, 0)
                mount.release(handle)
            mount.opendir(client, "/kprobes")
            assert mount.readdir("/kprobes")
        write(mount, f"{EVENT}/enable", b"0")
        assert b"DISABLED" in read(mount, LIST) or b"vfs_write" not in read(mount, LIST)
        write(mount, "/tracing/kprobe_events", b"-:kept")
    everything_answers(mount, "afterwards")


def test_without_descriptors_of_the_hosts() -> None:
    """If the daemon has no free descriptor, files are still served. Processes are followed and
    named later.
    """
    with Kernel(MachineConfig(), HostProcesses()) as kernel, subprocess.Popen(["sleep", "60"]) as process:
        mount = kernel.mount()
        kernel.register_kprobe(Kprobe(symbol_name="strlen", pre_handler=lambda _kprobe, _regs: None))
        client = Client(process.pid, 0, 0)
        lowest = os.dup(0)
        os.close(lowest)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
            handle = mount.open(client, LIST, os.O_RDONLY)
            assert mount.read(client, handle, 65536, 0)
            mount.release(handle)
            assert read(mount, "/machine/dmesg")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        everything_answers(mount, "afterwards")
        handle = mount.open(client, LIST, os.O_RDONLY)
        assert tasks(kernel)[process.pid].comm == "sleep"
        mount.release(handle)
        process.kill()
