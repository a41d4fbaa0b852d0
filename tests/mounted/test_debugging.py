"""machine/gdb and machine/vmcore through the mount: what is served while a debugger holds the guest."""

from __future__ import annotations

import os
import signal
import stat
import subprocess

import pytest

from kprobefs.common.mountpoints import MountState, condition
from tests.fuse.harness import needs_fuse
from tests.kernel.gdb_client import GdbClient, Request
from tests.mounted.files import Files

pytestmark = [needs_fuse, pytest.mark.mounted]
PATIENCE = 60.0


def test_a_debugger_holds_the_guest(files: Files) -> None:
    directory = files.root
    files.path("scratch/file").write_text("hello")
    client = GdbClient(files.read("machine/gdb").strip())
    try:
        assert client.ip
        assert condition(str(directory)) is MountState.DEBUGGED
        assert "kthreadd" in files.read("machine/tasks")
        assert set(os.listdir(directory / "machine")) >= {"gdb", "vmcore"}
        with open(directory / "machine/vmcore", "rb") as core:
            assert core.read(4) == b"\x7fELF"
        # A request that needs the guest waits, and ends if its process is killed.
        with subprocess.Popen(["cat", str(directory / "scratch/file")], stdout=subprocess.PIPE) as reader:
            with pytest.raises(subprocess.TimeoutExpired):
                reader.wait(0.5)
            reader.send_signal(signal.SIGTERM)
            assert reader.wait(PATIENCE) == -signal.SIGTERM
        client.send("c")
        assert Request(lambda: files.read("scratch/file")).done() == "hello"
    finally:
        client.close()
    assert files.read("scratch/file") == "hello"


def test_a_core_has_the_size_that_stat_shows(files: Files) -> None:
    path = files.root / "machine/vmcore"
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o400
    with open(path, "rb") as core:
        core.seek(found.st_size - 1)
        assert core.read() == b"\0"
