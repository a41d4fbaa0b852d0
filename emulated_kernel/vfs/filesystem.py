"""FileSystem and FileDescription: the interfaces of the file systems and of the open files of a mount.

Each method documents its use of the control lock:

- "Lock: held": the caller holds the lock;
- "Lock: taken": the method takes the lock and releases it;
- "Lock: taken in pieces": the method also releases the lock for other threads between two pieces of its work;
- "Lock: may be taken": an implementation may take the lock;
- "Lock: not used": the method does not need the lock, and must not wait for the thread that holds it.

All methods raise KernelError with Linux's errno. The default implementations in this module behave like
Linux 6.1 for a file system without the operation. None of them raises ENOSYS, because FUSE remembers that
errno for as long as the mount exists.
"""
# ruff: noqa: ARG002, B027 -- a default implementation has no use for most of its arguments.

from __future__ import annotations

import errno
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from threading import Event
from typing import ClassVar

from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.changes import ChangeWatcher
from emulated_kernel.vfs.core.client import Client, DirEntry, Stat, StatFs, path_after_rename, require_path
from emulated_kernel.vfs.core.open_file import ALWAYS_READY


class FileSystem(ABC):
    """Interface of a file system of a mount.

    A file system exists as long as its mount. The files belong to a kernel. If another kernel replaces this
    kernel, become() switches the file system to the new one. A request that waits for the lock meanwhile is
    served by the new kernel. Paths are absolute and start at the mount's root.

    A method *begins a request* if it advances the guest's virtual clock. `getattr`, `readdir` and `readlink`
    must not begin a request. The host kernel decides how often it calls these methods, so traces would depend
    on the host.
    """

    guest: object | None = None
    """The guest that owns the files, or None if the files are control files.

    The guest itself refuses rename(2) and link(2) between two of the guest's file systems. Between any other
    two file systems, the mount refuses both calls: with EROFS if one of the two is read-only, otherwise with
    EXDEV.
    """
    is_read_only = False
    """Whether every operation that would change the file system fails with EROFS."""
    clients_own: Collection[str] = ()
    """Directories in the mount's root in which only clients create and remove names."""
    is_control = False
    """Whether the files are control files.

    A front end may keep the paths of control files, because clients cannot rename, link or unlink them.
    """

    def __init__(self, lock: ControlLock | None = None) -> None:
        """Create a file system without open files. `lock`: the kernel's control lock; None: a new lock."""
        self.lock = lock or ControlLock()
        self.opened: dict[FileDescription, None] = {}
        """Open files and directories, as keys in the order in which they were opened.

        A method that opens a file adds the file's description.
        """
        self.on_names_end: Callable[[str | None], object] | None = None
        """Function to call when front ends must look names up again, although name_lasts() was True.

        The caller holds the lock. The argument is the last part of the paths of removed directories, such as
        GROUP/EVENT. It is "" if any name may be gone. It is None if no name may be used without a lookup any
        more, because the guest sees lookups from now on.
        """
        self.gate: Event | None = None
        """Event for which changes of control files wait while a kernel is being built to replace this one.

        None at all other times.
        """

    def follow_processes(self) -> None:
        """Repeat in the guest the forks and exits of clients' processes since the last request, if any.

        A front end calls this method while a client waits for data, because an exit may make a record. If
        nothing has happened, the method begins no request. Lock: taken.
        """

    def request(self, client: Client | None) -> AbstractContextManager[object]:
        """Return the context manager in whose `with` block an operation of `client` runs.

        Entering the context takes the lock, so the caller must not hold the lock.
        """
        return self.lock

    @property
    def sees_lookups(self) -> bool:
        """Whether getattr() needs its argument `client` now, because the guest may repeat the client's call.

        Lock: not used.
        """
        return False

    def informed(self, client: Client, opened: str | None = None) -> Client:
        """Return `client` with the facts about its process that a request needs. Lock: may be taken.

        `opened`: the path of the file that an open(2) opens; "" if the request is the lookup of a path that
        exists; None for any other request.

        Facts are the process's system call, name and memory map. The mount calls this method before each
        request. The method can take 0.2 s if the process's memory cannot be read at once.
        """
        return client

    # Names

    @abstractmethod
    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        """Return the attributes of a file. Lock: taken.

        `client` returns the process that requests the attributes; it is None if no process does. If the
        process's system call ends with this lookup, the guest may repeat the call, even if the file does not
        exist.

        Raises: KernelError ENOENT, ENOTDIR, ENAMETOOLONG.
        """

    @abstractmethod
    def readdir(self, path: str, client: Client | None = None) -> list[DirEntry]:
        """Return the entries of a directory, "." and ".." first. Lock: taken.

        The mount itself adds the entries of file systems that are mounted in the directory. If `path` is the
        root of this file system, the mount corrects the inode number of "..".

        Raises: KernelError ENOTDIR, and the errors of getattr().
        """

    def readlink(self, client: Client, path: str) -> str:
        """Return the target of a symbolic link. Lock: taken. Raises: KernelError EINVAL (not a link)."""
        raise KernelError(errno.EINVAL, path)

    @abstractmethod
    def open(self, client: Client, path: str, flags: int) -> FileDescription:
        """Open a file with the flags of a system call, including O_TRUNC. Lock: taken. Begins a request.

        The implementation adds the description to `opened`.
        Raises: KernelError EISDIR, EACCES (O_CREAT with a new name where clients cannot create files), and
        the errors of getattr().
        """

    def create(self, client: Client, path: str, mode: int, flags: int) -> FileDescription:
        """Create a regular file and open it; see open().

        Raises: KernelError EACCES (clients cannot create files in the file system).
        """
        raise self._refused(errno.EACCES, path)

    def opendir(self, client: Client, path: str) -> OpenDirectory:
        """Open a directory. Lock: taken. The host has checked that `path` is a directory."""
        directory = OpenDirectory(self, path)
        self.opened[directory] = None
        return directory

    def chdir(self, client: Client, path: str) -> None:
        """Report a client's change of its working directory to the guest, which cannot refuse the change.

        Lock: may be taken.
        """

    def statfs(self, path: str) -> StatFs:
        """Return the file system's capacity. Lock: may be taken. Mirrors: fs/libfs.c:simple_statfs (v6.1)."""
        return StatFs()

    # Changes. Lock: taken. Each method may begin a request.

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """Create a directory. Lock: taken. May begin a request.

        Raises: KernelError EPERM (not supported), EEXIST.
        """
        raise self._refused(errno.EPERM, path)

    def rmdir(self, client: Client, path: str) -> None:
        """Remove a directory. The paths of open directories at and below `path` become GONE.

        Lock: taken. May begin a request.
        Raises: KernelError EPERM (not supported), EBUSY (the directory or its kernel object is in use).
        """
        raise self._refused(errno.EPERM, path)

    def unlink(self, client: Client, path: str) -> None:
        """Remove a name of a file. Lock: taken. May begin a request.

        Raises: KernelError EPERM (not supported).
        """
        raise self._refused(errno.EPERM, path)

    def rename(self, client: Client, old: str, new: str) -> None:
        """Rename a file or directory, and change the paths of open directories at and below `old`.

        Lock: taken. May begin a request.
        Raises: KernelError EPERM (not supported), EXDEV (the paths are in two file systems of a guest).
        """
        raise self._refused(errno.EPERM, old)

    def link(self, client: Client, old: str, new: str) -> None:
        """Create a hard link `new` to the file `old`.

        Lock: taken. May begin a request.
        Raises: KernelError EPERM (not supported), EXDEV (the paths are in two file systems of a guest).
        """
        raise self._refused(errno.EPERM, new)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Create a symbolic link at `path` to `target`. Lock: taken. May begin a request.

        Raises: KernelError EPERM (not supported).
        """
        raise self._refused(errno.EPERM, path)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """Create a FIFO, a socket or an empty file. Lock: taken. May begin a request.

        Raises: KernelError EPERM (not supported; always for a device).
        """
        raise self._refused(errno.EPERM, path)

    def truncate(self, client: Client, path: str, size: int) -> None:
        """Set the size of the file at `path`. Lock: taken. May begin a request.

        This method is not called for O_TRUNC, which open() handles.
        Raises: KernelError EINVAL (not supported, or a negative size).
        """
        raise self._refused(errno.EINVAL, path)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set the permission bits of a file, after the front end has checked the client's permission.

        Lock: taken. May begin a request.
        Raises: KernelError EPERM (not supported).
        """
        raise self._refused(errno.EPERM, path)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set user and group of a file; -1 leaves either unchanged.

        Lock: taken. May begin a request.
        Raises: KernelError EPERM (not supported).
        """
        raise self._refused(errno.EPERM, path)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times of a file, in nanoseconds since the epoch; None leaves a time unchanged.

        Lock: taken. May begin a request.
        Raises: KernelError EPERM (not supported).
        """
        raise self._refused(errno.EPERM, path)

    # Policy that a front end would otherwise have to implement

    def name_lasts(self, path: str) -> bool:
        """Return True if a front end may use the name at `path` again without a getattr(). Lock: taken.

        The front end may do so until the file system calls `on_names_end`.
        """
        return False

    def has_many_nodes(self, path: str) -> bool:
        """Return True if rmdir(2) of the directory `path` frees thousands of nodes. Lock: taken."""
        return False

    def is_always_open(self, path: str) -> bool:
        """Return True if the file at `path` can be opened even if the mount's limit of open files is reached.

        Lock: not used.
        """
        return False

    # For the daemon. Lock: held, except for is_dead and close, which take it.

    def open_in_guest(self, *, names_end: bool = True) -> None:
        """Open the clients' open files in the guest too, because probes could notice calls from now on.

        `names_end`: whether probes could also notice lookups. If so, a front end must look up all names
        again. Lock: held.
        """

    def become(self, new: FileSystem) -> None:
        """Show the files of another kernel from now on.

        `new` is a file system of this class that shows the other kernel's files. The descriptions in `opened`
        remain valid. If a file cannot be opened again by its path, the `error` of the file's description
        becomes ESTALE. Lock: held.
        """
        raise KernelError(errno.EOPNOTSUPP, "no other kernel can take the place of this one")

    def watch(self, watcher: ChangeWatcher | None) -> None:
        """Report clients' changes of control files to `watcher` from now on.

        None ends the reports. Lock: held.
        """

    def is_between_parts(self) -> bool:
        """Return True if an open file keeps written data that a later write(2) or its close will execute.

        Lock: held.
        """
        return False

    def is_dead(self) -> bool:
        """Return True if the guest cannot run any more. Lock: taken."""
        return False

    def close(self) -> None:
        """Free the resources of the file system and wake waiters, because the mount ends.

        A second call has no effect. Lock: taken.
        """
        for opened in list(self.opened):
            opened.error = errno.EIO
        self.opened.clear()

    def _refused(self, error: int, path: str) -> KernelError:
        return KernelError(errno.EROFS if self.is_read_only else error, path)

    def _moved(self, old: str, new: str) -> None:
        """Update the paths of open directories after rename(2) of `old` to `new`.

        If `new` is GONE, update them after rmdir(2) of `old`. Lock: held.
        """
        for opened in list(self.opened):
            if opened.is_directory:
                opened.path = path_after_rename(opened.path, old, new)


class FileDescription:
    """Interface of an open file. Each handle of the mount has its own description."""

    __slots__ = ("error", "flags", "fs", "handle", "path")

    is_directory: ClassVar[bool] = False

    def __init__(self, fs: FileSystem, path: str, flags: int) -> None:
        """Create the description of a file that open(2) opened with `flags`."""
        self.fs = fs
        self.path = path
        self.flags = flags
        self.error = 0
        """0 while the description is usable, else the errno of requests on the description.

        The errno is ESTALE if another kernel, without the file, has replaced the kernel, and EIO if the
        mount has ended. The mount checks `error` before each call except read() and write(), which check it
        after they have taken the lock. Other methods that wait for the lock have to check `error` again.
        """
        self.handle = 0
        """The mount's handle for this description, or 0 before the mount has assigned it."""

    @property
    def stream(self) -> bool:
        """Whether the file is a stream, on which lseek(2) fails with ESPIPE. Lock: not used."""
        return False

    @property
    def acts_on_close(self) -> bool:
        """Whether release() has an effect that other files show. Lock: not used.

        The mount evaluates this after the open and after each write.
        """
        return False

    @property
    def reads_host(self) -> bool:
        """Whether a write reads files of the host, which can take long. Lock: not used."""
        return False

    @property
    def writes_at_once(self) -> bool:
        """Return True if write() never reads a host file first, and if its `data` may be a memoryview.

        The front end may then pass a view of its request buffer. write() must copy the data before it lets
        another request run, because that request overwrites the buffer. Lock: not used.
        """
        return False

    def check(self) -> None:
        """Check that the description is usable. Raises: KernelError ESTALE, EIO (see `error`)."""
        if self.error:
            raise self.gone()

    def gone(self) -> KernelError:
        """Return the exception to raise for a request on this description. `error` must not be 0."""
        why = "of a kernel before this one" if self.error == errno.ESTALE else "the mount has ended"
        return KernelError(self.error, why)

    def getattr(self, client: Callable[[], Client] | None = None) -> Stat:
        """Return the attributes of the open file, whose name may have been removed. Lock: taken.

        `client`: see FileSystem.getattr.
        """
        return self.fs.getattr(require_path(self.path), client)

    def informed(self, client: Client) -> Client:
        """Return `client` with the facts about its process that a read or write of the file needs.

        See FileSystem.informed.
        """
        return self.fs.informed(client)

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Return at most `size` bytes, or b"" at the end of the file. Lock: taken. May begin a request.

        Raises: KernelError EINVAL (the file cannot be read), WouldBlock (no data yet: call wait() and read
        again, or call give_up()).
        """
        raise KernelError(errno.EINVAL, self.path)

    def read_page(self, client: Client, size: int, offset: int) -> bytes:
        """Return a page for the host's page cache, for splice(2), sendfile(2) or mmap(2).

        Lock: taken. May begin a request. Raises: the errors of read().
        """
        return self.read(client, size, offset)

    def write(self, client: Client, data: bytes, offset: int) -> int:
        """Write `data` at `offset`, and return the number of bytes written, which may be fewer than given.

        Lock: taken in pieces. The file may process the data in pieces; each of them may begin a request.
        Raises: KernelError EINVAL (the file cannot be written), WouldBlock (not ready: call wait() and write
        again, or call give_up()).
        """
        raise KernelError(errno.EINVAL, self.path)

    def poll(self, notify: Callable[[], None] | None) -> int:
        """Return the mask of the poll events for which the file is ready. Lock: may be taken.

        `notify`: called once when the mask changes; None: no client waits for a change.
        """
        return ALWAYS_READY

    def wait(self, timeout: float) -> None:
        """Wait until the file may be ready, for at most `timeout` seconds.

        Lock: not used, because this method sleeps.
        """

    def give_up(self, client: Client, error: int) -> None:
        """Give up a call that raised WouldBlock: the call of `client` fails with the errno `error`.

        Lock: taken.
        """

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Write cached data to storage. Lock: may be taken.

        `only_data`: whether metadata may stay in the cache, as in fdatasync(2).
        Raises: KernelError EINVAL (the file has no such operation, like Linux's files without ->fsync).
        """
        raise KernelError(errno.EINVAL, self.path)

    def ftruncate(self, client: Client, size: int) -> None:
        """Set the size of the file. Lock: taken. Raises: KernelError EINVAL (not supported)."""
        raise KernelError(errno.EINVAL, self.path)

    def set_status_flags(self, flags: int) -> None:
        """Set the open file's status flags to `flags`, the new flags of fcntl(F_SETFL). Lock: not used."""

    def release(self) -> None:
        """Release the description, because its last descriptor was closed. Lock: may be taken.

        The front end does not know which client closed the file.
        """
        self.fs.opened.pop(self, None)


class OpenDirectory(FileDescription):
    """An open directory. `path` is the directory's current path, or GONE.

    Operations for files raise EISDIR.
    """

    __slots__ = ("entries",)

    is_directory = True

    def __init__(self, fs: FileSystem, path: str) -> None:
        super().__init__(fs, path, 0)
        self.entries: list[DirEntry] | None = None
        """Entries from the last listing that began at index 0, or None before the first listing."""

    def readdir(self, client: Client) -> list[DirEntry]:
        """Return the entries of the directory for getdents64(2); see FileSystem.readdir."""
        return self.fs.readdir(require_path(self.path), client)

    def listed(self, client: Client) -> None:
        """Repeat the client's getdents64(2) in the guest; by default, do nothing. Lock: taken."""

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Refuse to read a directory. Raises: KernelError EISDIR, like the other operations for files."""
        raise KernelError(errno.EISDIR, self.path)

    def write(self, client: Client, data: bytes, offset: int) -> int:
        raise KernelError(errno.EISDIR, self.path)

    def poll(self, notify: Callable[[], None] | None) -> int:
        raise KernelError(errno.EISDIR, self.path)

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Do nothing. Mirrors: fs/libfs.c:noop_fsync (v6.1)."""

    def ftruncate(self, client: Client, size: int) -> None:
        raise KernelError(errno.EISDIR, self.path)


def is_device(mode: int) -> bool:
    """Return True if mknod(2) with `mode` would create a device, which all file systems refuse."""
    return stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK)
