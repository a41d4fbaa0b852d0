"""machine/gdb and machine/vmcore of a mount, and requests that are answered while gdb holds the guest."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import pytest

from kprobefs.common.mountpoints import MountState, condition
from tests.fuse.harness import eventually, needs_fuse
from tests.kernel.gdb_client import GdbClient, Request
from tests.mounted.files import Files

pytestmark = [needs_fuse, pytest.mark.mounted]
PATIENCE = 60.0
INTERRUPTED = 7
SIGNALLED = f"""
import os, signal, sys
def end(*_):
    raise SystemExit({INTERRUPTED})
signal.signal(signal.SIGUSR1, end)
name = sys.argv[1]
print("ready", flush=True)
{{action}}
"""
"""A program that ends by a signal once its system call has ended."""


def test_a_debugger_holds_the_guest(files: Files) -> None:
    directory = files.root
    files.path("scratch/file").write_text("hello")
    client = GdbClient(files.read("machine/gdb").strip())
    try:
        assert client.ip
        # A daemon or a process that waits for a CPU makes the mount seem hung or busy.
        eventually(lambda: condition(str(directory)) is MountState.DEBUGGED)
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
        # A signal that the process handles also ends the request: gdb may wait for itself.
        for action in ("os.stat(name)", "os.listdir(name)", "open(name).read()"):
            words = [sys.executable, "-c", SIGNALLED.format(action=action)]
            name = directory / "scratch" / ("" if "listdir" in action else "file")
            with subprocess.Popen([*words, str(name)], stdout=subprocess.PIPE) as waiting:
                assert waiting.stdout is not None
                assert waiting.stdout.readline() == b"ready\n"
                with pytest.raises(subprocess.TimeoutExpired):
                    waiting.wait(0.5)
                waiting.send_signal(signal.SIGUSR1)
                assert waiting.wait(PATIENCE) == INTERRUPTED
        # A stopped process does not end its request, which continues to wait.
        with subprocess.Popen(["cat", str(directory / "scratch/file")], stdout=subprocess.PIPE) as stopped:
            for number in (signal.SIGTSTP, signal.SIGCONT):
                with pytest.raises(subprocess.TimeoutExpired):
                    stopped.wait(0.5)
                stopped.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                stopped.wait(0.5)
            client.send("c")
            assert stopped.communicate(timeout=PATIENCE)[0] == b"hello"
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
