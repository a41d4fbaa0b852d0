"""LinuxSyscalls: methods that make system calls by guest tasks, with buffers in the tasks' own memory."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from errno import EIO
from functools import lru_cache

from emulated_kernel.guests.linux.guest.tasks import LinuxTask, LinuxTasks, Service
from emulated_kernel.guests.linux.initramfs import BUFFER
from emulated_kernel.guests.linux.inodes import shown_ino
from emulated_kernel.util.errors import KernelError, checked_count
from emulated_kernel.vfs.core.client import DirEntry, Stat, StatFs

DATA_SIZE = 512 << 10
"""Maximum number of bytes that one call reads or writes."""
PATIENCE = 10_000
"""Microseconds of guest time after which a sleeping read raises Blocked.

Its client then waits outside the guest.
"""
_LONG = 60_000_000
"""Maximum microseconds of guest time that a call may sleep while it waits for a lock or a grace period."""
_SECOND_PATH = BUFFER + 4096
_DATA = BUFFER + 8192
_F_SETFL = 4
_MNT_DETACH = 2
_MODULE = "/module"
_KMSG = "/kmsg"
_KMSG_DEVICE = 1 << 8 | 11
_AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_REMOVEDIR = 0x200
_SYSLOG_READ_ALL = 3
_LOG_SIZE = 256 << 10
_LISTING = 32 << 10
_LINE = 900
"""Maximum length in bytes of a line that is written to the kernel log; a log record takes 1,024."""
_STATFS_HEAD = struct.Struct("<7Q")
"""Layout of struct statfs up to f_ffree.

Mirrors: include/uapi/asm-generic/statfs.h:struct statfs (v6.1).
"""
_DIRENT = struct.Struct("<QqHB")
_POLLFD = struct.Struct("<ihh")
_OPEN_FLAGS = os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC
"""Mask of the flags of open(2) that the host uses and that have the same value on all processors."""
_PATHS = 500
"""Maximum number of paths that are cached as C strings."""
_UTIME_OMIT = (1 << 30) - 2


class LinuxSyscalls:
    """Makes system calls by guest tasks. Most methods take the task that makes the call.

    All methods can raise KernelError with the call's errno, and GuestFault.
    """

    def __init__(self, tasks: LinuxTasks) -> None:
        self._tasks = tasks
        self._call = tasks.call
        self._abi = tasks.machine.abi
        self._number = number = self._abi.syscalls
        self._openat = number["openat"]
        self._close = number["close"]
        self._read = number["read"]
        self._pread64 = number["pread64"]
        self._write = number["write"]
        self._files = tasks.files
        self.is_seekable = tasks.files.is_seekable
        """Function that returns True if lseek(2) works on a descriptor."""

    def mount(self, source: str, directory: str) -> None:
        """Mount a file system of the type `source` on `directory`; init makes the call."""
        init = self._tasks.init
        self._path(init, directory)
        self._tasks.copy_to_user(init, _SECOND_PATH, os.fsencode(source) + b"\0")
        self._call(init, self._number["mount"], _SECOND_PATH, BUFFER, _SECOND_PATH, 0, 0)

    def unmount(self, directory: str) -> None:
        """Unmount the file system on `directory`; init makes the call. Open files stay usable."""
        init = self._tasks.init
        self._path(init, directory)
        self._call(init, self._number["umount2"], BUFFER, _MNT_DETACH)

    def umask(self, task: LinuxTask, mask: int) -> None:
        """Set the file mode creation mask of a task; forked tasks inherit it."""
        self._call(task, self._number["umask"], mask)

    def log(self) -> bytes:
        """Return the kernel log as syslog(2) returns it to dmesg(1): lines with level and time."""
        init = self._tasks.init
        size = self._call(init, self._number["syslog"], _SYSLOG_READ_ALL, _DATA, _LOG_SIZE)
        return self._tasks.copy_from_user(init, _DATA, checked_count(size, _LOG_SIZE))

    def say(self, line: str) -> None:
        """Write a line to the kernel log, by a write of init to a device node that no client can see."""
        init = self._tasks.init
        mode = stat.S_IFCHR | 0o600
        if "mknod" in self._number:
            self._path(init, _KMSG)
            self._call(init, self._number["mknod"], BUFFER, mode, _KMSG_DEVICE)
        else:
            self.on_path(init, "mknodat", _KMSG, mode, _KMSG_DEVICE)
        try:
            fd = self.open(init, _KMSG, os.O_WRONLY)
            try:
                text = f"<4>kprobefs: {line}".encode("utf-8", "surrogateescape")[:_LINE]
                # Without a newline the line would not be shown, and the next line might be appended to it.
                self.write(init, fd, text + b"\n", None)
            finally:
                self.close(init, fd)
        finally:
            self.on_path(init, "unlinkat", _KMSG, 0)

    def open(
        self,
        task: LinuxTask,
        path: str,
        flags: int,
        mode: int = 0,
        *,
        closed: int | None = None,
        service: Service | None = None,
    ) -> int:
        """Open a file by openat(2) and return the descriptor, which all tasks share.

        `closed`: a descriptor that the task closes first, in the same run, or None. `service`: function that
        does the host's work in the call (see Service); it is not used together with `closed`.
        """
        try:
            self._tasks.copy_to_user(task, BUFFER, _c_string(path))
        except KernelError:
            if closed is not None:
                self.close(task, closed)
            raise
        directory = self._abi.o_directory if flags & os.O_DIRECTORY else 0
        arguments = self._openat, _AT_FDCWD, BUFFER, flags & _OPEN_FLAGS | directory, mode
        if closed is None:
            return self._call(task, *arguments, patience=_LONG, service=service)
        return self._tasks.call_after_close(task, closed, *arguments, patience=_LONG)

    def close(self, task: LinuxTask, fd: int) -> None:
        """Close a descriptor by `task`, or by init if the task is in a call or has ended."""
        self._call(task if task.alive and not task.pending else self._tasks.init, self._close, fd)

    def read_all(self, path: str) -> bytes:
        """Return the content of a whole file, which init reads."""
        init = self._tasks.init
        parts = []
        fd = self.open(init, path, os.O_RDONLY)
        while size := self.begin_read(init, fd, DATA_SIZE, None, may_block=False):
            parts.append(self.read_data(init, size, DATA_SIZE))
        self.close(init, fd)
        return b"".join(parts)

    def load_module(self, task: LinuxTask, content: bytes) -> None:
        """Load the module file `content` by finit_module(2), which `task` calls.

        The call needs a descriptor, so init first writes `content` to a file that no client can see.
        Invariant: no task has this file open for writing during finit_module(2). Otherwise the call would
        fail with ETXTBSY.
        """
        init = self._tasks.init
        fd = self._unlinked(content)
        try:
            self._path(task, "")
            with self._tasks.machine.ticking_in(self._abi.modules):
                self._call(task, self._number["finit_module"], fd, BUFFER, 0, patience=_LONG)
        finally:
            self.close(init, fd)

    def _unlinked(self, content: bytes) -> int:
        """Write `content` to a new file as init, unlink the file, and return a descriptor for reading it."""
        init = self._tasks.init
        written = self.open(init, _MODULE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            try:
                at = 0
                while at < len(content):
                    at += self.write(init, written, content[at : at + DATA_SIZE], None)
            finally:
                self.close(init, written)
            return self.open(init, _MODULE, os.O_RDONLY)
        finally:
            self.on_path(init, "unlinkat", _MODULE, 0)

    def delete_module(self, task: LinuxTask, name: str) -> None:
        """Unload the module `name` by a system call of the task."""
        self._path(task, name)
        with self._tasks.machine.ticking_in(self._abi.modules):
            self._call(task, self._number["delete_module"], BUFFER, os.O_NONBLOCK, patience=_LONG)

    def move(self, task: LinuxTask, old: int, new: int) -> None:
        """Renumber a descriptor: duplicate `old` as `new` by dup2(2), and close `old`."""
        self._call(task, self._number["dup2"], old, new)
        self.close(task, old)

    def set_status_flags(self, task: LinuxTask, fd: int, flags: int) -> None:
        """Set the status flags of an open file by fcntl(F_SETFL)."""
        self._call(task, self._number["fcntl"], fd, _F_SETFL, flags)

    def begin_read(
        self,
        task: LinuxTask,
        fd: int,
        size: int,
        offset: int | None,
        *,
        may_block: bool,
        service: Service | None = None,
    ) -> int:
        """Call read(2), or pread64(2) if `offset` is given; return the number of bytes read.

        read_data() takes this number as `count`. `size`: maximum number of bytes. `may_block`: whether the
        read may wait for data. If True, it sleeps at most PATIENCE; if False, it only waits for locks, for at
        most _LONG, which is much longer. `service`: function that does the host's work in read(2); see
        Service.
        Raises: Blocked (the read sleeps for longer than that).
        """
        patience = PATIENCE if may_block else _LONG
        size = min(size, DATA_SIZE)
        if offset is None:
            return self._call(task, self._read, fd, _DATA, size, patience=patience, service=service)
        return self._call(task, self._pread64, fd, _DATA, size, offset, patience=patience)

    def read_data(self, task: LinuxTask, count: int, size: int) -> bytes:
        """Return the bytes that begin_read() has read into the task's buffer.

        `count`: the result of begin_read(). `size`: the size that was requested.
        """
        return self._tasks.copy_from_user(task, _DATA, checked_count(count, min(size, DATA_SIZE)))

    def write(
        self,
        task: LinuxTask,
        fd: int,
        data: bytes,
        offset: int | None,
        service: Service | None = None,
    ) -> int:
        """Write `data` to a descriptor, at `offset` if it is given; return the number of bytes written.

        `service`: function that does the host's work in write(2); see Service.
        Raises: Blocked (the call sleeps for too long), WouldBlock (`service` must wait).
        """
        data = data[:DATA_SIZE]
        self._tasks.copy_to_user(task, _DATA, data)
        if offset is None:
            return self._call(task, self._write, fd, _DATA, len(data), patience=_LONG, service=service)
        return self._call(task, self._number["pwrite64"], fd, _DATA, len(data), offset, patience=_LONG)

    def poll(self, fd: int, events: int) -> int:
        """Return the poll mask of the `events` that are ready on the descriptor `fd`; init makes the call."""
        init = self._tasks.init
        self._tasks.copy_to_user(init, _DATA, _POLLFD.pack(fd, events, 0) + bytes(16))
        if "poll" in self._number:
            self._call(init, self._number["poll"], _DATA, 1, 0)
        else:
            # The time to wait, 0, is in the zeros after the request.
            self._call(init, self._number["ppoll"], _DATA, 1, _DATA + _POLLFD.size)
        return int(_POLLFD.unpack(self._tasks.copy_from_user(init, _DATA, _POLLFD.size))[2]) & 0xFFFF

    def cached_lstat(self, path: str) -> Stat | None:
        """Return the attributes of the file at `path` from its dentry, without running the guest.

        Return None if the guest is dead, or if DcacheReader.lstat() finds no usable dentry.
        """
        return None if self._tasks.machine.death else self._files.lstat(path)

    def lstat(self, path: str) -> Stat:
        """Return the attributes of the file at `path`, by a newfstatat(2) of init."""
        init = self._tasks.init
        self.on_path(init, "newfstatat", path, _DATA, AT_SYMLINK_NOFOLLOW)
        return self._stat()

    def fstat(self, fd: int) -> Stat:
        """Return the attributes of an open file from its inode."""
        self._tasks.machine.check_alive()
        return self._files.fstat(fd)

    def _stat(self) -> Stat:
        layout = self._abi.stat
        device, ino, *members = layout.unpack(
            self._tasks.copy_from_user(self._tasks.init, _DATA, layout.size)
        )
        order = self._abi.stat_order
        found = dict(zip(order, members, strict=False))
        times = members[len(order) :]
        atime, mtime, ctime = (times[at] * 10**9 + times[at + 1] for at in (0, 2, 4))
        return Stat(
            ino=shown_ino(ino, device),
            mode=found["mode"],
            nlink=found["nlink"],
            uid=found["uid"],
            gid=found["gid"],
            size=found["size"],
            atime_ns=atime,
            mtime_ns=mtime,
            ctime_ns=ctime,
            blocks=found["blocks"],
        )

    def listdir(self, path: str) -> list[DirEntry]:
        """Return all entries of a directory, including "." and "..", by calls of init."""
        init = self._tasks.init
        fd = self.open(init, path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return self.getdents(init, fd)
        finally:
            self.close(init, fd)

    def getdents(self, task: LinuxTask, fd: int) -> list[DirEntry]:
        """Return the entries of an open directory from its position to its end, by calls of getdents64(2)."""
        device = self.fstat(fd).ino & 0xFF
        entries: list[DirEntry] = []
        while size := self.getdents64(task, fd):
            entries += _entries(
                self._tasks.copy_from_user(task, _DATA, checked_count(size, _LISTING)), device
            )
        return entries

    def getdents64(self, task: LinuxTask, fd: int) -> int:
        """Read the next entries of an open directory into the task's buffer, by one system call.

        Return their size in bytes, or 0 at the end of the directory.
        """
        return self._call(task, self._number["getdents64"], fd, _DATA, _LISTING)

    def rewind(self, task: LinuxTask, fd: int) -> None:
        """Set the position of an open directory to its beginning by lseek(2)."""
        self._call(task, self._number["lseek"], fd, 0, os.SEEK_SET)

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link, by readlinkat(2); init makes the call."""
        init = self._tasks.init
        size = self.on_path(init, "readlinkat", path, _DATA, 4096)
        return os.fsdecode(self._tasks.copy_from_user(init, _DATA, checked_count(size, 4096)))

    def on_path(
        self, task: LinuxTask, name: str, path: str, *arguments: int, service: Service | None = None
    ) -> int:
        """Make the system call `name`, a key of GuestAbi.syscalls, on a path; return its result.

        `arguments`: arguments of the call after the path. `service`: function that does the host's work in
        the call; see Service.
        """
        self._tasks.copy_to_user(task, BUFFER, _c_string(path))
        patience = 0 if service is None else _LONG
        return self._call(
            task, self._number[name], _AT_FDCWD, BUFFER, *arguments, patience=patience, service=service
        )

    def on_paths(self, task: LinuxTask, name: str, old: str, new: str, *flags: int) -> None:
        """Make the system call `name`, a key of GuestAbi.syscalls, on two paths from the guest's root.

        `flags`: arguments of the call after the paths.
        """
        self._tasks.copy_to_user(task, _SECOND_PATH, _c_string(new))
        self.on_path(task, name, old, _AT_FDCWD, _SECOND_PATH, *flags)

    def symlink(self, task: LinuxTask, path: str, target: str) -> None:
        """Create a symbolic link at `path` to `target` by symlinkat(2)."""
        self._path(task, path)
        self._tasks.copy_to_user(task, _SECOND_PATH, _c_string(target))
        self._call(task, self._number["symlinkat"], _SECOND_PATH, _AT_FDCWD, BUFFER)

    def statfs(self, path: str) -> StatFs:
        """Return the capacity of the file system at `path`; init makes the call."""
        init = self._tasks.init
        self._path(init, path)
        self._call(init, self._number["statfs"], BUFFER, _DATA)
        _, *room = _STATFS_HEAD.unpack(self._tasks.copy_from_user(init, _DATA, _STATFS_HEAD.size))
        return StatFs(*room)

    def truncate(self, task: LinuxTask, path: str, size: int) -> None:
        """Set the size in bytes of the file at `path`."""
        self._path(task, path)
        self._call(task, self._number["truncate"], BUFFER, size)

    def ftruncate(self, task: LinuxTask, fd: int, size: int) -> None:
        """Set the size of an open file, in bytes."""
        self._call(task, self._number["ftruncate"], fd, size)

    def fsync(self, task: LinuxTask, fd: int, *, only_data: bool) -> None:
        """Write cached data of an open file to storage.

        `only_data`: call fdatasync(2); if False, call fsync(2).
        """
        self._call(task, self._number["fdatasync" if only_data else "fsync"], fd)

    def utimens(self, task: LinuxTask, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times of a file by utimensat(2), which does not follow a symbolic link.

        Times are in nanoseconds of the guest's clock; None leaves a time unchanged.
        """
        times = b"".join(
            struct.pack("<qq", 0, _UTIME_OMIT) if time is None else struct.pack("<qq", *divmod(time, 10**9))
            for time in (atime_ns, mtime_ns)
        )
        self._tasks.copy_to_user(task, _DATA, times)
        self.on_path(task, "utimensat", path, _DATA, AT_SYMLINK_NOFOLLOW)

    def _path(self, task: LinuxTask, path: str) -> None:
        self._tasks.copy_to_user(task, BUFFER, _c_string(path))


@lru_cache(_PATHS)
def _c_string(path: str) -> bytes:
    """Return a path as a C string, cut at 4096 bytes.

    The kernel returns ENAMETOOLONG for a path whose first 4096 bytes contain no NUL.
    """
    return (os.fsencode(path) + b"\0")[:4096]


def _entries(data: bytes, device: int) -> Iterator[DirEntry]:
    at = 0
    while at + _DIRENT.size <= len(data):
        ino, _, size, kind = _DIRENT.unpack_from(data, at)
        if size < _DIRENT.size:
            raise KernelError(EIO, "the guest gives entries of a directory that are none")
        name = data[at + _DIRENT.size : at + size].split(b"\0", 1)[0]
        yield DirEntry(os.fsdecode(name), kind << 12, ino << 8 | device)
        at += size
