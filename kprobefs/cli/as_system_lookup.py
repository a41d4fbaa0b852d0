"""Path lookups in the place of another process: with its root, working directory, ids and capabilities."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property

from kprobefs.cli.as_system_filter import system_call, this_machine

CAP_SYS_PTRACE = 1 << 19
CAP_SYS_ADMIN = 1 << 21
MAX_LINKS = 40
"""Maximum number of symbolic links that one lookup follows. Mirrors: MAXSYMLINKS."""
_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 2
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_STATX_DONT_SYNC = 0x4000
_STATX_BASIC_STATS = 0x7FF
_STATX = struct.Struct("=IIQIIIH2xQQQQ64xIIII")
"""Layout of the first 144 bytes of struct statx, up to the device number of the file system."""
_CLONE_FS = 0x200
_PR_SET_KEEPCAPS = 8
_CAPABILITY_VERSION_3 = 0x20080522
_NS_GET_USERNS = 0xB701
_NS_GET_PARENT = 0xB702
_PROC_MAGIC = 0x9FA0
_PROC_ROOT_INO = 1
_LINES = re.compile(rb"^(Tgid|Pid|Uid|Gid|Groups|NStgid|CapPrm|CapEff):(.*)$", re.MULTILINE)
"""Pattern for the lines of /proc/PID/status that Credentials needs."""

_libc = ctypes.CDLL(None, use_errno=True)


class Found:
    """Attributes of an open file, read without a request to the file system.

    The kernel answers with the attributes that it has cached.
    """

    def __init__(self, file: int | str, *, only_device: bool = False) -> None:
        """Read the attributes of `file`, a descriptor or the path of a descriptor's link in /proc.

        `only_device`: read only the device number, because FUSE refuses the other attributes to some users.

        Raises: OSError.
        """
        # Ask for cached attributes only: a request of this process would be in the command's traces.
        buffer = ctypes.create_string_buffer(256)
        place, name, flags = (file, b"", _AT_EMPTY_PATH) if isinstance(file, int) else (_AT_FDCWD, file, 0)
        flags |= _AT_STATX_DONT_SYNC
        mask = 0 if only_device else _STATX_BASIC_STATS
        if _libc.statx(place, os.fsencode(name), flags, mask, buffer):
            raise _failure()
        fields = _STATX.unpack_from(buffer)
        self.owner: int = fields[4]
        self.mode: int = fields[6]
        self.inode: int = fields[7]
        self.size: int = fields[8]
        self.device: tuple[int, int] = fields[13:15]


class Credentials:
    """Ids, capabilities and namespaces of a process."""

    def __init__(self, process: int) -> None:
        """Read the credentials from `process`, an open directory /proc/PID. Raises: OSError."""
        self._directory = process
        status = os.open("status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)
        with open(status, "rb") as file:
            words = {name: rest.split() for name, rest in _LINES.findall(file.read())}
        self.uids, self.gids, self.groups = (
            [int(word) for word in words[name]] for name in (b"Uid", b"Gid", b"Groups")
        )
        self.effective = int(words[b"CapEff"][0], 16)
        self.permitted = int(words[b"CapPrm"][0], 16)
        self.process = int(words[b"Tgid"][0])
        self.thread = int(words[b"Pid"][0])
        self._number = words[b"NStgid"][-1]

    @cached_property
    def identity(self) -> tuple[str, bytes]:
        """Return (pid namespace as the text of the link /proc/PID/ns/pid, pid in that namespace as digits).

        Raises: OSError.
        """
        return os.readlink("ns/pid", dir_fd=self._directory), self._number

    @cached_property
    def user_namespace(self) -> str:
        """Return the user namespace of the process, as /proc/PID/ns/user shows it. Raises: OSError."""
        return os.readlink("ns/user", dir_fd=self._directory)

    @property
    def owner(self) -> int:
        """Uid of the owner of the process's files in /proc: that of root if the process may not be dumped.

        Raises: OSError.
        """
        return Found(self._directory).owner

    def may_inspect(self, other: Credentials) -> bool:
        """Return True if the process may certainly follow the links in the /proc/PID of the process `other`.

        Return False if it may not, or if this is uncertain.

        Mirrors: kernel/ptrace.c:__ptrace_may_access (v6.1), with PTRACE_MODE_READ_FSCREDS.
        """
        if self.identity == other.identity:
            return True
        if self.user_namespace != other.user_namespace:
            return False
        if self.effective & CAP_SYS_PTRACE:
            return True
        uid = self.uids[3]
        gid = self.gids[3]
        return (
            set(other.uids[:3]) == {uid}
            and set(other.gids[:3]) == {gid}
            and not other.permitted & ~self.effective
            # Hazard: for uid 0, the owner does not show whether the process may be dumped.
            and other.owner == uid != 0
        )


@cache
def _own_credentials() -> Credentials:
    """Return the credentials with which each thread of this process starts."""
    directory = os.open("/proc/thread-self", os.O_PATH | os.O_CLOEXEC)
    try:
        return Credentials(directory)
    finally:
        os.close(directory)


class Lookup:
    """Looks up paths in the place of a task: in a thread that has its root, working directory and ids.

    The thread can serve no other task.
    """

    def __init__(self, task: int) -> None:
        """Give this thread the root, the working directory and the ids of a task.

        `task`: the task's open directory in /proc. Raises: OSError.
        """
        self._opened: list[int] = []
        try:
            self._enter(task)
        except OSError:
            self.close()
            raise

    def _enter(self, task: int) -> None:
        self._proc = self._open("/proc")
        self.credentials = Credentials(task)
        """Credentials of the task."""
        self._task = task
        effective = self.credentials.effective
        self._rights = effective if effective and self._is_of_command() else 0
        root = self._open("root", task)
        working = self._open("cwd", task)
        if _libc.unshare(_CLONE_FS):
            raise _failure()
        os.fchdir(root)
        os.chroot(".")
        os.fchdir(working)
        self._take_ids()

    def _is_of_command(self) -> bool:
        """Return True if the task is in this process's user namespace, or in one directly below it.

        The namespace that kprobefs makes for a command is directly below it. Lookups use the task's effective
        capabilities only if the result is True.
        """
        here = os.stat("self/ns/user", dir_fd=self._proc).st_ino
        theirs = self._open("ns/user", self._task, os.O_RDONLY)
        return os.fstat(theirs).st_ino == here or _namespace(theirs, _NS_GET_PARENT) == here

    def _take_ids(self) -> None:
        """Give this thread the task's ids, because FUSE and file modes check them.

        The thread keeps its permitted capabilities. If _is_of_command(), those that are effective for the
        task become effective; otherwise, none is effective.
        """
        setgroups, setresgid, setresuid = this_machine().ids
        if _libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0):
            raise _failure()
        own = _own_credentials()
        self._permitted = own.permitted
        groups = self.credentials.groups
        if own.groups != groups:
            system_call(setgroups, len(groups), struct.pack(f"={len(groups)}I", *groups))
        if own.gids != self.credentials.gids:
            system_call(setresgid, *self.credentials.gids[:3])
        if own.uids != self.credentials.uids:
            system_call(setresuid, *self.credentials.uids[:3])
        self._set_effective(self._rights)

    def close(self) -> None:
        """Close each file that this object has opened."""
        for each in self._opened:
            os.close(each)

    def open(self, path: bytes) -> int:
        """Open a path with O_PATH in the place of the task, and return the descriptor.

        The descriptor stays open until close(). Raises: OSError.
        """
        try:
            # openat2(2) refuses magic links of /proc here, because their target depends on the process that
            # follows them. _walk() follows them like the task.
            return self._open_plainly(path, _AT_FDCWD)
        except OSError:
            return self._walk(path)

    def _walk(self, path: bytes) -> int:
        """Open a path, name by name, and return the descriptor.

        Mirrors: fs/namei.c:link_path_walk (v6.1).
        """
        if not path:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        names = path.split(b"/")[::-1]
        here = self._start(path)
        process: int | None = None
        links = 0
        while names:
            name = names.pop()
            if not name:
                continue
            there = self._open(name, here, os.O_PATH | os.O_NOFOLLOW)
            if not stat.S_ISLNK(_mode(there)):
                if name.isdigit() and _is_root_of_proc(here):
                    process = there
                here = there
                continue
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if name in (b"self", b"thread-self") and _is_root_of_proc(here):
                process = self._open_own(name)
                here = process
            elif process is not None and self._is_magic(name, here, process):
                here = self._follow(name, here, process)
                process = None
            else:
                target = os.readlink(name, dir_fd=here)
                names += target.split(b"/")[::-1]
                here = self._start(target) if target.startswith(b"/") else here
        if path.endswith(b"/") and stat.S_ISREG(_mode(here)):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return here

    def _start(self, path: bytes) -> int:
        return self._open("/" if path.startswith(b"/") else ".")

    def _open_own(self, name: bytes) -> int:
        """Open the directory to which the link `name`, self or thread-self, leads in the task's /proc."""
        process = self.credentials.process
        own = f"{process}/task/{self.credentials.thread}" if name == b"thread-self" else str(process)
        return self._open(own, self._proc)

    def _is_magic(self, name: bytes, here: int, process: int) -> bool:
        """Return True if a link in /proc is a magic link, which the kernel follows without looking up a path.

        `name`: name of the link in the open directory `here`. `process`: the open directory /proc/PID.
        """
        if Found(here).device != Found(process).device:
            return False
        try:
            with self._raised(CAP_SYS_PTRACE):
                self._open_plainly(name, here)
        except OSError as failure:
            return failure.errno == errno.ELOOP
        return False

    def _follow(self, name: bytes, here: int, process: int) -> int:
        """Open the file to which a link in a process's /proc directory leads.

        `name`: name of the link in the open directory `here`. `process`: the open directory /proc/PID.
        Raises: OSError (EACCES: the task may not follow the links of that process).
        """
        with self._raised(CAP_SYS_PTRACE):
            if not self.credentials.may_inspect(Credentials(process)):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            return self._open(name, here)

    @contextmanager
    def _raised(self, capability: int) -> Iterator[None]:
        self._set_effective(self._rights | capability)
        try:
            yield
        finally:
            self._set_effective(self._rights)

    def take_all_rights(self) -> None:
        """Make all permitted capabilities of this thread effective.

        System calls in which the kernel checks the capabilities of this thread need this first.
        """
        self._set_effective(self._permitted)

    def _set_effective(self, capabilities: int) -> None:
        """Set this thread's effective capabilities to those of `capabilities` that are permitted.

        `capabilities`: a mask of bits, as CapEff in /proc/PID/status.
        """
        permitted = self._permitted
        effective = capabilities & permitted
        header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
        low, high = ((each & 0xFFFFFFFF, each >> 32) for each in (effective, permitted))
        words = struct.pack("=6I", low[0], high[0], 0, low[1], high[1], 0)
        if _libc.capset(header, words):
            raise _failure()

    def _open_plainly(self, path: bytes, directory: int) -> int:
        how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_NO_MAGICLINKS)
        return self._hold(system_call(_OPENAT2, directory, path, how, len(how)))

    def _open(self, path: str | bytes, directory: int | None = None, flags: int = os.O_PATH) -> int:
        return self._hold(os.open(path, flags | os.O_CLOEXEC, dir_fd=directory))

    def _hold(self, descriptor: int) -> int:
        self._opened.append(descriptor)
        return descriptor


def owner_of_namespace(namespace: int) -> int:
    """Return the inode number of the user namespace that owns another namespace.

    `namespace`: descriptor of the owned namespace. Raises: OSError.
    """
    return _namespace(namespace, _NS_GET_USERNS)


def _namespace(namespace: int, request: int) -> int:
    """Return the inode number of a related namespace, such as the parent or the owning user namespace.

    `namespace`: descriptor of a namespace. `request`: ioctl that returns a descriptor of the related
    namespace, such as NS_GET_PARENT. Raises: OSError.
    """
    found = fcntl.ioctl(namespace, request)
    try:
        return os.fstat(found).st_ino
    finally:
        os.close(found)


def _mode(opened: int) -> int:
    """Return the mode of an open file; 0 if FUSE denies this user any access to its mount."""
    try:
        return Found(opened).mode
    except PermissionError:
        return 0


def _is_root_of_proc(directory: int) -> bool:
    # Call fstatfs(2) only if the inode number is that of /proc's root: a mount of kprobefs would count the
    # request.
    if Found(directory).inode != _PROC_ROOT_INO:
        return False
    buffer = (ctypes.c_long * 32)()
    return not _libc.fstatfs(directory, buffer) and buffer[0] == _PROC_MAGIC


def _failure() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
