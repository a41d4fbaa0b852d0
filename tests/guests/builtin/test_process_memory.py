"""Reads of other processes' memory by helper processes: a helper that sleeps forever is given up, and other
reads work.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from emulated_kernel.guests.common import process_memory as module
from emulated_kernel.guests.common.process_memory import MAX_ABANDONED, ProcessMemory
from tests.fuse.harness import PATIENCE


@pytest.fixture
def memory() -> Iterator[ProcessMemory]:
    memory = ProcessMemory()
    yield memory
    memory.close()
    # Helpers that were given up have been killed. Without the FIFO they end.
    for process in memory._abandoned:
        process.wait(PATIENCE)


@contextmanager
def silent_file(tmp_path: os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a FIFO.

    A reader of the FIFO sleeps forever, like a reader of memory on a hung file system.
    """
    path = os.path.join(tmp_path, "fifo")
    os.mkfifo(path)
    yield path


def test_pieces_and_strings(tmp_path: os.PathLike[str], memory: ProcessMemory) -> None:
    path = os.path.join(tmp_path, "file")
    with open(path, "wb") as file:
        file.write(b"abc\0" + b"x" * 10_000 + b"\0rest")
    pieces = [(0, 3), (1, -8192), (4, -8192), (10_004, 100), (3, -8192), (20_000, 4)]
    long = b"x" * 10_000
    assert memory.read(path, pieces) == [b"abc", b"bc", long[: 3 * 4096 - 4], b"\0rest", b"", b""]
    assert memory.failures == 0


def test_a_slow_read_lets_others_work(tmp_path: os.PathLike[str], memory: ProcessMemory) -> None:
    """While a read waits for a helper process, the context manager `waiting` of ProcessMemory is entered.

    In this context, another thread can serve the mount that the data come from.
    """
    waits: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.append("begins")
        yield
        waits.append("ends")

    memory.waiting = waiting
    with silent_file(tmp_path) as path, pytest.raises(TimeoutError):
        memory.read(path, [(0, 4)])
    assert waits == ["begins", "ends"]


def test_nothing_to_read(tmp_path: os.PathLike[str], memory: ProcessMemory) -> None:
    assert memory.read(os.path.join(tmp_path, "none"), [(0, 1)]) is None
    assert memory.read("/proc/self/mem", [(8, 1)]) is None
    assert memory.read("/proc/self/comm", [(0, 16)]) is not None
    assert memory.failures == 0


def test_a_reader_that_sleeps_is_given_up(tmp_path: os.PathLike[str], memory: ProcessMemory) -> None:
    with silent_file(tmp_path) as path, pytest.raises(TimeoutError):
        memory.read(path, [(0, 1)])
    assert memory.failures == 1
    assert memory.read(f"/proc/{os.getpid()}/comm", [(0, 16)]) == [Path("/proc/self/comm").read_bytes()]
    assert memory.failures == 1


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each read use the CPU for twice the time after which a sleeping helper is given up."""
    spin = f"time.thread_time() + {2 * module.TIMEOUT}\n    while time.thread_time() < end: pass\n"
    program = module._HELPER.replace("import os", "import time, os", 1)
    head, found, body = program.partition('    answer = b""\n')
    assert found
    monkeypatch.setattr(module, "_HELPER", f"{head}    end = {spin}{found}{body}")


@pytest.mark.usefixtures("busy")
def test_a_reader_that_waits_for_a_cpu_is_waited_for(memory: ProcessMemory) -> None:
    for _ in range(2):
        assert memory.read("/proc/self/comm", [(0, 16)]) is not None
    assert memory.failures == 0


@pytest.mark.usefixtures("busy")
def test_a_reader_that_is_never_done_is_given_up(
    memory: ProcessMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_TIMEOUT", module.TIMEOUT / 4)
    with pytest.raises(TimeoutError):
        memory.read("/proc/self/comm", [(0, 16)])


def test_no_more_readers_than_that_sleep(
    tmp_path: os.PathLike[str], memory: ProcessMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If MAX_ABANDONED helpers sleep, further reads fail without a helper until one of these helpers ends."""
    # A signal ends no process that sleeps in a page fault.
    monkeypatch.setattr("subprocess.Popen.kill", lambda _process: None)
    with silent_file(tmp_path) as path:
        for number in range(MAX_ABANDONED):
            os.link(path, f"{path}{number}")
            with pytest.raises(TimeoutError):
                memory.read(f"{path}{number}", [(0, 1)])
        assert sum(process.poll() is None for process in memory._abandoned) == MAX_ABANDONED
        with pytest.raises(TimeoutError):
            memory.read("/proc/self/comm", [(0, 1)])
        assert len(memory._abandoned) == MAX_ABANDONED
        assert memory.failures == MAX_ABANDONED + 1
        first = next(iter(memory._abandoned))
        os.kill(first.pid, signal.SIGKILL)
        first.wait(PATIENCE)
        assert memory.read("/proc/self/comm", [(0, 1)])
    monkeypatch.undo()
    for process in memory._abandoned:
        process.kill()


def test_one_reader_sleeps_for_a_file(
    tmp_path: os.PathLike[str],
    memory: ProcessMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After a read of a file has timed out, further reads of this file fail at once and use no further
    helper.
    """
    monkeypatch.setattr("subprocess.Popen.kill", lambda _process: None)
    with silent_file(tmp_path) as path:
        for _ in range(MAX_ABANDONED + 1):
            with pytest.raises(TimeoutError):
                memory.read(path, [(0, 1)])
    assert len(memory._abandoned) == 1
    counts = [message.split("answer to ")[1].split()[0] for message in caplog.messages]
    assert counts == ["1", "2", "4", "8"]
    assert memory.read("/proc/self/comm", [(0, 1)])
    monkeypatch.undo()
    for process in memory._abandoned:
        process.kill()


def test_a_helper_has_no_descriptor_of_ours(tmp_path: os.PathLike[str], memory: ProcessMemory) -> None:
    """A helper has only the descriptors 0 to 2, so that a helper that sleeps forever keeps no mount and no
    pipe alive.
    """
    inherited = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    try:
        memory.read("/proc/self/comm", [(0, 1)])
        (helper,) = memory._idle
        own = os.stat(inherited)
        for name in os.listdir(f"/proc/{helper.process.pid}/fd"):
            found = os.stat(f"/proc/{helper.process.pid}/fd/{name}")
            assert (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino)
        assert set(os.listdir(f"/proc/{helper.process.pid}/fd")) == {"0", "1", "2"}
    finally:
        os.close(inherited)


def test_a_helper_that_was_killed_is_replaced(memory: ProcessMemory) -> None:
    memory.read("/proc/self/comm", [(0, 1)])
    (helper,) = memory._idle
    helper.process.kill()
    helper.process.wait(PATIENCE)
    with pytest.raises(TimeoutError):
        memory.read("/proc/self/comm", [(0, 1)])
    assert memory.read("/proc/self/comm", [(0, 1)])


def test_a_host_without_processes(memory: ProcessMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> object:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    with pytest.raises(TimeoutError):
        memory.read("/proc/self/comm", [(0, 1)])
    assert memory.failures == 1


def test_several_threads_read_at_once(memory: ProcessMemory) -> None:
    found: list[list[bytes] | None] = []

    def read() -> None:
        found.extend(memory.read("/proc/self/stat", [(0, 1 << 12)]) for _ in range(20))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120
    assert all(data and data[0].endswith(b"\n") for data in found)
    assert len(memory._idle) <= module.IDLE
