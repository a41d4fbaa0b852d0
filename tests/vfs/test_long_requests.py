"""Long requests: the control lock is free between two lines, records and pieces."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.vfs.files import ROOT, assert_errno

OTHER = Client(pid=4322, uid=0, gid=0)
LINES = {
    "/machine/call": "int_sqrt 9\n",
    "/machine/clock": "virtual seed 7\n",
    "/machine/limits": "probes 100\n",
    "/machine/load": "stop\n",
    "/machine/modules": "load counter\nunload counter\n",
}
"""Path of a file -> lines that can be repeated."""


@pytest.fixture
def mount() -> Iterator[Mount]:
    with Kernel() as kernel:
        mount = kernel.mount()
        yield mount
        mount.close()


def write(mount: Mount, path: str, text: str, client: Client = ROOT) -> int:
    handle = mount.open(client, path, os.O_WRONLY | os.O_APPEND)
    try:
        return mount.write(client, handle, text.encode(), 0)
    finally:
        mount.release(handle)


def read(mount: Mount, path: str, client: Client = ROOT, size: int = 1 << 17) -> str:
    handle = mount.open(client, path, os.O_RDONLY)
    try:
        data = b""
        while part := mount.read(client, handle, size, len(data)):
            data += part
        return data.decode()
    finally:
        mount.release(handle)


@contextmanager
def others(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let another client read a file whenever a long request leaves the lock. Yield what it has read."""
    answers: list[str] = []

    def answer(_lock: ControlLock) -> None:
        if len(answers) < 1000:
            answers.append(read(mount, "/kprobes/list", OTHER))

    with monkeypatch.context() as patch:
        patch.setattr(ControlLock, "yield_lock", answer)
        yield answers


@pytest.mark.parametrize("is_probed", [False, True], ids=["unprobed", "probed"])
@pytest.mark.parametrize("path", LINES)
def test_a_write_leaves_the_lock_between_two_lines(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, path: str, is_probed: bool
) -> None:
    if is_probed:
        write(mount, "/kprobe_events", "p:probe vfs_write\n")
        write(mount, "/tracing/events/kprobes/probe/enable", "1\n")
    text = LINES[path] * 10
    with others(mount, monkeypatch) as answers:
        assert write(mount, path, text) == len(text)
    assert len(answers) == text.count("\n") - 1
    assert all("vfs_write" in answer for answer in answers) or not is_probed


def test_results_of_all_lines_are_kept(mount: Mount) -> None:
    write(mount, "/machine/call", "int_sqrt 9\nint_sqrt 16\n")
    assert read(mount, "/machine/call") == "int_sqrt = 0x3 (3)\nint_sqrt = 0x4 (4)\n"
    with assert_errno(errno.ENOENT):
        write(mount, "/machine/call", "int_sqrt 25\nno_such_function\nint_sqrt 36\n")
    first, second = read(mount, "/machine/call").splitlines()
    assert first == "int_sqrt = 0x5 (5)"
    assert second.startswith("no_such_function: ")


def test_lines_are_parsed_before_the_first_one_takes_effect(mount: Mount) -> None:
    before = read(mount, "/machine/clock").split("time")[0]
    with assert_errno(errno.EINVAL):
        write(mount, "/machine/clock", "virtual seed 99\nnonsense\n")
    assert read(mount, "/machine/clock").split("time")[0] == before


@pytest.mark.parametrize("is_probed", [False, True], ids=["unprobed", "probed"])
def test_the_write_of_a_killed_process_stops(mount: Mount, is_probed: bool) -> None:
    if is_probed:
        write(mount, "/kprobe_events", "p:probe vfs_write\n")
        write(mount, "/tracing/events/kprobes/probe/enable", "1\n")
    asked = iter([False, False, True])
    mount.lock.is_abandoned = lambda: next(asked)
    with assert_errno(errno.EINTR):
        write(mount, "/machine/call", "int_sqrt 9\n" * 1000)
    assert read(mount, "/machine/call", OTHER).count("int_sqrt") == 3
    mount.lock.is_abandoned = lambda: False
    assert write(mount, "/machine/call", "int_sqrt 9\n" * 3) == 33
