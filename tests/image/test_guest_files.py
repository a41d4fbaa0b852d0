"""Files of the guest kernel: /scratch by real system calls, permissions, errors, memory."""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass

import pytest

from .guest import USER_BUFFER, USER_SIZE, Guest

READ, WRITE, OPEN, CLOSE, STAT, FSTAT, LSTAT, LSEEK = 0, 1, 2, 3, 4, 5, 6, 8
PREAD, PWRITE, ACCESS, DUP, FSYNC, TRUNCATE, FTRUNCATE = 17, 18, 21, 32, 74, 76, 77
RENAME, MKDIR, RMDIR, LINK, UNLINK, SYMLINK, READLINK = 82, 83, 84, 86, 87, 88, 89
CHMOD, FCHMOD, CHOWN, GETDENTS64, OPENAT, UTIMENSAT, RENAMEAT2 = 90, 91, 92, 217, 257, 280, 316
KERNEL_ADDRESS = 0xFFFF_8880_0010_0000


@dataclass(frozen=True)
class Stat:
    """Fields of Linux's struct stat on x86_64."""

    ino: int
    nlink: int
    mode: int
    uid: int
    gid: int
    size: int
    blocks: int
    atime: int
    mtime: int


class Files:
    """System calls on files by one task."""

    def __init__(self, guest: Guest, task: int) -> None:
        self.guest = guest
        self.task = task

    def call(self, number: int, *args: int | str | bytes) -> int:
        values = [os.fsencode(arg) + b"\0" if isinstance(arg, str) else arg for arg in args]
        result = self.guest.syscall(self.task, number, *values)
        assert result is not None
        return result

    def open(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
        return self.call(OPEN, path, flags, mode)

    def put(self, path: str, data: bytes) -> None:
        fd = self.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        assert fd >= 0
        while data:
            done = self.call(WRITE, fd, data[: USER_SIZE // 4], min(len(data), USER_SIZE // 4))
            assert done > 0
            data = data[done:]
        assert self.call(CLOSE, fd) == 0

    def get(self, path: str, size: int = USER_SIZE // 4) -> bytes:
        fd = self.open(path)
        assert fd >= 0, fd
        data = b""
        while (count := self.call(READ, fd, USER_BUFFER, size)) > 0:
            data += self.guest.read(USER_BUFFER, count)
        assert count == 0
        assert self.call(CLOSE, fd) == 0
        return data

    def stat(self, path: str, number: int = LSTAT) -> Stat:
        assert self.call(number, path, USER_BUFFER) == 0
        return self.stat_buffer()

    def stat_buffer(self) -> Stat:
        raw = self.guest.read(USER_BUFFER, self.guest.abi["stat.size"])
        fields = struct.unpack("<QQQIIIIQqqqQQQQQQ3q", raw)
        _, ino, nlink, mode, uid, gid, _, _, size, _, blocks, atime, _, mtime = fields[:14]
        return Stat(ino, nlink, mode, uid, gid, size, blocks, atime, mtime)

    def names(self, path: str, count: int = 4096) -> list[str]:
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        names = []
        while (size := self.call(GETDENTS64, fd, USER_BUFFER, count)) > 0:
            raw = self.guest.read(USER_BUFFER, size)
            while raw:
                length = struct.unpack_from("<H", raw, 16)[0]
                names.append(raw[19:length].split(b"\0")[0].decode())
                raw = raw[length:]
        assert size == 0
        self.call(CLOSE, fd)
        return names


@pytest.fixture
def root(guest: Guest, task: int) -> Files:
    return Files(guest, task)


@pytest.fixture
def user(guest: Guest) -> Files:
    return Files(guest, guest.adopt(2000, "user", uid=1000, gid=1000))


def test_write_then_read(root: Files) -> None:
    data = os.urandom(300_000)
    root.put("/scratch/file", data)
    assert root.get("/scratch/file") == data
    assert root.stat("/scratch/file").size == len(data)
    assert root.stat("/scratch/file").blocks == 8 * -(-len(data) // 4096)


def test_positions(root: Files) -> None:
    fd = root.open("/scratch/f", os.O_CREAT | os.O_RDWR)
    assert root.call(PWRITE, fd, b"hello", 5, 10) == 5
    assert root.call(LSEEK, fd, 0, os.SEEK_CUR) == 0
    assert root.call(PREAD, fd, USER_BUFFER, 100, 8) == 7
    assert root.guest.read(USER_BUFFER, 7) == b"\0\0hello"
    assert root.call(LSEEK, fd, -2, os.SEEK_END) == 13
    assert root.call(READ, fd, USER_BUFFER, 100) == 2
    assert root.call(LSEEK, fd, -1, os.SEEK_SET) == -22
    assert root.call(LSEEK, fd, 0, 9) == -22
    assert root.call(PREAD, fd, USER_BUFFER, 1, -1) == -22
    assert root.call(FSYNC, fd) == 0


def test_append(root: Files) -> None:
    root.put("/scratch/f", b"one")
    fd = root.open("/scratch/f", os.O_WRONLY | os.O_APPEND)
    root.call(WRITE, fd, b"two", 3)
    assert root.get("/scratch/f") == b"onetwo"


def test_a_duplicate_shares_the_position(root: Files) -> None:
    root.put("/scratch/f", b"abcdef")
    fd = root.open("/scratch/f")
    other = root.call(DUP, fd)
    assert root.call(READ, fd, USER_BUFFER, 2) == 2
    root.call(CLOSE, fd)
    assert root.call(READ, other, USER_BUFFER, 9) == 4


def test_file_numbers_are_the_lowest_and_the_table_grows(root: Files) -> None:
    root.put("/scratch/f", b"x")
    assert [root.open("/scratch/f") for _ in range(150)] == list(range(150))
    root.call(CLOSE, 7)
    assert root.open("/scratch/f") == 7
    assert root.open("/scratch/f") == 150
    assert root.call(CLOSE, 999) == -9


def test_truncation(root: Files) -> None:
    root.put("/scratch/f", b"x" * 10_000)
    assert root.call(TRUNCATE, "/scratch/f", 5000) == 0
    assert root.call(TRUNCATE, "/scratch/f", 9000) == 0
    assert root.get("/scratch/f") == b"x" * 5000 + b"\0" * 4000
    fd = root.open("/scratch/f", os.O_RDWR)
    assert root.call(FTRUNCATE, fd, 3) == 0
    assert root.get("/scratch/f") == b"xxx"
    assert root.call(TRUNCATE, "/scratch/f", -1) == -22
    assert root.call(TRUNCATE, "/scratch/f", 1 << 40) == -27
    assert root.call(TRUNCATE, "/scratch", 0) == -21
    root.open("/scratch/f", os.O_WRONLY | os.O_TRUNC)
    assert root.get("/scratch/f") == b""


def test_directories(root: Files) -> None:
    assert root.call(MKDIR, "/scratch/d", 0o777) == 0
    assert root.call(MKDIR, "/scratch/d", 0o777) == -17
    assert root.stat("/scratch/d").mode == stat.S_IFDIR | 0o777
    assert root.call(MKDIR, "/scratch/d/e/", 0o700) == 0
    assert root.stat("/scratch/d").nlink == 3
    root.put("/scratch/d/f", b"")
    assert root.call(RMDIR, "/scratch/d") == -39
    assert root.call(RMDIR, "/scratch/d/f") == -20
    assert root.call(UNLINK, "/scratch/d/e") == -21
    assert root.call(RMDIR, "/scratch/d/e") == 0
    assert root.call(UNLINK, "/scratch/d/f") == 0
    assert root.call(RMDIR, "/scratch/d/.") == -22
    assert root.call(RMDIR, "/scratch/d/..") == -39
    assert root.call(RMDIR, "/scratch/d") == 0
    assert root.call(RMDIR, "/scratch/d") == -2
    assert root.stat("/scratch").nlink == 2


def test_listing_in_small_pieces(root: Files) -> None:
    names = [f"file-{n:03}" for n in range(60)]
    root.call(MKDIR, "/scratch/d", 0o755)
    for name in names:
        root.put(f"/scratch/d/{name}", b"")
    assert root.names("/scratch/d", count=100) == [".", "..", *names]
    root.call(UNLINK, "/scratch/d/file-030")
    assert root.names("/scratch/d") == [".", "..", *(n for n in names if n != "file-030")]


def test_listing_needs_a_directory_and_room(root: Files) -> None:
    root.put("/scratch/f", b"")
    assert root.call(GETDENTS64, root.open("/scratch/f"), USER_BUFFER, 100) == -20
    assert root.call(GETDENTS64, root.open("/scratch", os.O_DIRECTORY), USER_BUFFER, 10) == -22
    assert root.call(READ, root.open("/scratch"), USER_BUFFER, 10) == -21


def test_opening_errors(root: Files) -> None:
    root.put("/scratch/f", b"")
    assert root.open("/scratch/none") == -2
    assert root.open("/scratch/none/f", os.O_CREAT) == -2
    assert root.open("/scratch/f/") == -20
    assert root.open("/scratch/f/x") == -20
    assert root.open("/scratch/f", os.O_DIRECTORY) == -20
    assert root.open("/scratch", os.O_RDWR) == -21
    assert root.open("/scratch/new/", os.O_CREAT | os.O_RDWR) == -21
    assert root.open("/scratch/f", os.O_CREAT | os.O_EXCL) == -17
    assert root.open("/scratch/" + "n" * 256) == -36
    assert root.open("/scratch/" + "n/" * 2100) == -36
    assert root.open("") == -2
    assert root.call(READ, 5, USER_BUFFER, 1) == -9
    assert root.call(WRITE, root.open("/scratch/f"), b"x", 1) == -9


def test_bad_user_pointers_are_mended(root: Files) -> None:
    root.put("/scratch/f", b"y" * 5000)
    fd = root.open("/scratch/f", os.O_RDWR)
    assert root.call(READ, fd, 0x1000, 10) == -14
    assert root.call(READ, fd, KERNEL_ADDRESS, 10) == -14
    assert root.call(WRITE, fd, 0x1000, 10) == -14
    assert root.call(OPEN, 0x1000, 0) == -14
    assert root.call(STAT, "/scratch/f", 0x1000) == -14
    assert root.call(PREAD, fd, USER_BUFFER + USER_SIZE - 100, 5000, 0) == 100
    assert root.guest.log()[-1] == "Run /init as init process"


def test_symbolic_links(root: Files) -> None:
    root.call(MKDIR, "/scratch/d", 0o755)
    root.put("/scratch/d/f", b"data")
    assert root.call(SYMLINK, "d/f", "/scratch/rel") == 0
    assert root.call(SYMLINK, "/scratch/d", "/scratch/abs") == 0
    assert root.call(SYMLINK, "loop", "/scratch/loop") == 0
    assert root.call(SYMLINK, "x", "/scratch/rel") == -17
    assert root.get("/scratch/rel") == b"data"
    assert root.get("/scratch/abs/f") == b"data"
    assert root.get("/scratch/abs/../rel") == b"data"
    assert root.call(READLINK, "/scratch/rel", USER_BUFFER, 100) == 3
    assert root.guest.read(USER_BUFFER, 3) == b"d/f"
    assert root.call(READLINK, "/scratch/d", USER_BUFFER, 100) == -22
    assert root.open("/scratch/loop") == -40
    assert root.open("/scratch/rel", os.O_NOFOLLOW) == -40
    assert stat.S_ISLNK(root.stat("/scratch/rel").mode)
    assert root.stat("/scratch/rel", STAT).size == 4
    assert root.call(SYMLINK, "/scratch/made", "/scratch/dangling") == 0
    assert root.open("/scratch/dangling", os.O_CREAT | os.O_EXCL) == -17
    assert root.open("/scratch/dangling", os.O_CREAT) >= 0
    assert root.stat("/scratch/made").size == 0


def test_hard_links_and_unlinked_files(root: Files) -> None:
    root.put("/scratch/f", b"data")
    assert root.call(LINK, "/scratch/f", "/scratch/g") == 0
    assert root.call(LINK, "/scratch", "/scratch/h") == -1
    assert root.stat("/scratch/g").nlink == 2
    assert root.stat("/scratch/g").ino == root.stat("/scratch/f").ino
    fd = root.open("/scratch/g")
    root.call(UNLINK, "/scratch/f")
    root.call(UNLINK, "/scratch/g")
    assert root.open("/scratch/g") == -2
    assert root.call(READ, fd, USER_BUFFER, 10) == 4
    assert root.call(FSTAT, fd, USER_BUFFER) == 0
    assert root.stat_buffer().nlink == 0


def test_renaming(root: Files) -> None:
    long = "long-name-that-is-kept-outside-of-the-entry-itself"
    root.put("/scratch/a", b"a")
    root.put("/scratch/b", b"b")
    root.call(MKDIR, "/scratch/d", 0o755)
    root.call(MKDIR, "/scratch/d/e", 0o755)
    assert root.call(RENAMEAT2, -100, "/scratch/a", -100, "/scratch/b", 1) == -17
    assert root.call(RENAME, "/scratch/a", "/scratch/b") == 0
    assert root.get("/scratch/b") == b"a"
    assert root.call(RENAME, "/scratch/b", f"/scratch/d/{long}") == 0
    assert root.names("/scratch/d") == [".", "..", "e", long]
    assert root.call(RENAME, f"/scratch/d/{long}", "/scratch/d/s") == 0
    assert root.get("/scratch/d/s") == b"a"
    assert root.call(RENAME, "/scratch/d", "/scratch/d/e/x") == -22
    assert root.call(RENAME, "/scratch/d/e", "/scratch/d") == -39
    assert root.call(RENAME, "/scratch/d/s", "/scratch/d/e") == -21
    assert root.call(RENAME, "/scratch/none", "/scratch/x") == -2
    assert root.call(RENAME, "/scratch/d/e", "/scratch/e") == 0
    assert (root.stat("/scratch/d").nlink, root.stat("/scratch").nlink) == (2, 4)
    assert root.call(RENAME, "/scratch/d/s", "/elsewhere") == -18


def test_modes_and_owners(root: Files, user: Files) -> None:
    user.put("/scratch/mine", b"x")
    assert (user.stat("/scratch/mine").uid, user.stat("/scratch/mine").gid) == (1000, 1000)
    assert user.call(CHMOD, "/scratch/mine", 0o600) == 0
    assert user.stat("/scratch/mine").mode == stat.S_IFREG | 0o600
    assert user.call(CHOWN, "/scratch/mine", 0, -1) == -1
    root.put("/scratch/theirs", b"x")
    assert user.open("/scratch/theirs") >= 0
    assert user.open("/scratch/theirs", os.O_WRONLY) == -13
    assert user.call(CHMOD, "/scratch/theirs", 0o666) == -1
    assert user.call(UNLINK, "/scratch/theirs") == -1
    assert user.call(ACCESS, "/scratch/theirs", os.R_OK) == 0
    assert user.call(ACCESS, "/scratch/theirs", os.W_OK) == -13
    root.call(MKDIR, "/scratch/private", 0o700)
    assert user.open("/scratch/private/x", os.O_CREAT) == -13
    assert user.open("/scratch/private") == -13
    assert root.call(CHOWN, "/scratch/private", 1000, 1000) == 0
    assert user.open("/scratch/private/x", os.O_CREAT) >= 0


def test_times(root: Files) -> None:
    root.put("/scratch/f", b"x")
    assert root.stat("/scratch/f").mtime == 10**9
    times = struct.pack("<qqqq", 5, 0, 7, 0)
    assert root.call(UTIMENSAT, -100, "/scratch/f", times, 0) == 0
    assert (root.stat("/scratch/f").atime, root.stat("/scratch/f").mtime) == (5, 7)
    omit = struct.pack("<qqqq", 9, 0, 9, (1 << 30) - 2)
    root.call(UTIMENSAT, -100, "/scratch/f", omit, 0)
    assert (root.stat("/scratch/f").atime, root.stat("/scratch/f").mtime) == (9, 7)


def test_openat_from_a_directory(root: Files) -> None:
    root.call(MKDIR, "/scratch/d", 0o755)
    root.put("/scratch/d/f", b"data")
    directory = root.open("/scratch/d", os.O_DIRECTORY)
    assert root.call(OPENAT, directory, "f", 0, 0) > directory
    assert root.call(OPENAT, 99, "f", 0, 0) == -9
    assert root.call(OPENAT, directory, "/scratch/d/f", 0, 0) > 0


def test_the_memory_is_finite_and_comes_back(root: Files) -> None:
    """A file can fill the memory up to the reserve, and the removal frees all pages.

    The first round may leave a slab in a cache that was not used before.
    """

    def fill() -> tuple[int, int]:
        fd = root.open("/scratch/big", os.O_CREAT | os.O_RDWR)
        written = 0
        while (done := root.call(WRITE, fd, USER_BUFFER, USER_SIZE // 2)) > 0:
            written += done
        assert root.guest.free_pages < 1000, "what is left is the kernel's reserve"
        root.call(CLOSE, fd)
        root.call(UNLINK, "/scratch/big")
        return done, written

    error, written = fill()
    assert error == -28
    assert written > 40 << 20
    before = root.guest.free_pages
    fill()
    assert root.guest.free_pages == before


def test_many_cycles_keep_memory_flat(root: Files) -> None:
    def cycle() -> None:
        root.call(MKDIR, "/scratch/d", 0o755)
        root.put("/scratch/d/f", b"x" * 5000)
        root.call(SYMLINK, "f", "/scratch/d/l")
        root.get("/scratch/d/l")
        root.call(RENAME, "/scratch/d/f", "/scratch/d/g")
        root.open("/scratch/d/none/x")
        for name in ("g", "l"):
            root.call(UNLINK, f"/scratch/d/{name}")
        root.call(RMDIR, "/scratch/d")

    cycle()
    before = root.guest.free_pages
    for _ in range(20):
        cycle()
    assert root.guest.free_pages == before


def test_tracefs_directories_by_host_call(root: Files) -> None:
    guest, task = root.guest, root.task
    guest.write(USER_BUFFER, b"events\0")
    made = guest.host_call(task, "tracefs_create_dir", USER_BUFFER, 0)
    assert made is not None
    assert made < -4096
    guest.write(USER_BUFFER, b"enable\0")
    assert guest.host_call(task, "tracefs_create_file", USER_BUFFER, 0o640, made, 0, 0) != 0
    assert guest.host_call(task, "tracefs_create_file", USER_BUFFER, 0o640, made, 0, 0) == 0
    guest.host_call(task, "tracefs_remove", made)
    guest.write(USER_BUFFER, b"events\0")
    assert guest.host_call(task, "tracefs_create_dir", USER_BUFFER, 0) not in (0, None)
