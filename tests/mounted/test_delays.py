"""Processes that could delay the mount but must not: unrelated processes, and clients whose memory does not
answer.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.fuse.harness import PATIENCE, REAL_PROGRAM, Daemon, daemon, eventually, needs_fuse, waits_for_mount
from tests.mounted.files import TIMEOUT, Files
from tests.sample import share

pytestmark = [needs_fuse, pytest.mark.mounted]

HIDING = Path(__file__).with_name("hiding_client.py")
PROMPT = 10.0
"""Seconds within which a request of another client is answered, even on a busy machine."""


@dataclass
class Slow:
    """A file whose reads wait until `answer` is called."""

    path: Path
    answer: Callable[[], None]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    place = tmp_path / "slow"
    place.mkdir()
    with subprocess.Popen([sys.executable, "-m", "tests.mounted.slow_files", str(place)]) as process:
        try:
            eventually(lambda: os.path.ismount(place))
            yield Slow(place / "slow.ko", lambda: process.send_signal(signal.SIGUSR1))
        finally:
            process.send_signal(signal.SIGUSR1)
            subprocess.run(["fusermount", "-uz", str(place)], check=True)
            process.wait(PATIENCE)


class Hiding:
    """A running hiding_client.py, with methods that send its commands."""

    def __init__(self, slow: Slow, mounted: Daemon) -> None:
        self._mounted = mounted
        self.process = subprocess.Popen(
            [sys.executable, str(HIDING), str(slow.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The last variable fills the page that the client hides, so that no frame of a function is in it.
            env=os.environ | {"FILL": "x" * mmap.PAGESIZE},
        )
        # Once a process waits for a page of the file, the file cannot be opened any more.
        assert self.hears() == "ready"

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin_open(self, path: Path) -> None:
        """Let the client begin an open(2), and hide the path before the daemon can read the path."""
        self._mounted.process.send_signal(signal.SIGSTOP)
        try:
            self.say(f"open {path}")
            assert self.hears() == "waiting"
            eventually(self._waits)
            self.say("")
            assert self.hears() == "hidden"
        finally:
            self._mounted.process.send_signal(signal.SIGCONT)

    def _waits(self) -> bool:
        """Return True if a second thread of the client waits for the mount.

        The first thread may wait for Python's lock.
        """
        threads = set(os.listdir(f"/proc/{self.process.pid}/task")) - {str(self.process.pid)}
        return any(waits_for_mount(int(thread)) for thread in threads)


@pytest.fixture
def hiding(slow: Slow, mounted: Daemon) -> Iterator[Callable[[], Hiding]]:
    """Yield a function that starts clients. The clients end before the mount does."""
    if os.geteuid():
        pytest.skip("reading another process's memory needs root here")
    made: list[Hiding] = []

    def make() -> Hiding:
        made.append(Hiding(slow, mounted))
        return made[-1]

    yield make
    slow.answer()
    for client in made:
        client.process.kill()
        client.process.communicate(timeout=TIMEOUT)


def test_processes_outside_never_appear(directory: Path) -> None:
    """Forks, execves and exits of unrelated processes never appear in the guest, however many requests arrive
    meanwhile.
    """
    script = "read -r line; for i in {1..40}; do /bin/true; /bin/sleep 0.01; done"
    # The process is older than the mount, so its parent is not a client at the fork.
    with (
        subprocess.Popen(["bash", "-c", script], cwd="/", stdin=subprocess.PIPE) as stranger,
        daemon(directory, program=REAL_PROGRAM),
    ):
        files = Files(directory)
        for event in ("sched_process_fork", "sched_process_exec", "sched_process_exit"):
            files.write(f"tracing/events/sched/{event}/enable", "1")
        assert stranger.stdin is not None
        stranger.stdin.close()
        while stranger.poll() is None:
            files.read("machine/version")
            time.sleep(0.002)
        files.shell("cat machine/version")
        records = files.records()
        assert any("sched_process_exec: filename=" in line and "/cat" in line for line in records)
        strange = re.compile(rf"={stranger.pid}\b|sleep")
        assert not [line for line in records if strange.search(line)]
        assert str(stranger.pid) not in files.read("machine/tasks").split()


def test_a_path_in_memory_that_does_not_answer(
    files: Files, slow: Slow, hiding: Callable[[], Hiding]
) -> None:
    """If the page with a client's path does not answer, a probe on the guest's open(2) records the path as a
    fault. The client's open(2) succeeds.
    """
    files.write("scratch/hidden", "text", os.O_CREAT)
    files.probe("p:opened do_sys_openat2 path=+0($arg2):ustring")
    client = hiding()
    client.begin_open(files.path("scratch/hidden"))
    # The client itself may wait for its own memory.
    eventually(partial(has_more_faults, files, 0))
    slow.answer()
    assert client.hears() == "opened"


def faults(files: Files) -> int:
    return "".join(files.records()).count("path=(fault)")


def has_more_faults(files: Files, before: int) -> bool:
    return faults(files) > before


def test_others_are_served_meanwhile(files: Files, slow: Slow, hiding: Callable[[], Hiding]) -> None:
    """While the memory of ten clients does not answer, requests of other clients are answered promptly.

    For each client, one reading thread is given up. After eight such threads, no further one is started.
    """
    files.write("scratch/hidden", "text", os.O_CREAT)
    files.probe("p:opened do_sys_openat2 path=+0($arg2):ustring")
    clients = [hiding() for _ in range(10)]
    for client in clients:
        before = faults(files)
        client.begin_open(files.path("scratch/hidden"))
        eventually(partial(has_more_faults, files, before))
        began = time.monotonic()
        files.read("kprobes/list")
        assert time.monotonic() - began < PROMPT
    slow.answer()
    assert [client.hears() for client in clients] == ["opened"] * len(clients)


def test_the_path_of_a_program_in_memory_that_does_not_answer(
    files: Files, slow: Slow, hiding: Callable[[], Hiding]
) -> None:
    """A client's new name is known, although the page with the path of its program does not answer."""
    files.probe("p:opened do_sys_openat2 comm=$comm")
    client = hiding()
    client.say("exec renamed")
    assert client.hears() == "hidden"
    client.begin_open(files.path("machine/version"))
    eventually(lambda: any('comm="renamed"' in line for line in files.records()))
    slow.answer()
    assert client.hears() == "opened"


def test_a_path_in_memory_of_the_mount_itself(files: Files) -> None:
    """If a client's path is in a mapped page of the mount, no call hangs.

    To read the path, the daemon may need an answer of its own.
    """
    path = files.path("scratch/path")
    path.write_bytes(os.fsencode(files.path("kprobes/list")).ljust(4096, b"\0"))
    files.probe("p:x vfs_read")
    script = """
import ctypes, mmap, os, sys, threading
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.access.argtypes = [ctypes.c_void_p, ctypes.c_int]
fd = os.open(sys.argv[1], os.O_RDONLY)
page = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0)
stop = threading.Event()
def drop():
    while not stop.is_set():
        libc.madvise(page, 4096, 4)
        libc.munmap(libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0), 4096)
thread = threading.Thread(target=drop)
thread.start()
print(sum(libc.access(page, 0) == 0 for _ in range(300)))
stop.set()
thread.join()
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert result.stdout == "300\n"
    assert "vfs_read" in files.read("kprobes/list")


def test_overlayfs_over_scratch(files: Files, tmp_path: Path) -> None:
    """overlayfs can use a file in scratch/ as a lower file.

    When a client opens the file for appending, overlayfs opens the lower file for reading.
    """
    if os.geteuid():
        pytest.skip("mounting needs root")
    lower = files.path("scratch/low")
    lower.mkdir()
    (lower / "f").write_text("lower\n")
    files.probe("p:x vfs_read")
    options = f"lowerdir={lower},upperdir={tmp_path}/o/u,workdir={tmp_path}/o/w"
    script = f"""
set -e
mkdir {tmp_path}/o; mount -t tmpfs none {tmp_path}/o; cd {tmp_path}/o; mkdir u w m
mount -t overlay none -o {options} m || exit 77
echo more >> m/f; cat m/f
"""
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if result.returncode == 77:
        pytest.skip(f"no overlayfs here: {result.stderr}")
    assert (result.stdout, result.stderr) == ("lower\nmore\n", "")
    assert (lower / "f").read_text() == "lower\n"


def test_a_log_that_nobody_reads(directory: Path) -> None:
    """The daemon serves, and ends, although its standard error is a full pipe."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    arguments = [*REAL_PROGRAM, "mount", "-f", str(directory)]
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer) as process:
        try:
            eventually(lambda: os.path.ismount(directory))
            assert Files(directory).read("machine/version")
            process.terminate()
            assert process.wait(TIMEOUT) == 0
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


@pytest.mark.parametrize("limit", share((20, 32, 64), 0, 2))
def test_few_descriptors(directory: Path, limit: int) -> None:
    """With more clients than the daemon has descriptors, requests are answered, a probe is hit, and the guest
    stays alive.
    """
    program = ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash", *REAL_PROGRAM]
    with daemon(directory, program=program) as running:
        files = Files(directory)
        files.write("scratch/f", "x", os.O_CREAT)
        script = "read -r line < machine/version; echo; read -r line"
        clients = [
            subprocess.Popen(
                ["bash", "-c", script], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(limit + 8)
        ]
        try:
            for client in clients:
                assert client.stdout is not None
                assert client.stdout.readline() == b"\n"
            files.probe("p:a vfs_read c=$arg3")
            for _ in range(3):
                assert files.read("scratch/f") == "x"
            assert len(files.records()) >= 3
            alive = files.read("machine/tasks")
            assert all(f"{client.pid} " in alive for client in clients)
        finally:
            for client in clients:
                client.communicate(b"\n", timeout=TIMEOUT)

        def are_gone() -> bool:
            alive = {int(line.split()[0]) for line in files.lines("machine/tasks")[1:]}
            return not alive & {client.pid for client in clients}

        eventually(are_gone)
        assert "given up" not in files.read("machine/dmesg")
        assert "Traceback" not in running.log
