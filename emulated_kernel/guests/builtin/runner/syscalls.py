"""Syscalls: makes system calls of guest tasks from Python.

Paths and data pass through user buffers, and an errno is raised as KernelError.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

from emulated_kernel.guests.builtin.builtin_kernel import BUFFER_SIZE, BuiltinKernel
from emulated_kernel.guests.builtin.runner.guest_runner import GuestRunner, GuestTask, HostfsHandler
from emulated_kernel.guests.common.client_call import ARGUMENTS, ClientCall
from emulated_kernel.image.kallsyms import address_of
from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault
from emulated_kernel.util.errors import KernelError, checked_count
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.fast_named_tuple import NamedTuple

PATH_MAX = 4096
AT_FDCWD = -100 & 0xFFFFFFFF
"""Value of AT_FDCWD as a program passes it in a register: a 32-bit int."""
AT_SYMLINK_NOFOLLOW = 0x100
UTIME_OMIT = (1 << 30) - 2
"""Value of tv_nsec by which utimensat(2) leaves a time unchanged."""
AT_REMOVEDIR = 0x200
_MAX_ERRNO = 4095
_STAT = struct.Struct("<QQQIIIIQqqqQQQQQQ")
"""Layout of the guest's struct stat, which is x86_64's on every architecture."""
_ENTRY = struct.Struct("<QIBB")
"""Layout of the guest's struct host_entry up to its name; each entry begins at a multiple of 8.

Its fields are ino, cookie (at which the next call continues), type and length of the name.
"""
_ENTRY_SIZE = 16
"""Size in bytes of a struct host_entry with an empty name."""
_OUTPUT = 64 << 10
"""Offset in bytes, in a user buffer, of the data that a system call returns. The paths precede the data."""
_REPLY = 8192
"""Size in bytes of the guest's buffer to which the functions host_look_* write their results."""
_SLOT = 2 * PATH_MAX
"""Size in bytes of the space for a path in a user buffer.

The first half has the path as the process passed it, and the second half the path as the guest walks it.
"""
_MAX_PATHS = 2
"""Maximum number of paths among the arguments of a system call."""
_WALKS_ONLY = 2
"""Value of task_struct.host_names for a call with unreadable paths: only the paths to walk are known.

Mirrors: HOST_NAMES_UNKNOWN of the guest's host_abi.h.
"""

_AT: dict[str, tuple[str, tuple[int, ...]]] = {
    "access": ("faccessat", ()),
    "chmod": ("fchmodat", ()),
    "chown": ("fchownat", (0,)),
    "lchown": ("fchownat", (AT_SYMLINK_NOFOLLOW,)),
    "mkdir": ("mkdirat", ()),
    "mknod": ("mknodat", ()),
    "newlstat": ("newfstatat", (AT_SYMLINK_NOFOLLOW,)),
    "newstat": ("newfstatat", (0,)),
    "open": ("openat", ()),
    "readlink": ("readlinkat", ()),
    "rmdir": ("unlinkat", (AT_REMOVEDIR,)),
    "unlink": ("unlinkat", (0,)),
}
"""Older system call -> (newer call that replaces it on some architectures, the newer call's last arguments).

AT_FDCWD is passed to the newer call before the path.
"""
_AT_PATHS: dict[str, Callable[[int, int], tuple[str, tuple[int, ...]]]] = {
    "creat": lambda path, mode: ("openat", (AT_FDCWD, path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, mode)),
    "link": lambda old, new: ("linkat", (AT_FDCWD, old, AT_FDCWD, new, 0)),
    "rename": lambda old, new: ("renameat2", (AT_FDCWD, old, AT_FDCWD, new, 0)),
    "symlink": lambda target, path: ("symlinkat", (target, AT_FDCWD, path)),
}
"""Older system call of two arguments -> function that converts a call to the newer system call.

The function takes the two arguments, and returns (name of the newer call, its arguments).
"""


class HostLookup(IntEnum):
    """Result that the guest's lookup of a name has in a directory of control files, during one system call.

    MISSING and EXISTS: the host has looked up the name already, and this is its result. DEFAULT: the host
    passes no result. Then a name is missing if the call must create it or is a rename to it; otherwise the
    name exists. Mirrors: HOST_LOOKUP_* of the guest's host_abi.h.
    """

    DEFAULT = 0
    MISSING = 1
    EXISTS = 2


@dataclass(frozen=True, slots=True)
class GuestStat:
    """Result of stat(2) in the guest. Sizes are in bytes.

    The times are nanoseconds of the guest's clock; WallTime.to_wall() converts them.
    """

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


class GuestEntry(NamedTuple):
    """A directory entry as getdents64(2) returns it; `kind` holds the S_IFMT bits of the file's mode."""

    name: str
    kind: int
    ino: int


def check(result: int, word_size: int) -> int:
    """Return `result`, the register value after a system call, as an unsigned word of `word_size` bytes.

    Raises: KernelError (the result is a negative errno).
    """
    size = 1 << 8 * word_size
    result %= size
    if result >= size - _MAX_ERRNO:
        raise KernelError(size - result)
    return result


class Syscalls:
    """Makes system calls by guest tasks on behalf of host processes."""

    def __init__(self, runner: GuestRunner, kernel: BuiltinKernel) -> None:
        self._runner = runner
        self._machine = kernel.machine
        image = kernel.image
        self._memory = kernel.machine.memory
        self._kernel = kernel
        self._buffers = kernel.buffers
        self._nr = kernel.syscall_numbers
        self._path = image.abi["host_path"]
        self._reply = image.abi["host_reply"]
        self._slots: int | None = None
        """Address of the memory for unreadable paths; None until _unreadable_slots() allocates it."""
        self._look_path = address_of(image.kallsyms, "host_look_path")
        self._look_fd = address_of(image.kallsyms, "host_look_fd")
        self._look_link = address_of(image.kallsyms, "host_look_link")
        self._look_entries = address_of(image.kallsyms, "host_look_entries")

    def number(self, name: str) -> int:
        """Return the number that the system call `name` has in the guest."""
        return self._nr[name]

    def has(self, name: str) -> bool:
        """Return True if the guest has a system call called `name`."""
        return name in self._nr

    def call(self, task: GuestTask, name: str, *args: int, hostfs: HostfsHandler | None = None) -> int:
        """Let `task` make the system call `name`, and return the result.

        `hostfs`: serves the control file that the call works on; None if it works on none. Raises:
        KernelError (the errno of the call), WouldBlock (see GuestRunner.syscall).
        """
        nr = self._nr[name]
        return check(self._runner.syscall(task, nr, *args, hostfs=hostfs), self._memory.word_size)

    def with_path(
        self, task: GuestTask, name: str, path: str, *args: int, hostfs: HostfsHandler | None = None
    ) -> int:
        """Make `task` call the system call `name`, whose first argument is a path; return the result.

        `args`: the arguments after the path. `hostfs`: as for call().
        """
        with self._buffers.borrowed() as buffer:
            self._put_path(buffer, path)
            return self._at_path(task, name, buffer, *args, hostfs=hostfs)

    def _at_path(
        self, task: GuestTask, name: str, path: int, *args: int, hostfs: HostfsHandler | None = None
    ) -> int:
        """Make the system call `name` on the path at address `path`.

        If the guest lacks this call, make the newer call that replaces it, such as openat for open.
        `args`: the arguments after the path. `hostfs`: as for call().
        """
        if name in self._nr or name not in _AT:
            return self.call(task, name, path, *args, hostfs=hostfs)
        instead, flags = _AT[name]
        return self.call(task, instead, AT_FDCWD, path, *args, *flags, hostfs=hostfs)

    def with_paths(self, task: GuestTask, name: str, first: str, second: str) -> int:
        """Make `task` call the system call `name`, whose arguments are two paths; return the result."""
        with self._buffers.borrowed() as buffer:
            self._put_path(buffer, first)
            self._put_path(buffer + PATH_MAX, second)
            return self._on_paths(task, name, buffer, buffer + PATH_MAX)

    def _on_paths(self, task: GuestTask, name: str, first: int, second: int) -> int:
        if name in self._nr:
            return self.call(task, name, first, second)
        name, args = _AT_PATHS[name](first, second)
        return self.call(task, name, *args)

    def of_client(
        self,
        task: GuestTask,
        call: ClientCall,
        walks: Sequence[str] = (),
        lookup: HostLookup = HostLookup.DEFAULT,
        hostfs: HostfsHandler | None = None,
    ) -> int:
        """Let `task` repeat the system call in which its host process waits; return the guest's result.

        The call has the arguments that the process passed. `walks`: paths from the guest's root that the
        guest walks in place of the paths in the call; if empty, the guest walks the paths in the call. If
        `call.is_hidden` is True, the paths in the call are unknown, so `walks` must have a path for each.
        `lookup`: result of the host's lookup of the path's last name. `hostfs`: serves the control file that
        the call works on. If the call takes or returns a descriptor, call this method in a numbered() block:
        the guest's descriptor then has the number that the process knows.
        Raises: KernelError (the errno of the guest's call), WouldBlock (see GuestRunner.syscall).
        """
        if call.is_hidden:
            return self._of_hidden(task, call, walks, lookup, hostfs)
        with self._buffers.borrowed() as buffer:
            args = list(call.args)
            paths = iter(walks)
            slot = buffer
            for at, kind in enumerate(ARGUMENTS[call.name]):
                if kind == "o":
                    args[at] = buffer + _OUTPUT
                elif at in call.data and args[at]:
                    args[at] = slot
                    text = call.data[at]
                    self._memory.write(slot, text + b"\0")
                    walk = next(paths, None) if kind == "p" else None
                    self._put_path(slot + PATH_MAX, os.fsdecode(text) if walk is None else walk)
                    slot += _SLOT
            if call.name in ("getdents64", "readlink", "readlinkat"):
                args[-1] = min(args[-1], BUFFER_SIZE - _OUTPUT)
            with self._set(task, host_names=1, host_lookup=lookup):
                return self._by_any_name(task, call.name, args, hostfs)

    def _of_hidden(
        self,
        task: GuestTask,
        call: ClientCall,
        walks: Sequence[str],
        lookup: HostLookup,
        hostfs: HostfsHandler | None,
    ) -> int:
        """Make a system call whose paths could not be read from the client's memory, and return the result.

        The guest walks `walks` in place of the paths. If a probe reads a path of the call, the read faults.
        The parameters are those of of_client().
        """
        slot = self._unreadable_slots()
        args = list(call.args)
        named = [at for at, kind in enumerate(ARGUMENTS[call.name]) if kind == "p"]
        for at, walk in zip(named, walks, strict=True):
            self._put_path(slot + PATH_MAX, walk)
            args[at] = slot
            slot += _SLOT
        with (
            self._buffers.borrowed() as buffer,
            self._set(task, host_names=_WALKS_ONLY, host_lookup=lookup),
        ):
            for at, kind in enumerate(ARGUMENTS[call.name]):
                if kind == "o":
                    args[at] = buffer
            return self._by_any_name(task, call.name, args, hostfs)

    def _unreadable_slots(self) -> int:
        """Return the address of user memory for paths that could not be read.

        Each path has a slot of _SLOT bytes. The first half, for the path as the process passed it, is not
        mapped, so that a probe's read of the path faults. The second half is for the path that the guest
        walks.
        """
        if self._slots is None:
            self._slots = self._buffers.get()
            for number in range(_MAX_PATHS):
                self._memory.unmap(self._slots + number * _SLOT, PATH_MAX)
        return self._slots

    def _by_any_name(
        self, task: GuestTask, name: str, args: list[int], hostfs: HostfsHandler | None = None
    ) -> int:
        """Make the system call `name`, or the one that replaces it in the guest; return the result.

        `args`: the arguments of the call `name`, as a host process passes them. Raises: KernelError EOVERFLOW
        (an lseek offset exceeds the guest's long).
        """
        bits = 8 * self._memory.word_size
        if name in ("truncate", "ftruncate") and bits == 32:
            name = f"{name}64"
            args = [args[0], *self._offset(args[1])]
        elif name == "lseek" and args[1] >> bits - 1 not in (0, (1 << 65 - bits) - 1):
            raise KernelError(errno.EOVERFLOW, f"lseek to {args[1]:#x}")
        args = [value & (1 << bits) - 1 for value in args]
        if name in _AT_PATHS and name not in self._nr:
            return self._on_paths(task, name, *args)
        return self._at_path(task, name, *args, hostfs=hostfs)

    @contextmanager
    def numbered(self, task: GuestTask, number: int | None, fd: int = 0) -> Iterator[None]:
        """In the `with` block, let system calls of `task` use `number` for the guest's descriptor `fd`.

        `number`: the descriptor's number in the host process; None makes the block change nothing. An open(2)
        in the block needs no `fd`: it returns `number`, and real_fd() then returns the guest's new
        descriptor.
        """
        if number is None:
            yield
        else:
            with self._set(task, host_fd=number + 1, host_real_fd=fd):
                yield

    def real_fd(self, task: GuestTask) -> int:
        """Return the guest's descriptor that the last open(2) in a numbered() block returned."""
        return self._kernel.get_field(task.addr, "host_real_fd")

    @contextmanager
    def _set(self, task: GuestTask, **fields: int) -> Iterator[None]:
        """Set 32-bit fields of a task_struct during the `with` block; afterwards set them to 0.

        The field host_real_fd keeps its value after the block.
        """
        for field, value in fields.items():
            self._kernel.set_field(task.addr, field, value)
        try:
            yield
        finally:
            # If the task was killed in the call, its memory may have been reused.
            if self._runner.is_alive(task):
                for field in fields.keys() - {"host_real_fd"}:
                    self._kernel.set_field(task.addr, field, 0)

    def set_umask(self, task: GuestTask, umask: int) -> None:
        """Set the task's umask to `umask`, that of its process, before a call that creates a file."""
        self._kernel.set_field(task.addr, "umask", umask)

    def _put_path(self, buffer: int, path: str) -> None:
        data = path.encode("utf-8", "surrogateescape") + b"\0"
        if len(data) > PATH_MAX:
            raise KernelError(errno.ENAMETOOLONG)
        self._memory.write(buffer, data)

    def open(
        self, task: GuestTask, path: str, flags: int, mode: int = 0, hostfs: HostfsHandler | None = None
    ) -> int:
        """Open a file by openat(2) and return the file descriptor."""
        with self._buffers.borrowed() as buffer:
            self._put_path(buffer, path)
            return self.call(task, "openat", AT_FDCWD, buffer, flags, mode, hostfs=hostfs)

    def read(self, task: GuestTask, fd: int, size: int, offset: int | None = None) -> bytes:
        """Return at most `size` bytes of a file, by pread64(2) if `offset` is given, else by a plain read."""
        size = min(size, BUFFER_SIZE)
        with self._buffers.borrowed() as buffer:
            if offset is None:
                count = self.call(task, "read", fd, buffer, size)
            else:
                count = self.call(task, "pread64", fd, buffer, size, *self._offset(offset))
            return self._memory.read(buffer, checked_count(count, size))

    def write(self, task: GuestTask, fd: int, data: bytes, offset: int | None = None) -> int:
        """Write data to a file, by pwrite64(2) if `offset` is given; return the number of bytes written."""
        data = data[:BUFFER_SIZE]
        with self._buffers.borrowed() as buffer:
            self._memory.write(buffer, data)
            if offset is None:
                return self.call(task, "write", fd, buffer, len(data))
            return self.call(task, "pwrite64", fd, buffer, len(data), *self._offset(offset))

    def truncate(self, task: GuestTask, path: str, size: int) -> None:
        """Set the size in bytes of the file at `path`."""
        with self._buffers.borrowed() as buffer:
            self._put_path(buffer, path)
            self._by_any_name(task, "truncate", [buffer, size])

    def ftruncate(self, task: GuestTask, fd: int, size: int) -> None:
        """Set the size of an open file, in bytes."""
        self._by_any_name(task, "ftruncate", [fd, size])

    def seek(self, task: GuestTask, fd: int, offset: int) -> None:
        """Set the position of the open file `fd` by lseek(2).

        Raises: KernelError, EOVERFLOW (the offset is too large for a guest's long).
        """
        self._by_any_name(task, "lseek", [fd, offset, os.SEEK_SET])

    def _offset(self, value: int) -> tuple[int, ...]:
        """Return a file offset as arguments of a call: one word; for a 32-bit guest, two.

        The two words are the low and the high half of the offset.
        """
        return (value,) if self._memory.word_size == 8 else (value & 0xFFFFFFFF, value >> 32)

    def fstat(self, task: GuestTask, fd: int) -> None:
        """Make the task call newfstat on a descriptor, so that probes see the call. Discard the result."""
        with self._buffers.borrowed() as buffer:
            self.call(task, "newfstat", fd, buffer)

    def look(self, path: str) -> GuestStat:
        """Return the attributes of a file or symbolic link, by the guest's function host_look_path.

        No task makes a system call, so probes and tracers see nothing. Raises: KernelError (the errno of the
        lookup; see also _ask()).
        """
        self._ask(self._look_path, path)
        return self._stat()

    def look_fd(self, fd: int) -> GuestStat:
        """Return the attributes of an open file, by its descriptor in the guest; see look()."""
        self._ask(self._look_fd, "", fd)
        return self._stat()

    def look_link(self, path: str) -> str:
        """Return the target of a symbolic link, without a system call; see look()."""
        size = checked_count(self._ask(self._look_link, path), _REPLY)
        return os.fsdecode(self._memory.read(self._reply, size))

    def look_entries(self, path: str) -> Iterator[GuestEntry]:
        """Yield a directory's entries, except "." and "..", without a system call; see look().

        In an intact directory, the positions of entries ascend. The first entry that violates this order, and
        all entries after it, are left out as damaged.
        """
        start = 0
        with self._kernel.damage.left_out("list of directory entries"):
            while size := checked_count(self._ask(self._look_entries, path, start), _REPLY):
                data = self._memory.read(self._reply, size)
                at = 0
                while at + _ENTRY.size <= size:
                    ino, following, kind, length = _ENTRY.unpack_from(data, at)
                    if following <= start:
                        raise MemoryFault(self._reply + at, "a position that does not ascend")
                    start = following
                    name = data[at + _ENTRY.size : at + _ENTRY.size + length]
                    yield GuestEntry(os.fsdecode(name), kind << 12, ino)
                    at += (_ENTRY_SIZE + length + 7) & ~7

    def _ask(self, function: int, path: str, *args: int) -> int:
        """Call a host_look_* function of the guest on a path and return its result.

        Raises: KernelError, EIO (the guest is dead, or it has damaged its files), EDEADLK (called from a
        probe's handler).
        """
        self._runner.check_stopped()
        if self._runner.is_dead:
            raise KernelError(errno.EIO, "the emulated kernel has stopped; see machine/dmesg")
        self._put_path(self._path, path)
        try:
            result = self._machine.call(function, *args)
        except GuestFault as fault:
            self._kernel.damage.report("tree of files", fault)
            raise KernelError(errno.EIO, f"the tree of files leads to {fault}") from fault
        return check(result, self._memory.word_size)

    def _stat(self) -> GuestStat:
        """Return the attributes that a host_look_* function has written to the reply buffer."""
        fields = _STAT.unpack(self._memory.read(self._reply, _STAT.size))
        _dev, ino, nlink, mode, uid, gid, _pad, rdev, size, _blksize, blocks, *times = fields
        atime = times[0] * 10**9 + times[1]
        mtime = times[2] * 10**9 + times[3]
        ctime = times[4] * 10**9 + times[5]
        return GuestStat(ino, nlink, mode, uid, gid, rdev, size, blocks, atime, mtime, ctime)

    def utimens(self, task: GuestTask, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set a file's times by utimensat(2), which does not follow a symbolic link.

        Times are in nanoseconds of the guest's clock; None leaves a time unchanged.
        """
        times = struct.pack("<4q", *_timespec(atime_ns), *_timespec(mtime_ns))
        with self._buffers.borrowed() as buffer:
            self._memory.write(buffer, times)
            self._put_path(buffer + len(times), path)
            self.call(task, "utimensat", AT_FDCWD, buffer + len(times), buffer, AT_SYMLINK_NOFOLLOW)


def _timespec(time_ns: int | None) -> tuple[int, int]:
    return (0, UTIME_OMIT) if time_ns is None else divmod(time_ns, 10**9)
