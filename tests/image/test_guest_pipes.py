"""Pipes, numbers of open files, working directories and devices of the guest kernel."""

from __future__ import annotations

import errno
import os
import random
import stat
import struct

import pytest

from .guest import USER_BUFFER, Guest
from .test_guest_files import CLOSE, DUP, READ, WRITE, Files

POLL, PIPE, DUP2, GETCWD, CHDIR, FCHDIR, DUP3, PIPE2 = 7, 22, 33, 79, 80, 81, 292, 293
POLLIN, POLLOUT, POLLERR, POLLHUP, POLLNVAL = 1, 4, 8, 16, 32
PAGE = 4096
CAPACITY = 16 * PAGE


@pytest.fixture
def root(guest: Guest, task: int) -> Files:
    return Files(guest, task)


def pipe(files: Files, flags: int = 0) -> tuple[int, int]:
    assert files.call(PIPE2, USER_BUFFER, flags) == 0
    reader, writer = struct.unpack("<ii", files.guest.read(USER_BUFFER, 8))
    return reader, writer


def read(files: Files, fd: int, size: int) -> bytes:
    count = files.call(READ, fd, USER_BUFFER, size)
    assert count >= 0, count
    return files.guest.read(USER_BUFFER, count)


def test_bytes_come_out_as_they_went_in(root: Files) -> None:
    reader, writer = pipe(root)
    rng, sent, got = random.Random(1), b"", b""
    for _ in range(60):
        data = rng.randbytes(rng.choice([1, 7, 100, 4095, 4096, 5000]))
        assert root.call(WRITE, writer, data, len(data)) == len(data)
        sent += data
        while len(sent) - len(got) > 30_000:
            got += read(root, reader, rng.choice([1, 4096, 9999]))
    assert root.call(CLOSE, writer) == 0
    while chunk := read(root, reader, 65536):
        got += chunk
    assert got == sent


def test_a_full_pipe_and_an_empty_one(root: Files) -> None:
    reader, writer = pipe(root, os.O_NONBLOCK)
    assert root.call(READ, reader, USER_BUFFER, 1) == -errno.EAGAIN
    data = bytes(CAPACITY + 5)
    assert root.call(WRITE, writer, data, len(data)) == CAPACITY
    assert root.call(WRITE, writer, b"x", 1) == -errno.EAGAIN
    assert len(read(root, reader, PAGE)) == PAGE
    assert root.call(WRITE, writer, b"x", 1) == 1


def test_no_reader_and_no_writer(root: Files) -> None:
    reader, writer = pipe(root)
    assert root.call(WRITE, reader, b"x", 1) == -errno.EBADF
    assert root.call(READ, writer, USER_BUFFER, 1) == -errno.EBADF
    assert root.call(CLOSE, reader) == 0
    assert root.call(WRITE, writer, b"x", 1) == -errno.EPIPE
    assert root.call(CLOSE, writer) == 0
    reader, writer = pipe(root)
    assert root.call(CLOSE, writer) == 0
    assert root.call(READ, reader, USER_BUFFER, 1) == 0


def test_bad_arguments(root: Files) -> None:
    assert root.call(PIPE2, USER_BUFFER, os.O_APPEND) == -errno.EINVAL
    assert root.call(PIPE, 0xFFFF_8880_0010_0000) == -errno.EFAULT
    _, writer = pipe(root)
    assert root.call(WRITE, writer, 0x1000, 5) == -errno.EFAULT
    assert root.call(8, writer, 0, 0) == -errno.ESPIPE


def test_a_reader_sleeps_until_somebody_writes(guest: Guest, root: Files) -> None:
    """A task sleeps in a read of an empty pipe until another task writes. Both tasks share their
    descriptors.
    """
    reader, writer = pipe(root)
    other = Files(guest, guest.adopt(2000, "reader"))
    guest.start_syscall(other.task, READ, reader, USER_BUFFER, 10)
    guest.to_idle()
    assert root.call(WRITE, writer, b"hello", 5) == 5
    assert guest.read(USER_BUFFER, 5) == b"hello"


def test_a_writer_sleeps_until_there_is_room(guest: Guest, root: Files) -> None:
    reader, writer = pipe(root)
    assert root.call(WRITE, writer, bytes(CAPACITY), CAPACITY) == CAPACITY
    other = guest.adopt(2000, "writer")
    guest.start_syscall(other, WRITE, writer, b"late", 4)
    guest.to_idle()
    assert read(root, reader, CAPACITY) == bytes(CAPACITY)
    assert read(root, reader, CAPACITY) == b"late"


def poll(files: Files, *fds: tuple[int, int], timeout: int = 0) -> list[int]:
    packed = b"".join(struct.pack("<ihh", fd, events, 0) for fd, events in fds)
    files.guest.write(USER_BUFFER, packed)
    assert files.call(POLL, USER_BUFFER, len(fds), timeout) >= 0
    raw = files.guest.read(USER_BUFFER, len(packed))
    return [revents for _, _, revents in struct.iter_unpack("<ihh", raw)]


def test_poll(guest: Guest, root: Files) -> None:
    reader, writer = pipe(root)
    ends = (reader, POLLIN), (writer, POLLOUT)
    assert poll(root, *ends, (99, POLLIN), (-1, POLLIN)) == [0, POLLOUT, POLLNVAL, 0]
    root.call(WRITE, writer, b"x", 1)
    assert poll(root, *ends) == [POLLIN, POLLOUT]
    read(root, reader, 1)
    guest.write(USER_BUFFER, struct.pack("<ihh", reader, POLLIN, 0))
    other = guest.adopt(2000, "poller")
    guest.start_syscall(other, POLL, USER_BUFFER, 1, -1)
    guest.to_idle()
    root.call(WRITE, writer, b"x", 1)
    assert struct.unpack("<ihh", guest.read(USER_BUFFER, 8)) == (reader, POLLIN, POLLIN)
    root.call(CLOSE, writer)
    read(root, reader, 1)
    assert poll(root, (reader, POLLIN)) == [POLLHUP]


def test_poll_gives_up_in_time(guest: Guest, root: Files) -> None:
    reader, _ = pipe(root)
    guest.write(USER_BUFFER, struct.pack("<ihh", reader, POLLIN, 77))
    guest.start_syscall(root.task, POLL, USER_BUFFER, 1, 20)
    guest.to_idle()
    guest.idle_until(lambda: guest.read(USER_BUFFER + 6, 2) == b"\0\0", ticks=10)


def test_pipes_leave_nothing_behind(guest: Guest, root: Files) -> None:
    def use() -> None:
        reader, writer = pipe(root)
        root.call(WRITE, writer, bytes(20_000), 20_000)
        read(root, reader, 6000)
        root.call(CLOSE, reader)
        root.call(CLOSE, writer)

    for _ in range(10):
        use()
    before = guest.free_pages
    for _ in range(50):
        use()
    assert guest.free_pages == before


def test_numbers_of_open_files(root: Files) -> None:
    root.put("/scratch/f", b"hello")
    fd = root.open("/scratch/f")
    assert root.call(DUP2, fd, fd) == fd
    assert root.call(DUP3, fd, fd, 0) == -errno.EINVAL
    assert root.call(DUP2, fd, 100) == 100
    assert root.call(DUP2, fd, 5000) == root.call(DUP2, 99, 3) == -errno.EBADF
    assert root.call(DUP3, fd, 70, os.O_APPEND) == -errno.EINVAL
    assert root.call(CLOSE, fd) == 0
    assert read(root, 100, 10) == b"hello"
    reader, writer = pipe(root)
    assert root.call(DUP2, writer, 100) == 100
    assert root.call(WRITE, 100, b"x", 1) == 1
    assert root.call(DUP, reader) >= 0
    assert read(root, reader, 10) == b"x"


def cwd(files: Files) -> str:
    size = files.call(GETCWD, USER_BUFFER, 4096)
    assert size > 0
    return os.fsdecode(files.guest.read(USER_BUFFER, size - 1))


def test_working_directories(root: Files) -> None:
    assert cwd(root) == "/"
    assert root.call(83, "/scratch/d", 0o755) == 0
    assert root.call(CHDIR, "scratch/d") == 0
    assert cwd(root) == "/scratch/d"
    root.put("here", b"text")
    assert root.get("/scratch/d/here") == root.get("../d/./here") == b"text"
    assert root.call(CHDIR, "here") == -errno.ENOTDIR
    assert root.call(CHDIR, "missing") == -errno.ENOENT
    assert root.call(CHDIR, "..") == 0
    assert cwd(root) == "/scratch"
    fd = root.open("/scratch/d", os.O_DIRECTORY)
    assert root.call(FCHDIR, fd) == 0
    assert cwd(root) == "/scratch/d"
    assert root.call(FCHDIR, root.open("here")) == -errno.ENOTDIR
    assert root.call(FCHDIR, 999) == -errno.EBADF
    assert root.call(GETCWD, USER_BUFFER, 5) == -errno.ERANGE
    assert root.call(CHDIR, "/tracing/events/sched") == 0
    assert cwd(root) == "/tracing/events/sched"


def test_a_child_inherits_the_directory_but_not_its_changes(guest: Guest, root: Files) -> None:
    assert root.call(CHDIR, "/scratch") == 0
    child = root.call(guest.abi["nr.fork"])
    guest.to_idle()
    files = Files(guest, guest.task_of(child))
    assert cwd(files) == "/scratch"
    assert files.call(CHDIR, "/") == 0
    assert (cwd(files), cwd(root)) == ("/", "/scratch")


def test_a_directory_that_nobody_may_enter(guest: Guest, root: Files) -> None:
    assert root.call(83, "/scratch/private", 0o700) == 0
    user = Files(guest, guest.adopt(2000, "user", uid=1000, gid=1000))
    assert user.call(CHDIR, "/scratch/private") == -errno.EACCES
    assert root.call(CHDIR, "/scratch/private") == 0


def test_devices(root: Files) -> None:
    null = root.open("/dev/null", os.O_RDWR)
    assert root.call(WRITE, null, b"gone", 4) == 4
    assert root.call(READ, null, USER_BUFFER, 10) == 0
    zero = root.open("/dev/zero", os.O_RDWR)
    root.guest.write(USER_BUFFER, b"\xff" * 10_000)
    assert read(root, zero, 9999) == bytes(9999)
    assert root.guest.read(USER_BUFFER + 9999, 1) == b"\xff"
    assert root.call(WRITE, zero, b"gone", 4) == 4
    assert root.call(READ, zero, 0x1000, 4) == -errno.EFAULT
    assert root.call(WRITE, root.open("/dev/full", os.O_WRONLY), b"x", 1) == -errno.ENOSPC
    assert sorted(root.names("/dev")) == [".", "..", "full", "null", "zero"]
    assert stat.S_ISCHR(root.stat("/dev/null").mode)
    assert root.open("/dev/mem") == -errno.ENOENT
