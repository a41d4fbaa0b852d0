"""trace_pipe of the real kernel: a reader sleeps inside the guest, and a hit wakes the reader."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuse.harness import eventually, needs_fuse
from tests.mounted.files import TIMEOUT, Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]

PIPE = "tracing/trace_pipe"


@pytest.fixture
def probed(files: Files) -> Files:
    """Return the files of a mount on which a mkdir(2) in scratch/ hits a probe."""
    files.probe("p:made vfs_mkdir")
    return files


@pytest.fixture
def pipe(probed: Files) -> Iterator[int]:
    """Yield a descriptor of trace_pipe with O_NONBLOCK."""
    descriptor = os.open(probed.path(PIPE), os.O_RDONLY | os.O_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def hit(files: Files, name: str = "d") -> None:
    files.path(f"scratch/{name}").mkdir()


@pytest.fixture
def reader(probed: Files) -> Iterator[subprocess.Popen[str]]:
    """Yield a `cat` that sleeps in a read of trace_pipe."""
    cat = subprocess.Popen(
        ["cat", probed.path(PIPE)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    eventually(lambda: state_of(probed, cat.pid) == "S")
    yield cat
    cat.kill()
    cat.communicate(timeout=TIMEOUT)


def state_of(files: Files, pid: int) -> str | None:
    """Return the state letter of a `cat` in machine/tasks, or None if the task is missing."""
    words = (line.split() for line in files.lines("machine/tasks"))
    return next((word[3] for word in words if word[0] == str(pid) and word[4] == "cat"), None)


def test_a_hit_wakes_the_reader(probed: Files, reader: subprocess.Popen[str]) -> None:
    hit(probed)
    assert reader.stdout is not None
    assert " made: (vfs_mkdir+0x0/" in reader.stdout.readline()
    assert state_of(probed, reader.pid) == "S"
    hit(probed, "e")
    assert " made: (vfs_mkdir+0x0/" in reader.stdout.readline()


def test_readers_of_one_open_file(pipe: int) -> None:
    """With O_NONBLOCK, each of several threads that read one open file gets EAGAIN, and no thread sleeps."""
    errors: list[int | None] = []

    def read() -> None:
        try:
            os.read(pipe, 100)
        except OSError as error:
            errors.append(error.errno)

    for _ in range(3):
        reader = threading.Thread(target=read)
        reader.start()
        reader.join(TIMEOUT)
    read()
    assert errors == [errno.EAGAIN] * 4


def test_without_blocking(probed: Files, pipe: int) -> None:
    with assert_errno(errno.EAGAIN):
        os.read(pipe, 100)
    hit(probed)
    assert b" made: " in os.read(pipe, 4096)
    with assert_errno(errno.EAGAIN):
        os.read(pipe, 100)


def test_one_reader_at_a_time(probed: Files, pipe: int) -> None:
    fcntl.fcntl(pipe, fcntl.F_GETFL)
    with assert_errno(errno.EBUSY):
        os.open(probed.path(PIPE), os.O_RDONLY)


def test_readiness(probed: Files, pipe: int) -> None:
    epoll = select.epoll()
    epoll.register(pipe, select.EPOLLIN)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    assert (epoll.poll(0), poll.poll(0), select.select([pipe], [], [], 0)[0]) == ([], [], [])
    hit(probed)
    assert epoll.poll(TIMEOUT) == [(pipe, select.EPOLLIN)]
    assert poll.poll(1000) == [(pipe, select.POLLIN)]
    assert select.select([pipe], [], [], TIMEOUT)[0] == [pipe]
    os.read(pipe, 4096)
    assert poll.poll(0) == []
    epoll.close()


def test_polling_is_woken(probed: Files, pipe: int) -> None:
    assert select.select([pipe], [], [], 0)[0] == []
    maker = subprocess.Popen(["sh", "-c", f"sleep 0.3; mkdir {probed.path('scratch/late')}"])
    assert select.select([pipe], [], [], TIMEOUT)[0] == [pipe]
    assert maker.wait(TIMEOUT) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_the_reader_and_its_task(
    probed: Files, reader: subprocess.Popen[str], number: signal.Signals
) -> None:
    reader.send_signal(number)
    assert reader.wait(TIMEOUT) == -number
    assert state_of(probed, reader.pid) is None
    # Closing is asynchronous in FUSE.
    eventually(lambda: _can_open(probed.path(PIPE)))


def _can_open(path: Path) -> bool:
    with suppress(OSError):
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        return True
    return False


def test_everything_else_goes_on_beside_a_sleeping_reader(
    probed: Files, reader: subprocess.Popen[str]
) -> None:
    for number in range(50):
        probed.path(f"scratch/f{number}").write_text("x" * 5000)
        assert probed.read("kprobes/enabled") == "1\n"
    assert probed.shell("cat scratch/f* | wc -c").stdout.strip() == "250000"
    assert reader.poll() is None


def test_a_reader_killed_in_the_middle_of_many_hits(probed: Files, reader: subprocess.Popen[str]) -> None:
    maker = subprocess.Popen(
        ["sh", "-c", "for i in $(seq 200); do mkdir d$i; done"], cwd=probed.path("scratch")
    )
    time.sleep(0.1)
    reader.kill()
    assert maker.wait(TIMEOUT) == 0
    assert len(os.listdir(probed.path("scratch"))) == 200
    assert probed.read("kprobe_profile").split()[1:2] == ["200"]


def test_the_exit_of_a_process_wakes_who_polls(files: Files) -> None:
    """The exit of a traced process wakes a poller of trace_pipe, although no process makes a request at that
    time.
    """
    # The mount knows this process as a client, and so the child as its descendant.
    files.write("tracing/events/sched/sched_process_exit/enable", "1")
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    ending = threading.Timer(0.3, child.stdin.close)
    try:
        pipe = os.open(files.path(PIPE), os.O_RDONLY | os.O_NONBLOCK)
        waiting = select.poll()
        waiting.register(pipe, select.POLLIN)
        while waiting.poll(0):
            os.read(pipe, 4096)
        assert waiting.poll(0) == []
        ending.start()
        assert waiting.poll(1000 * TIMEOUT)
        assert f"sched_process_exit: comm=cat pid={child.pid} " in os.read(pipe, 4096).decode()
        os.close(pipe)
    finally:
        ending.cancel()
        child.kill()
        child.wait()
