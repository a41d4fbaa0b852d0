"""FileSystem: what a mount is put together from, and FileDescription: what open(2) makes of one of its files.

Each method says what it does about the control lock, in one of five words:

- *takes*: it takes the lock and gives it back;
- *yields*: it takes the lock, and lets others have it between two pieces of its work;
- *needs*: the caller holds it;
- *leaves*: it neither takes nor needs it, and must not wait for whoever holds it;
- *either*: an implementation may take it.

All methods raise KernelError with Linux's errno. The answers in this module are those of Linux 6.1 for a file
system without the operation; none is ENOSYS, which FUSE remembers for as long as the mount exists.
"""
# ruff: noqa: ARG002, B027 -- an answer by default has no use for most of its arguments.

from __future__ import annotations

import errno
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import ClassVar

from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.changes import ChangeWatcher
from emulated_kernel.vfs.core.client import Client, DirEntry, Stat, StatFs, path_behind, still_there
from emulated_kernel.vfs.core.open_file import ALWAYS_READY


class FileSystem(ABC):
    """One file system of a mount.

    It lives as long as its mount. If another kernel takes the place of the one that it shows, it becomes that
    kernel's by `become`: a request that waited for the lock meanwhile is answered by the new kernel. Paths
    are those of the mount, absolute.

    A method *begins a request* if it lets the guest's virtual clock go on. Names are looked up as often as
    the host pleases, so `getattr`, `readdir` and `readlink` must not begin one: a trace would depend on the
    host.
    """

    guest: object | None = None
    """Whose files they are. rename(2) and link(2) between two file systems of one guest are that guest's to
    refuse; between others they are EXDEV. None: nobody's."""
    is_read_only = False
    """If set, all that would change it is EROFS."""
    clients_own: Collection[str] = ()
    """Directories of the mount's root in which only clients make and remove names."""

    def __init__(self, lock: ControlLock | None = None) -> None:
        """Begin with nothing open. `lock`: the control lock of the kernel whose files these are."""
        self.lock = lock or ControlLock()
        self.opened: dict[FileDescription, None] = {}
        """Open files and directories, in the order of their opens. The file system adds them."""

    def request(self, client: Client | None) -> AbstractContextManager[object]:
        """Return what an operation of `client` runs in: at least the lock, which must not be held before."""
        return self.lock

    # Names

    @abstractmethod
    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        """Return the attributes of a file. Lock: takes.

        `client`: who asks, if a process does. If its system call ends with this answer, the guest may repeat
        the call, of a name that is missing too.

        Raises: KernelError ENOENT, ENOTDIR, ENAMETOOLONG.
        """

    @abstractmethod
    def readdir(self, path: str, client: Client | None = None) -> list[DirEntry]:
        """Return the entries of a directory, "." and ".." first. Lock: takes.

        The mount corrects the inode numbers of what is mounted there, and of "..", if this is a root.

        Raises: KernelError ENOTDIR, as getattr.
        """

    def readlink(self, client: Client, path: str) -> str:
        """Return where a symbolic link leads. Lock: takes. Raises: KernelError EINVAL (it is none)."""
        raise KernelError(errno.EINVAL, path)

    @abstractmethod
    def open(self, client: Client, path: str, flags: int) -> FileDescription:
        """Open a file with the flags of a system call, O_TRUNC included. Lock: takes. Begins a request.

        After it the description is in `opened`. Raises: KernelError EISDIR, EACCES, as getattr.
        """

    def create(self, client: Client, path: str, mode: int, flags: int) -> FileDescription:
        """Make a regular file, and open it as by open(2).

        Raises: KernelError EACCES (nothing can be made here).
        """
        raise self._refused(errno.EACCES, path)

    def opendir(self, client: Client, path: str) -> OpenDirectory:
        """Open a directory. Lock: takes. The host has found that it is one."""
        directory = OpenDirectory(self, path)
        self.opened[directory] = None
        return directory

    def chdir(self, client: Client, path: str) -> None:
        """Let the guest know that a client changes its working directory; it can't refuse. Lock: either."""

    def statfs(self, path: str) -> StatFs:
        """Return what there is room for. Mirrors: fs/libfs.c:simple_statfs (v6.1). Lock: either."""
        return StatFs()

    # Changes. Lock: takes; each may begin a request.

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """Make a directory. Raises: KernelError EPERM, EEXIST."""
        raise self._refused(errno.EPERM, path)

    def rmdir(self, client: Client, path: str) -> None:
        """Remove a directory. After that, open directories at and below `path` are GONE.

        Raises: KernelError EPERM, EBUSY.
        """
        raise self._refused(errno.EPERM, path)

    def unlink(self, client: Client, path: str) -> None:
        """Remove a name of a file. Raises: KernelError EPERM."""
        raise self._refused(errno.EPERM, path)

    def rename(self, client: Client, old: str, new: str) -> None:
        """Give a file another name; open directories move with it.

        Raises: KernelError EPERM, EXDEV (between two of a guest's).
        """
        raise self._refused(errno.EPERM, old)

    def link(self, client: Client, old: str, new: str) -> None:
        """Give a file a further name. Raises: KernelError EPERM, EXDEV, as rename."""
        raise self._refused(errno.EPERM, new)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Make `path` a symbolic link to `target`. Raises: KernelError EPERM."""
        raise self._refused(errno.EPERM, path)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """Make a FIFO, a socket or an empty file. Raises: KernelError EPERM (devices, too)."""
        raise self._refused(errno.EPERM, path)

    def truncate(self, client: Client, path: str, size: int) -> None:
        """Set the size of a file; O_TRUNC comes with its open. Raises: KernelError EINVAL."""
        raise self._refused(errno.EINVAL, path)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set the permission bits; the front end has checked that the client may.

        Raises: KernelError EPERM.
        """
        raise self._refused(errno.EPERM, path)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set the owner; -1 leaves a field alone. Raises: KernelError EPERM."""
        raise self._refused(errno.EPERM, path)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times, in nanoseconds since the epoch; None leaves one alone. Raises: KernelError EPERM."""
        raise self._refused(errno.EPERM, path)

    # Policy that a front end would otherwise have to know

    def needs_closes(self, path: str) -> bool:
        """Whether rmdir(2) of `path` is EBUSY while files are open below, and frees thousands of nodes.

        Lock: takes.
        """
        return False

    def is_always_open(self, path: str) -> bool:
        """Whether the file can be opened beyond the limit of open files. Lock: leaves."""
        return False

    # What the daemon needs. Lock: needs, except for is_dead and close, which take it.

    def open_in_guest(self) -> None:
        """Open in the guest what is open: from now on somebody could notice its calls."""

    def become(self, new: FileSystem) -> None:
        """Show what `new`, of the same class, shows: another kernel's files.

        Descriptions stay. Those that can't be opened again by their path get `error` ESTALE.
        """
        raise KernelError(errno.EOPNOTSUPP, "no other kernel can take the place of this one")

    def watch(self, watcher: ChangeWatcher | None) -> None:
        """Tell `watcher` from now on what clients change."""

    def is_between_parts(self) -> bool:
        """Whether a file waits for the next part of a long write(2)."""
        return False

    def is_dead(self) -> bool:
        """Whether the guest can't run any more."""
        return False

    def close(self) -> None:
        """End with the mount: free what is held, wake who waits. May be called twice."""
        for opened in list(self.opened):
            opened.error = errno.EIO
        self.opened.clear()

    def _refused(self, error: int, path: str) -> KernelError:
        return KernelError(errno.EROFS if self.is_read_only else error, path)

    def _moved(self, old: str, new: str) -> None:
        """Tell open directories that rename(2) has made `new` of `old`, or rmdir(2) GONE. Lock: needs."""
        for opened in list(self.opened):
            if opened.is_directory:
                opened.path = path_behind(opened.path, old, new)


class FileDescription:
    """An open file; each handle of the mount has one. Two are never equal."""

    __slots__ = ("error", "flags", "fs", "handle", "path")

    is_directory: ClassVar[bool] = False

    def __init__(self, fs: FileSystem, path: str, flags: int) -> None:
        """Make the description of an open(2) with `flags`."""
        self.fs = fs
        self.path = path
        self.flags = flags
        self.error = 0
        """ESTALE once its kernel was replaced and has no such file; EIO once the mount has ended; else 0.

        The mount looks at it before each call but read() and write(), which look at it once they have the
        lock. What else waits for the lock has to look again.
        """
        self.handle = 0
        """The mount's, as soon as that has one for it."""

    @property
    def stream(self) -> bool:
        """Whether lseek(2) is ESPIPE. Lock: leaves."""
        return False

    @property
    def reads_host(self) -> bool:
        """Whether a write reads files of the host, and takes as long as they do. Lock: leaves."""
        return False

    def check(self) -> None:
        """Raise the error of a description that is of no use any more. Raises: KernelError ESTALE, EIO."""
        if self.error:
            raise self.gone()

    def gone(self) -> KernelError:
        """Return what a request for it raises if `error` is set."""
        why = "of a kernel before this one" if self.error == errno.ESTALE else "the mount has ended"
        return KernelError(self.error, why)

    def getattr(self, client: Callable[[], Client] | None = None) -> Stat:
        """Return the attributes of the file, whose name may be gone. Lock: takes."""
        return self.fs.getattr(still_there(self.path), client)

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Read at most `size` bytes; b"" is the end. Lock: takes. May begin a request.

        Raises: KernelError EINVAL, WouldBlock (there is nothing yet: call wait() or give_up()).
        """
        raise KernelError(errno.EINVAL, self.path)

    def read_page(self, client: Client, size: int, offset: int) -> bytes:
        """Read what the host's page cache wants, on behalf of splice(2), sendfile(2) or mmap(2).

        As read().
        """
        return self.read(client, size, offset)

    def write(self, client: Client, data: bytes, offset: int) -> int:
        """Write; return the number of bytes taken. Lock: yields; each piece may begin a request.

        Raises: KernelError EINVAL, WouldBlock (as read).
        """
        raise KernelError(errno.EINVAL, self.path)

    def poll(self, notify: Callable[[], None] | None) -> int:
        """Return readiness as the mask of a poll; call `notify` once, when it has changed. Lock: either."""
        return ALWAYS_READY

    def wait(self, timeout: float) -> None:
        """Return once the file may have something to give, or after `timeout` seconds.

        Lock: leaves, for it sleeps.
        """

    def give_up(self, client: Client, error: int) -> None:
        """End what raised WouldBlock: the client gets this errno instead of an answer. Lock: takes."""

    def fsync(self, client: Client) -> None:
        """Write out what is only in memory. Lock: either. Raises: KernelError EINVAL (as without ->fsync)."""
        raise KernelError(errno.EINVAL, self.path)

    def ftruncate(self, client: Client, size: int) -> None:
        """Set its size. Lock: takes. Raises: KernelError EINVAL."""
        raise KernelError(errno.EINVAL, self.path)

    def set_status_flags(self, flags: int) -> None:
        """Take over what fcntl(F_SETFL) has set, as a request on the file shows it. Lock: leaves."""

    def release(self) -> None:
        """Forget it: its last descriptor was closed. Lock: either. The request comes from no process."""
        self.fs.opened.pop(self, None)


class OpenDirectory(FileDescription):
    """An open directory; `path` is where it is now, or GONE. All that a file is asked is EISDIR."""

    __slots__ = ("entries",)

    is_directory = True

    def __init__(self, fs: FileSystem, path: str) -> None:
        super().__init__(fs, path, 0)
        self.entries: list[DirEntry] | None = None
        """From when it was read from its beginning."""

    def listed(self, client: Client) -> None:
        """Let the guest repeat the client's getdents64(2). Lock: takes."""

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Raise EISDIR, as the methods below do."""
        raise KernelError(errno.EISDIR, self.path)

    def write(self, client: Client, data: bytes, offset: int) -> int:
        raise KernelError(errno.EISDIR, self.path)

    def poll(self, notify: Callable[[], None] | None) -> int:
        raise KernelError(errno.EISDIR, self.path)

    def fsync(self, client: Client) -> None:
        raise KernelError(errno.EISDIR, self.path)

    def ftruncate(self, client: Client, size: int) -> None:
        raise KernelError(errno.EISDIR, self.path)


def is_device(mode: int) -> bool:
    """Whether mknod(2) with this mode would make a device, which no file system here makes."""
    return stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK)
