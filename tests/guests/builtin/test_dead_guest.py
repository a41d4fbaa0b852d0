"""The mount of a dead guest: control files are served, and requests on scratch/ fail with EIO at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from emulated_kernel.guests.builtin.runner import guest_runner
from emulated_kernel.guests.builtin.runner.guest_runner import MAX_NOTES
from emulated_kernel.guests.builtin.runner.syscalls import Syscalls
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.guest_info import GIVEN_UP
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount

CLIENT = Client(500, 0, 0)


def panic(kernel: Kernel) -> None:
    with pytest.raises(KernelError) as caught:
        kernel.call("panic", "by a test")
    assert caught.value.errno == errno.EFAULT


def read_text(mount: Mount, path: str) -> str:
    handle = mount.open(CLIENT, path, os.O_RDONLY)
    data = mount.read(CLIENT, handle, 1 << 16, 0)
    mount.release(handle)
    return data.decode()


def test_files_of_ours_answer_without_the_guest(kernel: Kernel) -> None:
    mount = kernel.mount()
    opened = mount.open(CLIENT, "/kprobe_events", os.O_RDONLY)
    handle = mount.open(CLIENT, "/kprobe_events", os.O_WRONLY)
    mount.write(CLIENT, handle, b"p:probe vfs_read\n", 0)
    mount.release(handle)
    before = {path: read_text(mount, path) for path in ("/kprobes/list", "/kprobe_events")}
    panic(kernel)
    assert {path: read_text(mount, path) for path in before} == before
    assert "Kernel panic - not syncing: by a test" in read_text(mount, "/machine/dmesg")
    assert mount.readdir("/")
    assert mount.getattr("/kprobes/list").mode
    assert isinstance(mount.read(CLIENT, opened, 100, 0), bytes)
    mount.release(opened)
    writer = mount.open(CLIENT, "/kprobe_events", os.O_WRONLY)
    mount.write(CLIENT, writer, b"-:probe\n", 0)
    mount.release(writer)
    assert read_text(mount, "/kprobes/list") == ""


@pytest.mark.parametrize("cpus", [1, 2])
def test_a_guest_that_makes_hypercalls_for_too_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    """Each run after a hypercall has its own budget, so only the time of the whole call ends the loop."""
    monkeypatch.setattr(guest_runner, "MAX_CALL", 0.2)
    with Kernel(MachineConfig(cpus=cpus)) as kernel:
        order = 9
        pages = kernel.call("__get_free_pages", 0, order)
        size = PAGE_SIZE << order
        kernel.call("memset", pages, 0, size)
        with pytest.raises(KernelError) as caught:
            kernel.call("unregister_kprobes", pages, size // 8)
        assert caught.value.errno == errno.EFAULT
        log = read_text(kernel.mount(), "/machine/dmesg")
        assert log.endswith("kprobefs: the guest was given up: a system call kept it busy for 0.2 s\n")


def test_everything_that_needs_the_guest_is_eio(kernel: Kernel) -> None:
    mount = kernel.mount()
    created = mount.create(CLIENT, "/scratch/file", 0o644, os.O_RDWR)
    panic(kernel)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: mount.read(CLIENT, created, 10, 0),
        lambda: mount.write(CLIENT, created, b"x", 0),
        lambda: mount.fgetattr(created),
        lambda: mount.getattr("/scratch"),
        lambda: mount.readdir("/scratch"),
        lambda: mount.open(CLIENT, "/scratch/file", os.O_RDONLY),
        lambda: mount.create(CLIENT, "/scratch/other", 0o644, os.O_RDWR),
        lambda: mount.mkdir(CLIENT, "/scratch/dir", 0o755),
        lambda: mount.unlink(CLIENT, "/scratch/file"),
        lambda: mount.truncate(CLIENT, "/scratch/file", 0),
    )
    for attempt in attempts:
        with pytest.raises(KernelError) as caught:
            attempt()
        assert caught.value.errno == errno.EIO
    mount.release(created)


def test_a_guest_that_says_it_has_read_more(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a damaged guest returns more bytes than a read asked for, the read fails with EIO."""
    mount = kernel.mount()
    handle = mount.create(CLIENT, "/scratch/file", 0o644, os.O_RDWR)
    assert mount.write(CLIENT, handle, b"some text", 0) == 9
    with monkeypatch.context() as patch:
        patch.setattr(Syscalls, "call", lambda *_arguments, **_options: 5)
        with pytest.raises(KernelError) as caught:
            mount.read(CLIENT, handle, 4, 0)
    assert caught.value.errno == errno.EIO
    assert mount.read(CLIENT, handle, 4, 0) == b"some"


def test_the_reason_is_kept_after_many_notes(kernel: Kernel) -> None:
    """If the host has kept its maximum number of messages, it keeps the reason of the guest's end too."""
    runner = kernel.guest.runner
    for number in range(MAX_NOTES + 1):
        runner.note(f"message {number}")
    assert len(runner.notes) == MAX_NOTES
    task = kernel.image.kallsyms.lookup_name("init_task")
    assert task is not None
    kernel.machine.memory.write(task, b"\xff" * 0x400)
    with pytest.raises(KernelError):
        kernel.call("int_sqrt", 4)
    assert kernel.guest.is_dead
    assert read_text(kernel.mount(), "/machine/dmesg").count(GIVEN_UP) == 1
