"""System calls of guest tasks as Python calls: paths and data through user buffers, errno as KernelError."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.host.buffers import BUFFER_SIZE, UserBuffers
from emulated_kernel.host.executive import Executive, GuestTask, HostfsHandler

PATH_MAX = 4096
AT_FDCWD = -100 & 0xFFFFFFFF
"""An int in a register, as a program passes it."""
AT_SYMLINK_NOFOLLOW = 0x100
UTIME_OMIT = (1 << 30) - 2
"""A file's time stays as it is, in the field of its nanoseconds."""
AT_REMOVEDIR = 0x200
_MAX_ERRNO = 4095
_STAT = struct.Struct("<QQQIIIIQqqqQQQQQQ")
"""struct stat of the guest: x86_64's layout on every architecture."""
_DIRENT = struct.Struct("<QqHB")


_AT: dict[str, tuple[str, tuple[int, ...]]] = {
    "mkdir": ("mkdirat", ()),
    "rmdir": ("unlinkat", (AT_REMOVEDIR,)),
    "unlink": ("unlinkat", (0,)),
    "chmod": ("fchmodat", ()),
    "lchown": ("fchownat", (AT_SYMLINK_NOFOLLOW,)),
    "newlstat": ("newfstatat", (AT_SYMLINK_NOFOLLOW,)),
    "readlink": ("readlinkat", ()),
}
"""What younger architectures have instead: a directory goes before the path, and these flags come last."""
_AT_PATHS: dict[str, Callable[[int, int], tuple[str, tuple[int, ...]]]] = {
    "rename": lambda old, new: ("renameat2", (AT_FDCWD, old, AT_FDCWD, new, 0)),
    "symlink": lambda target, path: ("symlinkat", (target, AT_FDCWD, path)),
}


class UserMemory(Protocol):
    word_size: int

    def read(self, va: int, size: int) -> bytes: ...

    def write(self, va: int, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class GuestStat:
    """What stat(2) in the guest says; sizes in bytes, times in nanoseconds since the epoch."""

    ino: int
    nlink: int
    mode: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


def check(result: int, word_size: int) -> int:
    """A system call's result register of so many bytes. Raises: KernelError for a negative errno."""
    size = 1 << 8 * word_size
    result %= size
    if result >= size - _MAX_ERRNO:
        raise KernelError(size - result)
    return result


class Syscalls:
    """The system calls that the front end makes for host processes. Callers hold the control lock."""

    def __init__(
        self, executive: Executive, memory: UserMemory, buffers: UserBuffers, numbers: Mapping[str, int]
    ) -> None:
        self._executive = executive
        self._memory = memory
        self._buffers = buffers
        self._nr = numbers

    def number(self, name: str) -> int:
        """The guest's number of a system call."""
        return self._nr[name]

    def has(self, name: str) -> bool:
        """Whether the guest has a system call."""
        return name in self._nr

    def call(self, task: GuestTask, name: str, *args: int, hostfs: HostfsHandler | None = None) -> int:
        """One system call by its name. Raises: KernelError; WouldBlock (see Executive.syscall)."""
        nr = self._nr[name]
        return check(self._executive.syscall(task, nr, *args, hostfs=hostfs), self._memory.word_size)

    def with_path(
        self, task: GuestTask, name: str, path: str, *args: int, hostfs: HostfsHandler | None = None
    ) -> int:
        """A system call whose first argument is a path."""
        with self._buffers.borrowed() as buffer:
            self._put_path(buffer, path)
            return self._at_path(task, name, buffer, *args, hostfs=hostfs)

    def _at_path(
        self, task: GuestTask, name: str, path: int, *args: int, hostfs: HostfsHandler | None = None
    ) -> int:
        """A system call on the path at that address, by the name that most architectures have for it."""
        if name in self._nr or name not in _AT:
            return self.call(task, name, path, *args, hostfs=hostfs)
        instead, flags = _AT[name]
        return self.call(task, instead, AT_FDCWD, path, *args, *flags, hostfs=hostfs)

    def with_paths(self, task: GuestTask, name: str, first: str, second: str) -> int:
        """A system call on two paths."""
        with self._buffers.borrowed() as buffer:
            self._put_path(buffer, first)
            self._put_path(buffer + PATH_MAX, second)
            if name in self._nr:
                return self.call(task, name, buffer, buffer + PATH_MAX)
            name, args = _AT_PATHS[name](buffer, buffer + PATH_MAX)
            return self.call(task, name, *args)

    def _put_path(self, buffer: int, path: str) -> None:
        data = path.encode("utf-8", "surrogateescape") + b"\0"
        if len(data) > PATH_MAX:
            raise KernelError(errno.ENAMETOOLONG)
        self._memory.write(buffer, data)

    def open(
        self, task: GuestTask, path: str, flags: int, mode: int = 0, hostfs: HostfsHandler | None = None
    ) -> int:
        """openat(2); the file descriptor."""
        buffer = self._buffers.get()
        try:
            self._put_path(buffer, path)
            return self.call(task, "openat", AT_FDCWD, buffer, flags, mode, hostfs=hostfs)
        finally:
            self._buffers.put(buffer)

    def read(self, task: GuestTask, fd: int, size: int, offset: int | None = None) -> bytes:
        """read(2), or pread64(2) when `offset` is given."""
        size = min(size, BUFFER_SIZE)
        with self._buffers.borrowed() as buffer:
            if offset is None:
                count = self.call(task, "read", fd, buffer, size)
            else:
                count = self.call(task, "pread64", fd, buffer, size, *self._offset(offset))
            return self._memory.read(buffer, count)

    def write(self, task: GuestTask, fd: int, data: bytes, offset: int | None = None) -> int:
        """write(2), or pwrite64(2) when `offset` is given; bytes taken."""
        data = data[:BUFFER_SIZE]
        with self._buffers.borrowed() as buffer:
            self._memory.write(buffer, data)
            if offset is None:
                return self.call(task, "write", fd, buffer, len(data))
            return self.call(task, "pwrite64", fd, buffer, len(data), *self._offset(offset))

    def truncate(self, task: GuestTask, path: str, size: int) -> None:
        """truncate(2)."""
        if self._memory.word_size == 8:
            self.with_path(task, "truncate", path, size)
        else:
            self.with_path(task, "truncate64", path, *self._offset(size))

    def _offset(self, value: int) -> tuple[int, ...]:
        """An offset as arguments: two on a 32-bit machine, the low half first."""
        return (value,) if self._memory.word_size == 8 else (value & 0xFFFFFFFF, value >> 32)

    def lstat(self, task: GuestTask, path: str) -> GuestStat:
        """lstat(2)."""
        with self._buffers.borrowed() as buffer:
            self._put_path(buffer + _STAT.size, path)
            self._at_path(task, "newlstat", buffer + _STAT.size, buffer)
            return self._stat(buffer)

    def fstat(self, task: GuestTask, fd: int) -> GuestStat:
        """fstat(2)."""
        with self._buffers.borrowed() as buffer:
            self.call(task, "newfstat", fd, buffer)
            return self._stat(buffer)

    def _stat(self, buffer: int) -> GuestStat:
        fields = _STAT.unpack(self._memory.read(buffer, _STAT.size))
        _dev, ino, nlink, mode, uid, gid, _pad, rdev, size, _blksize, blocks = fields[:11]
        atime, mtime, ctime = (s * 10**9 + ns for s, ns in zip(fields[11::2], fields[12::2], strict=True))
        return GuestStat(ino, nlink, mode, uid, gid, rdev, size, blocks, atime, mtime, ctime)

    def readlink(self, task: GuestTask, path: str) -> str:
        """readlink(2)."""
        with self._buffers.borrowed() as buffer:
            self._put_path(buffer, path)
            count = self._at_path(task, "readlink", buffer, buffer + PATH_MAX, PATH_MAX)
            return self._memory.read(buffer + PATH_MAX, count).decode("utf-8", "surrogateescape")

    def listdir(self, task: GuestTask, path: str) -> list[str]:
        """Names in a directory, without "." and "..": open, getdents64 until it is empty, close."""
        fd = self.open(task, path, 0o200000)
        names: list[str] = []
        try:
            with self._buffers.borrowed() as buffer:
                while count := self.call(task, "getdents64", fd, buffer, BUFFER_SIZE):
                    names += _names(self._memory.read(buffer, count))
        finally:
            self.call(task, "close", fd)
        return [name for name in names if name not in (".", "..")]

    def utimens(self, task: GuestTask, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """utimensat(2) without following a symbolic link; times since the epoch, None leaves one alone."""
        times = struct.pack("<4q", *_timespec(atime_ns), *_timespec(mtime_ns))
        with self._buffers.borrowed() as buffer:
            self._memory.write(buffer, times)
            self._put_path(buffer + len(times), path)
            self.call(task, "utimensat", AT_FDCWD, buffer + len(times), buffer, AT_SYMLINK_NOFOLLOW)


def _timespec(time_ns: int | None) -> tuple[int, int]:
    return (0, UTIME_OMIT) if time_ns is None else divmod(time_ns, 10**9)


def _names(entries: bytes) -> list[str]:
    names, at = [], 0
    while at < len(entries):
        length = _DIRENT.unpack_from(entries, at)[2]
        name = entries[at + _DIRENT.size : at + length].split(b"\0", 1)[0]
        names.append(name.decode("utf-8", "surrogateescape"))
        at += length
    return names
