"""Reads of files that users name: every read ends, with the content or an errno."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emulated_kernel.util import safe_read
from emulated_kernel.util.safe_read import (
    BoundedFileReader,
    open_regular,
    read_descriptor,
    read_named,
    read_regular,
)
from tests.fuse.harness import PATIENCE, eventually

LIMIT = 100


def fifo(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (fifo, errno.EINVAL),
        (endless, errno.EINVAL),
        (bound, errno.EINVAL),
        (directory, errno.EISDIR),
        (huge, errno.EFBIG),
    ],
)
@pytest.mark.parametrize("read", [read_regular, read_named])
def test_what_has_no_end_is_refused(
    read: Callable[[Path, int], bytes], kind: Callable[[Path], None], error: int, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    kind(path)
    with pytest.raises(OSError, match=str(path)) as caught:
        read(path, LIMIT)
    assert caught.value.errno == error


def test_a_file_of_the_very_limit(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(LIMIT))
    assert read_regular(path, LIMIT) == read_named(path, LIMIT) == bytes(LIMIT)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_regular(link, LIMIT) == bytes(LIMIT)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(link, os.O_NOFOLLOW)


@pytest.mark.usefixtures("own_descriptors")
def test_no_descriptor_is_left(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    before = os.listdir("/proc/self/fd")
    for path in (tmp_path / "f", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"regular file|directory"):
            read_named(path, LIMIT)
    read_regular(Path(sys.executable), 1 << 30)
    assert os.listdir("/proc/self/fd") == before


def test_what_was_given_open_is_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    for reader, writer in (os.pipe(), _ends(tmp_path / "f")):
        os.set_blocking(reader, False)
        os.write(writer, b"hello")
        os.close(writer)
        try:
            assert read_named(f"/proc/self/fd/{reader}", LIMIT) == b"hello"
        finally:
            os.close(reader)


def _ends(path: Path) -> tuple[int, int]:
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    return reader, os.open(path, os.O_WRONLY)


def test_what_was_given_open_has_a_limit() -> None:
    with open("/dev/zero", "rb") as zero, pytest.raises(OSError, match="more than 100 bytes"):
        read_descriptor(zero.fileno(), LIMIT)


def spin(until: Callable[[], bool]) -> None:
    """Use the CPU until `until` returns True, so that this thread seems late because of a busy host."""
    while not until():
        pass


def test_a_reader_that_waits_for_a_cpu_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(_path: Path, _limit: int) -> bytes:
        end = time.thread_time() + 0.2
        spin(lambda: time.thread_time() >= end)
        return b"text"

    monkeypatch.setattr(safe_read, "read_regular", late)
    assert BoundedFileReader().read(tmp_path, LIMIT, time.monotonic() + 0.01) == b"text"


def test_a_reader_that_is_never_done_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_read, "BUSY_PATIENCE", 0.05)
    over = threading.Event()

    def endless(_path: Path, _limit: int) -> bytes:
        spin(over.is_set)
        return b""

    foreign = BoundedFileReader()
    monkeypatch.setattr(safe_read, "read_regular", endless)
    try:
        with pytest.raises(OSError, match="doesn't answer in time"):
            foreign.read(tmp_path, LIMIT, time.monotonic() + 0.01)
    finally:
        over.set()
    eventually(lambda: not foreign._late)


def test_a_file_system_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If MAX_BLOCKED_READERS threads wait for a hung file system, further reads fail at once."""
    path, answers = tmp_path / "f", threading.Event()
    path.write_bytes(b"text")

    def slow(path: Path, limit: int) -> bytes:
        assert answers.wait(PATIENCE)
        return read_regular(path, limit)

    foreign = BoundedFileReader()
    with monkeypatch.context() as patched:
        patched.setattr(safe_read, "read_regular", slow)
        for number in range(safe_read.MAX_BLOCKED_READERS + 2):
            why = (
                "are waited for already"
                if number >= safe_read.MAX_BLOCKED_READERS
                else "doesn't answer in time"
            )
            with pytest.raises(OSError, match=why):
                foreign.read(path, LIMIT, time.monotonic() + 0.01)
        answers.set()
        eventually(lambda: not foreign._late)
        # If no read is late, any number of reads may run at once.
        with ThreadPoolExecutor(4 * safe_read.MAX_BLOCKED_READERS) as pool:
            read = [
                pool.submit(foreign.read, path, LIMIT, None) for _ in range(4 * safe_read.MAX_BLOCKED_READERS)
            ]
        assert {each.result() for each in read} == {b"text"}
    with pytest.raises(FileNotFoundError, match="none"):
        foreign.read(tmp_path / "none", LIMIT, time.monotonic() + 20)
