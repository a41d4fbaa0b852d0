"""GuestFs: shows the files of a distribution's kernel.

Most requests are system calls that clients' tasks make in the guest.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Callable, Mapping
from functools import lru_cache

from emulated_kernel.guests.linux.guest.syscalls import AT_REMOVEDIR, AT_SYMLINK_NOFOLLOW
from emulated_kernel.guests.linux.guest.tasks import Blocked, LinuxTask
from emulated_kernel.guests.linux.initramfs import TMPFS, TRACEFS
from emulated_kernel.guests.linux.mounts.guest_paths import PATHS
from emulated_kernel.guests.linux.mounts.linux_guest import POLLED, LinuxGuest, Request
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import GONE, INO_SPACES, STATUS_FLAGS, Client, DirEntry, Stat, StatFs
from emulated_kernel.vfs.filesystem import FileDescription, FileSystem, OpenDirectory, is_device

_CACHE_SIZE = 500
"""Maximum number of files whose shown attributes are cached."""


class GuestFile(FileDescription):
    """An open file of the guest. `flags`: access mode and status flags of the open file in the guest."""

    __slots__ = ("fd", "position", "seekable", "status", "task", "urgent")

    fs: GuestFs

    def __init__(self, fs: GuestFs, path: str, flags: int, fd: int, task: LinuxTask, seekable: bool) -> None:
        self.fs = fs
        self.path = path
        self.flags = flags
        self.error = 0
        self.handle = 0
        self.fd: int = fd
        self.task: LinuxTask | None = task
        """The task that made the last call on the file, which is the open at first; it is never None."""
        self.seekable = seekable
        self.position = 0
        """Expected offset of the client's next read or write.

        A call at this offset uses the guest's file position.
        """
        self.status = flags & STATUS_FLAGS
        """Status flags of the client's open file; the guest's file gets them before a read or write."""
        self.urgent = 0
        """POLLPRI if the guest reported this event after the client's last poll or read; otherwise 0."""

    @property
    def stream(self) -> bool:
        """Whether lseek(2) fails with ESPIPE; see FileDescription."""
        return not self.seekable

    def getattr(self, client: Callable[[], Client] | None = None) -> Stat:
        """Return the attributes of the open file; see FileDescription."""
        del client
        guest = self.fs.guest
        with guest.running:
            return self.fs.known(guest.syscalls.fstat(self.fd))

    def set_status_flags(self, flags: int) -> None:
        """Take over new status flags from fcntl(F_SETFL); see FileDescription.

        The guest's file gets the flags before the next read or write.
        """
        self.status = flags & STATUS_FLAGS

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Read from the open file; see FileDescription.

        Raises: WouldBlock (the call sleeps in the guest, or would sleep in a task that several clients
        share).
        """
        guest = self.fs.guest
        syscalls = guest.syscalls
        with Request(guest, client) as task:
            self.task = task
            jumped = self.seekable and offset != self.position
            may_block = not self.status & os.O_NONBLOCK
            at = offset if jumped else None
            if may_block and guest.clients.is_shared(task) and not syscalls.poll(self.fd, select.POLLIN):
                raise WouldBlock

            def begin() -> int:
                if self.flags & STATUS_FLAGS != self.status:
                    self._follow_flags(task)
                return syscalls.begin_read(task, self.fd, size, at, may_block=may_block)

            count = guest.slept(client, task, begin)
            self.urgent = 0
            data = syscalls.read_data(task, count, size)
            if not jumped:
                self.position += count
            return data

    def _follow_flags(self, task: LinuxTask) -> None:
        """Set the status flags of the guest's open file to the flags of the client's open file."""
        self.fs.guest.syscalls.set_status_flags(task, self.fd, self.status)
        self.flags = self.flags & ~STATUS_FLAGS | self.status

    def write(self, client: Client, data: bytes, offset: int) -> int:
        """Write to the open file; see FileDescription. Lock: taken.

        Raises: WouldBlock (the call sleeps in the guest, or would sleep in a task that several clients
        share).
        """
        guest = self.fs.guest
        syscalls = guest.syscalls
        with Request(guest, client) as task:
            self.task = task
            # Hazard: the next call of a task that clients share would overwrite its sleeping call.
            may_block = not self.status & os.O_NONBLOCK and guest.clients.is_shared(task)
            if may_block and not syscalls.poll(self.fd, select.POLLOUT):
                raise WouldBlock
            appends = self.status & os.O_APPEND
            jumped = self.seekable and not appends and offset != self.position

            def begin() -> int:
                if self.flags & STATUS_FLAGS != self.status:
                    self._follow_flags(task)
                return syscalls.write(task, self.fd, data, offset if jumped else None)

            count = guest.slept(client, task, begin)
            if not jumped:
                # The host continues here after it has appended, wherever the guest's end of the file is.
                self.position = offset + count
            return count

    def wait(self, timeout: float) -> None:
        """Wait until the file may be ready; see FileDescription."""
        self.fs.guest.wait(timeout)

    def give_up(self, client: Client, error: int) -> None:
        """End a call that raised WouldBlock; see FileDescription.

        The guest kills the task that sleeps in the call. `error` is not used.
        """
        del error
        self.fs.guest.give_up(client)

    @property
    def acts_on_close(self) -> bool:
        """Whether the release of this file may change other files; see FileDescription.

        True if the file was opened for writing, because some files of tracefs act when they are closed. False
        for other files, and for all files in the directories `GuestFs.clients_own`.
        """
        is_writable = self.flags & os.O_ACCMODE != os.O_RDONLY
        return is_writable and self.path.split("/", 2)[1] not in self.fs.clients_own

    @property
    def is_open(self) -> bool:
        """Whether the file has not been released."""
        return self in self.fs.opened

    def mask(self) -> int:
        """Return the poll mask of the events for which the file is ready. Lock: held.

        For some files, such as hist files, the guest reports POLLPRI only once, so it is stored in `urgent`.
        """
        ready = self.fs.guest.syscalls.poll(self.fd, POLLED)
        self.urgent |= ready & select.POLLPRI
        return ready | self.urgent

    def poll(self, notify: Callable[[], None] | None) -> int:
        """Return the ready events as a poll mask; see FileDescription."""
        guest = self.fs.guest
        with guest.running:
            mask = self.mask()
            self.urgent = 0
            if notify is not None:
                guest.pollers[self] = mask & ~select.POLLPRI, notify
            return mask

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Write cached data to storage; see FileDescription. Lock: taken.

        The file lives in the guest's memory, but probes see the call.
        """
        guest = self.fs.guest
        with Request(guest, client) as task:
            guest.syscalls.fsync(task, self.fd, only_data=only_data)

    def ftruncate(self, client: Client, size: int) -> None:
        """Set the size of the open file; see FileDescription."""
        guest = self.fs.guest
        with Request(guest, client) as task:
            guest.syscalls.ftruncate(task, self.fd, size)

    def release(self) -> None:
        """Release the description after its last descriptor was closed; see FileDescription.

        The guest closes the file at the beginning of the next request to the mount. Lock: not used.
        """
        try:
            # One operation: the end of the mount clears the dictionary in another thread.
            del self.fs.opened[self]
        except KeyError:
            return
        self.fs.guest.pollers.pop(self, None)
        self.fs.guest.closes.defer(self)


class GuestDirectory(OpenDirectory):
    """An open directory of the guest, which the tasks of clients list."""

    __slots__ = ("fd", "task")

    fs: GuestFs

    def __init__(self, fs: GuestFs, path: str, fd: int, task: LinuxTask) -> None:
        super().__init__(fs, path)
        self.fd: int = fd
        self.task: LinuxTask | None = task
        """The task that made the last call on the directory, which is the open at first; it is never None."""

    def readdir(self, client: Client) -> list[DirEntry]:
        """Return the entries of the directory, by calls of the client's task; see OpenDirectory."""
        syscalls = self.fs.guest.syscalls
        with self.fs.request(client) as task:
            self.task = task
            if self.entries is not None:
                syscalls.rewind(task, self.fd)
            return self.fs.sorted_entries(syscalls.getdents(task, self.fd))

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Write the directory to storage by a call of the client's task; see FileDescription. Lock: taken."""
        with self.fs.request(client) as task:
            self.task = task
            self.fs.guest.syscalls.fsync(task, self.fd, only_data=only_data)

    def release(self) -> None:
        """Release the description; the guest closes the directory before the next request. Lock: not used."""
        try:
            del self.fs.opened[self]
        except KeyError:
            return
        self.fs.guest.closes.defer(self)


class GuestFs(FileSystem):
    """Shows directories and files of a guest at one or more prefixes of a mount."""

    guest: LinuxGuest
    clients_own = ("scratch",)
    """Directories of the mount's root in which only clients create and remove names.

    Lookups in them need not reach the guest, so the host's kernel may cache them.
    """

    def __init__(self, guest: LinuxGuest, paths: Mapping[str, str], number: int = 1) -> None:
        """Create a file system that shows files of `guest`.

        `paths`: prefix in the mount -> path in the guest.
        `number`: id of this file system in the mount; it makes inode numbers differ from other file systems'.
        """
        super().__init__(guest.lock)
        self.guest = guest
        self._paths = paths
        self._number = number
        self._place: Callable[[str], str] = lru_cache(PATHS)(self._find)
        """Cached version of _find: return the path in the guest for a path in the mount."""
        self.known: Callable[[Stat], Stat] = lru_cache(_CACHE_SIZE)(self._shown)
        """Cached version of _shown: return the attributes that the mount shows for those in the guest."""

    def _find(self, path: str) -> str:
        prefix = path
        while prefix not in self._paths:
            prefix = prefix.rpartition("/")[0] or "/"
        return (self._paths[prefix] + path[len(prefix.rstrip("/")) :]).rstrip("/")

    def request(self, client: Client | None) -> Request:
        """Return the context in which a client's operation runs; see FileSystem.

        The context yields the client's task. `client` must not be None.
        """
        assert client is not None
        return Request(self.guest, client)

    def informed(self, client: Client, opened: str | None = None) -> Client:
        """Return the client with the facts about its process that a request needs; see FileSystem."""
        del opened
        return self.guest.clients.informed(client)

    def follow_processes(self) -> None:
        """Repeat in the guest the forks and exits of clients' processes; see FileSystem."""
        self.guest.follow_processes()

    # Names

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        """Return a file's attributes; see FileSystem.

        If the guest's kernel has cached the file's dentry, the attributes are read from guest memory, even
        while a debugger holds the guest.
        """
        del client
        guest = self.guest
        place = self._place(path)
        with guest.lock.observing():
            guest.check_open()
            found = guest.syscalls.cached_lstat(place)
            if found is not None:
                return self.known(found)
        with guest.running:
            return self.known(guest.syscalls.lstat(place))

    def _shown(self, found: Stat) -> Stat:
        """Return the attributes that the mount shows for a file with the attributes `found` in the guest.

        The mounting user owns the files that root owns in the guest. Devices are shown as regular files.
        Times are converted to the host's time.
        Hazard: if a device were shown as one, the host would open it by the host's driver instead of the
        guest's driver.
        """
        kind = stat.S_IFMT(found.mode)
        shown = self.guest.times.shown
        return Stat(
            found.ino * INO_SPACES + self._number,
            stat.S_IMODE(found.mode) | (stat.S_IFREG if kind in (stat.S_IFCHR, stat.S_IFBLK) else kind),
            found.nlink,
            found.uid or self.guest.owner.uid,
            found.gid or self.guest.owner.gid,
            found.size,
            shown(found.atime_ns),
            shown(found.mtime_ns),
            shown(found.ctime_ns),
            found.blocks,
        )

    def readdir(self, path: str, client: Client | None = None) -> list[DirEntry]:
        """Return the entries of a directory, by calls of the guest's init; see FileSystem.

        A client that has opened the directory lists it by calls of its own task; see GuestDirectory.
        """
        del client
        with self.guest.running:
            return self.sorted_entries(self.guest.syscalls.listdir(self._place(path)))

    def sorted_entries(self, entries: list[DirEntry]) -> list[DirEntry]:
        """Return the guest's entries with the mount's inode numbers, "." and ".." first, others by name."""
        entries.sort(key=lambda entry: (entry.name not in (".", ".."), entry.name))
        return [entry._replace(ino=entry.ino * INO_SPACES + self._number) for entry in entries]

    def readlink(self, client: Client, path: str) -> str:
        """Return the target of a symbolic link; see FileSystem."""
        del client
        with self.guest.running:
            return self.guest.syscalls.readlink(self._place(path))

    def open(self, client: Client, path: str, flags: int) -> FileDescription:
        """Open a file; see FileSystem."""
        return self._open(client, path, flags & ~os.O_CREAT, 0)

    def create(self, client: Client, path: str, mode: int, flags: int) -> FileDescription:
        """Create a regular file and open it; see FileSystem."""
        return self._open(client, path, flags | os.O_CREAT, mode)

    def _open(self, client: Client, path: str, flags: int, mode: int) -> GuestFile:
        guest = self.guest
        with Request(guest, client, True) as task:
            taken = guest.closes.taken
            guest.closes.taken = None
            closed = taken.fd if taken is not None else None
            # Only the open of a FIFO in scratch/ can wait.
            try:
                fd = guest.syscalls.open(task, self._place(path), flags, mode, closed=closed)
            except Blocked:
                raise guest.unasked(client) from None
            file = GuestFile(self, path, flags, fd, task, guest.syscalls.is_seekable(fd))
            self.opened[file] = None
            return file

    def opendir(self, client: Client, path: str) -> OpenDirectory:
        """Open a directory; see FileSystem."""
        with self.request(client) as task:
            flags = os.O_RDONLY | os.O_DIRECTORY
            fd = self.guest.syscalls.open(task, self._place(path), flags)
            directory = GuestDirectory(self, path, fd, task)
            self.opened[directory] = None
            return directory

    def statfs(self, path: str) -> StatFs:
        """Return the capacity of the file system; see FileSystem.

        Only scratch/ has a capacity. For other paths, return zeros without a system call in the guest.
        """
        at = self._place(path)
        if at != TMPFS and not at.startswith(f"{TMPFS}/"):
            return StatFs()
        with self.guest.running:
            return self.guest.syscalls.statfs(at)

    # Changes

    def _change(self, client: Client, name: str, path: str, *arguments: int) -> None:
        """Execute the system call `name` on a path by the client's task.

        `arguments`: arguments of the call after the path.
        """
        with self.request(client) as task:
            self.guest.syscalls.on_path(task, name, self._place(path), *arguments)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """Create a directory; see FileSystem. In instances/ a new directory is a new trace array."""
        self._change(client, "mkdirat", path, mode)

    def rmdir(self, client: Client, path: str) -> None:
        """Remove a directory; see FileSystem."""
        with self.request(client) as task:
            self.guest.syscalls.on_path(task, "unlinkat", self._place(path), AT_REMOVEDIR)
            self._moved(path, GONE)

    def unlink(self, client: Client, path: str) -> None:
        """Remove a name of a file; see FileSystem."""
        self._change(client, "unlinkat", path, 0)

    def rename(self, client: Client, old: str, new: str) -> None:
        """Rename a file or directory; see FileSystem."""
        with self.request(client) as task:
            self.guest.syscalls.on_paths(task, "renameat", self._place(old), self._place(new))
            self._moved(old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        """Give a file an additional name; see FileSystem."""
        with self.request(client) as task:
            self.guest.syscalls.on_paths(task, "linkat", self._place(old), self._place(new), 0)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Create a symbolic link; see FileSystem."""
        with self.request(client) as task:
            self.guest.syscalls.symlink(task, self._place(path), target)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """Create a FIFO, a socket or an empty file; see FileSystem."""
        if is_device(mode):
            raise KernelError(errno.EPERM, path)
        self._change(client, "mknodat", path, mode, 0)

    def truncate(self, client: Client, path: str, size: int) -> None:
        """Set the size in bytes of the file at `path`; see FileSystem."""
        with self.request(client) as task:
            self.guest.syscalls.truncate(task, self._place(path), size)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set a file's permission bits; see FileSystem."""
        self._change(client, "fchmodat", path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set a file's owner and group; see FileSystem.

        If the new owner or group is the mounting user's, the guest's file gets root's.
        """
        owner = self.guest.owner
        uid = 0 if uid == owner.uid else uid
        gid = 0 if gid == owner.gid else gid
        words = uid & 0xFFFFFFFF, gid & 0xFFFFFFFF
        self._change(client, "fchownat", path, *words, AT_SYMLINK_NOFOLLOW)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set a file's access and modification times; see FileSystem."""
        kept = self.guest.times.kept
        times = (None if time is None else kept(time) for time in (atime_ns, mtime_ns))
        with self.request(client) as task:
            self.guest.syscalls.utimens(task, self._place(path), *times)

    def has_many_nodes(self, path: str) -> bool:
        """Return True for a path in instances/, where rmdir(2) frees many files' nodes; see FileSystem.

        Lock: not used.
        """
        return self._place(path).startswith(f"{TRACEFS}/instances/")

    # The end

    def is_dead(self) -> bool:
        """Return True if the guest can't run any more; see FileSystem."""
        with self.lock:
            return self.guest.is_dead

    def close(self) -> None:
        """Free the resources of the file system at the end of its mount; see FileSystem."""
        super().close()
        self.guest.close()
