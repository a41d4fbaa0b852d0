"""A long write of definitions for a distribution's kernel lets other requests run between its lines."""

from __future__ import annotations

import errno
import os

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.command_file import PIECE_SIZE
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux.files import Files
from tests.guests.linux.probing import PLAIN, engine

PATH = "/kprobe_events"
LINES = [f"p:long/e{number} vfs_read a=%di b=%si\n" for number in range(100)]
TEXT = "".join(LINES)


def test_others_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    mount = probed_mount(engine(PLAIN), ProcessWatch(), Owner(0, 0), is_tracefs=False)
    writer, other = (Files(mount, Client(pid, 0, 0)) for pid in (1000, 1001))
    seen: list[int] = []

    def yield_lock(lock: ControlLock) -> None:
        assert not lock._depth
        seen.append(other.read(PATH).count("long/"))
        other.write("/scratch/log", f"{seen[-1]}\n", os.O_WRONLY | os.O_CREAT)

    other.mount.release(other.mount.create(other.client, "/scratch/log", 0o644, os.O_WRONLY))
    monkeypatch.setattr(ControlLock, "yield_lock", yield_lock)
    writer.write(PATH, TEXT, os.O_WRONLY | os.O_APPEND)
    assert len(TEXT) // (PIECE_SIZE + 2 * len(LINES[-1])) <= len(seen) <= len(TEXT) // PIECE_SIZE
    assert seen == sorted(set(seen))
    assert 0 < seen[0] < seen[-1] < len(LINES)
    assert other.read(PATH).count("long/") == len(LINES)
    writer.write(PATH, "", os.O_WRONLY | os.O_TRUNC)
    half = len(LINES) // 2
    assert writer.errno(PATH, "".join([*LINES[:half], "p:bad no_such\n", *LINES[half:]])) == errno.ENOENT
    assert other.read(PATH).count("long/") == half
    monkeypatch.setattr(ControlLock, "yield_lock", lambda _lock: mount.close())
    with pytest.raises(KernelError) as ended:
        writer.write(PATH, TEXT.replace("long/", "more/"), os.O_WRONLY | os.O_APPEND)
    assert ended.value.errno == errno.EIO
