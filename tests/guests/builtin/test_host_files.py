"""Files of the host are opened without the control lock, because such a file may be slow or on this very
mount.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.fuse.harness import PATIENCE
from tests.guests.builtin.conftest import FIRST_PID, dmesg

CLIENT = Client(FIRST_PID, 0, 0)
FILE = PREBUILT / "x86_64" / "modules" / "ktgt.ko"
WRITES = {
    "/machine/modules": [
        b"load counter-user",
        b"unload counter_user\nunload counter",
        b"load %s" % bytes(FILE),
    ],
    "/tracing/kprobe_events": [b"p:one vfs_read name=+0($arg2):string", b"r:two vfs_read $retval"],
    "/tracing/events/kprobes/enable": [b"1"],
    "/tracing/current_tracer": [b"function_graph", b"nop"],
    "/tracing/trace_marker": [b"here"],
    "/machine/call": [b'strlen "text"'],
    "/machine/load": [b"files duration=1", b"stop"],
    "/machine/clock": [b"virtual"],
}


@pytest.fixture
def mount(kernel: Kernel) -> Mount:
    return kernel.mount()


def is_held(kernel: Kernel) -> bool:
    """Return True if this thread holds the control lock."""
    return kernel.lock._owner == threading.get_ident()


@pytest.fixture
def nothing_under_the_lock(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Let open() fail while this thread holds the control lock; yield the list of opened paths.

    Files of /proc and directories are allowed. The daemon opens a directory only for an unnamed temporary
    file.
    """
    opened: list[object] = []

    def checked(opens: Callable[..., Any]) -> Callable[..., Any]:
        def open_file(path: Any, *args: Any, **options: Any) -> Any:
            is_allowed = isinstance(path, int) or os.fspath(path).startswith("/proc/") or os.path.isdir(path)
            if not is_allowed:
                opened.append(path)
                assert not is_held(kernel), f"{path} is opened under the control lock"
            return opens(path, *args, **options)

        return open_file

    for module in (builtins, io, os):
        monkeypatch.setattr(module, "open", checked(module.open))
    yield opened
    monkeypatch.undo()


def write(mount: Mount, path: str, data: bytes) -> None:
    handle = mount.open(CLIENT, path, os.O_WRONLY)
    try:
        mount.write(CLIENT, handle, data, 0)
    finally:
        mount.release(handle)


def read(mount: Mount, path: str) -> None:
    handle = mount.open(CLIENT, path, os.O_RDONLY)
    try:
        mount.read(CLIENT, handle, 4096, 0)
    except WouldBlock:
        mount.give_up(CLIENT, handle, errno.EAGAIN)
    finally:
        mount.release(handle)


def files(mount: Mount, directory: str = "") -> Iterator[str]:
    for entry in mount.readdir(directory or "/"):
        path = f"{directory}/{entry.name}"
        if entry.name in (".", ".."):
            continue
        if stat.S_ISDIR(entry.kind):
            yield from files(mount, path)
        elif stat.S_ISREG(entry.kind):
            yield path


@pytest.mark.parametrize("is_watched", [False, True])
def test_nothing_foreign_is_opened_under_the_lock(
    kernel: Kernel, mount: Mount, nothing_under_the_lock: list[object], is_watched: bool
) -> None:
    if is_watched:
        kernel.register_kprobe(Kprobe(symbol_name="vfs_read", pre_handler=lambda _kprobe, _regs: None))
    for path, commands in WRITES.items():
        for command in commands:
            write(mount, path, command)
    for path in files(mount):
        if "pipe" not in path and ("/events/" not in path or "kprobes" in path):
            with suppress(KernelError):
                read(mount, path)
    kernel.load_module("counter")
    assert len(nothing_under_the_lock) == 4


def test_a_module_can_be_a_file_that_waits_for_this_kernel(
    kernel: Kernel, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file of a module is on the mount itself, another thread can serve the open of the file."""
    opens = os.open
    answered = []

    def served_by_the_mount(path: Any, *args: Any, **options: Any) -> int:
        if path == FILE:
            request = threading.Thread(target=lambda: answered.append(mount.readdir("/")), daemon=True)
            request.start()
            request.join(PATIENCE)
            assert answered
        return opens(path, *args, **options)

    monkeypatch.setattr(os, "open", served_by_the_mount)
    assert mount.reads_host(mount.open(CLIENT, "/machine/modules", os.O_WRONLY))
    write(mount, "/machine/modules", b"load %s" % bytes(FILE))
    assert answered
    assert [module.name for module in kernel.modules.loaded()] == ["ktgt"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("{}/fifo", errno.EINVAL),
        ("/dev/zero", errno.EINVAL),
        ("{}", errno.EISDIR),
        ("{}/large", errno.EFBIG),
        ("{}/none", errno.ENOENT),
        ("none", errno.ENOENT),
        ("a/" * 4000, errno.ENAMETOOLONG),
    ],
)
def test_files_that_are_no_modules(
    kernel: Kernel, mount: Mount, tmp_path: Path, name: str, error: int
) -> None:
    """A path that is no module fails with an errno and a line in the log.

    No command of the same write is executed.
    """
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "large", "wb") as large:
        large.truncate(1 << 40)
    with pytest.raises(KernelError) as caught:
        write(mount, "/machine/modules", f"load ktgt\nload {name.format(tmp_path)}".encode())
    assert caught.value.errno == error
    assert kernel.modules.loaded() == []
    assert "module " in dmesg(kernel).splitlines()[-1]


def test_a_write_reads_a_few_files_alone(kernel: Kernel, mount: Mount) -> None:
    with pytest.raises(KernelError) as caught:
        write(mount, "/machine/modules", b"".join(b"load /dev/null/%d\n" % number for number in range(17)))
    assert caught.value.errno == errno.E2BIG
    assert kernel.modules.loaded() == []
