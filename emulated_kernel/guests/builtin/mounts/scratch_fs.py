"""ScratchFs: shows the guest's own file systems, such as scratch/.

Clients' tasks in the guest make the calls.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Collection
from contextlib import suppress

from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.mounts.client_calls import ClientCalls
from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask
from emulated_kernel.guests.builtin.runner.syscalls import AT_SYMLINK_NOFOLLOW, UTIME_OMIT, GuestStat
from emulated_kernel.guests.common.client_call import ClientCall
from emulated_kernel.guests.common.client_facts import facts_of
from emulated_kernel.image.call_graph import Calls
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace
from emulated_kernel.vfs.control_fs import ATTRIBUTE_CALLS
from emulated_kernel.vfs.core.client import GONE, INO_SPACES, Client, DirEntry, Stat, require_path
from emulated_kernel.vfs.filesystem import FileDescription, FileSystem, OpenDirectory, is_device

SYNC_CALLS = ("fsync", "fdatasync")
"""System calls of clients that FileDescription.fsync repeats in the guest."""
UTIME_NOW = UTIME_OMIT + 1
"""Value of tv_nsec with which utimensat(2) sets a file's time to the current time."""


class ScratchFile(FileDescription):
    """A file or directory of scratch/ that is open in the guest."""

    @property
    def writes_at_once(self) -> bool:
        """Return True, because the guest copies the data before write() returns; see FileDescription."""
        return True

    __slots__ = ("fd", "number", "position")

    fs: ScratchFs

    def __init__(self, fs: ScratchFs, fd: int, path: str, flags: int, number: int | None = None) -> None:
        """Create the description of the file that is open in the guest with the descriptor `fd`.

        `number`: the number of the descriptor in the process that opened the file; None if it is unknown.
        """
        self.fs = fs
        self.path = path
        self.flags = flags
        self.error = 0
        self.handle = 0
        self.fd = fd
        self.number = number
        self.position = 0
        """The file position of the guest's open file."""

    def getattr(self, client: Callable[[], Client] | None = None) -> Stat:
        """Return the attributes of the open file; see FileDescription."""
        fs = self.fs
        with fs.lock:
            self.check()
            if client is not None and fs.guest.is_watched(Calls.NAMES):
                with suppress(KernelError):
                    fs.on_file(client(), self.path, self, ATTRIBUTE_CALLS)
            return fs.look_fd(self.fd)

    def informed(self, client: Client) -> Client:
        """Return the client with the facts that a read or write needs; see FileDescription.

        Facts are read if probes can notice calls of any kind, not only reads and writes. The reason is that
        the offset of the read or write can reveal an earlier lseek(2), which is of the kind Calls.NAMES.
        """
        return self.fs.calls.informed(client, Calls.ALL)

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Read from the open file, by a call of the client's task; see FileDescription.

        The task reads at the position of the guest's open file. If `offset` of a read(2) differs from this
        position, the client has called lseek(2), so the task first calls lseek, too. For a pread64(2) or an
        unknown call, the task reads at such an offset by pread64.
        """
        with self.fs.lock:
            if self.error:
                raise self.gone()
            return self.fs.read(client, self, size, offset)

    def write(self, client: Client, data: bytes, offset: int) -> int:
        """Write data to the open file, by a call of the client's task; see FileDescription.

        The task writes at the position of the guest's open file. If `offset` of a write(2) differs from this
        position, the client has called lseek(2), so the task first calls lseek, too. For a pwrite64(2) or an
        unknown call, the task writes at such an offset by pwrite64.
        """
        with self.fs.lock:
            if self.error:
                raise self.gone()
            return self.fs.write(client, self, data, offset)

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Repeat the client's call of fsync or fdatasync in the guest; see FileDescription.

        The file lives in the guest's memory, so there is nothing to write back.
        """
        del only_data
        with self.fs.lock:
            self.check()
            self.fs.on_file(client, self.path, self, SYNC_CALLS)

    def ftruncate(self, client: Client, size: int) -> None:
        """Set the size of the open file; see FileDescription."""
        with self.fs.lock:
            self.check()
            self.fs.ftruncate(client, self, size)

    def release(self) -> None:
        """Release the description after its last descriptor was closed; see FileDescription. Lock: taken."""
        with self.fs.lock:
            self.fs.opened.pop(self, None)
            if not self.error:
                self.fs.close_file(self)


class ScratchDirectory(OpenDirectory):
    """An open directory of the guest."""

    __slots__ = ("file",)

    fs: ScratchFs

    def __init__(self, fs: ScratchFs, path: str) -> None:
        super().__init__(fs, path)
        self.file: ScratchFile | None = None
        """The guest's open file of the directory; None if the guest has not opened the directory.

        The guest does not open it if no probe could notice the open, or if the open fails.
        """

    def getattr(self, client: Callable[[], Client] | None = None) -> Stat:
        """Return the attributes of the open directory; see FileDescription."""
        fs = self.fs
        with fs.lock:
            if client is not None and fs.guest.is_watched(Calls.NAMES):
                with suppress(KernelError):
                    fs.on_file(client(), self.path, None, ATTRIBUTE_CALLS)
            return fs.look(require_path(self.path))

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Repeat the client's call of fsync or fdatasync in the guest; see FileDescription. Lock: taken."""
        del only_data
        if self.file is not None:
            with self.fs.lock:
                self.fs.on_file(client, self.path, self.file, SYNC_CALLS)

    def listed(self, client: Client) -> None:
        """Repeat the client's getdents64(2) in the guest; see OpenDirectory."""
        with self.fs.lock:
            self.fs.calls.listed(client, self.file.fd if self.file is not None else None)

    def release(self) -> None:
        """Release the description after its last descriptor was closed; see FileDescription. Lock: taken."""
        with self.fs.lock:
            self.fs.opened.pop(self, None)
            if self.file is not None:
                self.file.release()


class ScratchFs(FileSystem):
    """Shows the guest's /scratch or /dev.

    During a path walk, the host's kernel requests attributes without a system call of the client. So the
    guest answers these requests without calls that probes could notice. All other requests are system calls
    of the client's task. If the client's own call is known, the task repeats it. If not, the task makes a
    call with the same effect as the request.
    """

    guest: Guest

    def __init__(self, guest: Guest, calls: ClientCalls, top: str, number: int, lock: ControlLock) -> None:
        """Create a file system that shows the directory `top` of the guest.

        `number`: id of this file system in the mount, which distinguishes its inode numbers.
        """
        super().__init__(lock)
        self._top = top
        self._number = number
        self.guest = guest
        self.calls = calls
        self._sys = guest.syscalls

    def become(self, new: FileSystem) -> None:
        """Show the files of another kernel; see FileSystem.

        The old guest's files are gone: open files get ESTALE.
        """
        assert isinstance(new, ScratchFs)
        self.guest = new.guest
        self.calls = new.calls
        self._sys = new._sys
        for opened in list(self.opened):
            if isinstance(opened, ScratchDirectory):
                opened.file = None
            else:
                opened.error = errno.ESTALE
                del self.opened[opened]

    def is_dead(self) -> bool:
        """Return True if the guest can't run any more; see FileSystem."""
        with self.lock:
            return self.guest.is_dead

    @property
    def sees_lookups(self) -> bool:
        """Whether getattr() now repeats the calls of its `client` in the guest; see FileSystem."""
        return self.guest.is_watched(Calls.NAMES)

    def informed(self, client: Client, opened: str | None = None) -> Client:
        """Return the client with the facts about its process that a request needs; see FileSystem."""
        return self.calls.informed(client, Calls.NAMES, opened)

    def _task(self, client: Client) -> GuestTask:
        self.guest.times.remember()
        return self.guest.processes.task_of(client.pid, client.uid, client.gid, facts_of(client))

    # Names

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        """Return a file's attributes; see FileSystem."""
        with self.lock:
            if client is None or not self.guest.is_watched(Calls.NAMES):
                return self.look(path)
            try:
                found = self.look(path)
            except KernelError:
                self.calls.looked_up(client(), path, None, self.on_file)
                raise
            self.calls.looked_up(client(), path, found, self.on_file)
            return found

    def look(self, path: str) -> Stat:
        """Return the attributes of a file without a system call in the guest. Lock: held."""
        return self._stat(self._sys.look(path))

    def look_fd(self, fd: int) -> Stat:
        """Return the attributes of an open file without a system call in the guest. Lock: held."""
        return self._stat(self._sys.look_fd(fd))

    def readdir(self, path: str, client: Client | None = None) -> list[DirEntry]:
        """Return the entries of a directory; see FileSystem.

        The mount replaces the entry ".." of this file system's top directory.
        """
        del client
        above = path if path == self._top else path.rpartition("/")[0]
        with self.lock:
            return [
                *(
                    DirEntry(name, stat.S_IFDIR, self.look(at).ino)
                    for name, at in ((".", path), ("..", above))
                ),
                *(
                    DirEntry(entry.name, _shown_kind(entry.kind), self._ino(entry.ino))
                    for entry in self._sys.look_entries(path)
                ),
            ]

    def readlink(self, client: Client, path: str) -> str:
        """Return the target of a symbolic link; see FileSystem.

        If the host's kernel reads the link during a path walk, no task makes a call.
        """
        with self.lock:
            self._as_called(client, ("readlink", "readlinkat"), path)
            return self._sys.look_link(path)

    def chdir(self, client: Client, path: str) -> None:
        """Repeat in the guest a client's change of its working directory; see FileSystem."""
        with self.lock:
            self.calls.chdir(client, path)

    # Open files

    def open(self, client: Client, path: str, flags: int) -> ScratchFile:
        """Open a file; see FileSystem."""
        with self.lock:
            return self._open(client, path, flags)

    def create(self, client: Client, path: str, mode: int, flags: int) -> ScratchFile:
        """Create a regular file and open it; see FileSystem."""
        with self.lock:
            return self._open(client, path, flags | os.O_CREAT, mode)

    def opendir(self, client: Client, path: str) -> ScratchDirectory:
        """Open a directory. If probes could notice the call, open it in the guest, too; see FileSystem.

        If the guest has no memory for the open directory, clients can list it nevertheless.
        """
        with self.lock:
            directory = ScratchDirectory(self, path)
            if not self.guest.is_dead:
                task = self.calls.task_for_control(client)
                with suppress(KernelError):
                    if task is not None and self.guest.is_watched(Calls.NAMES):
                        directory.file = self._open(client, path, os.O_RDONLY | os.O_DIRECTORY)
            self.opened[directory] = None
            return directory

    def _open(self, client: Client, path: str, flags: int, mode: int = 0) -> ScratchFile:
        """Open a file by the client's task, or a directory if the flags contain O_DIRECTORY."""
        call = facts_of(client).call
        task = self._task(client)
        if call is None or not call.opens_as(path, flags):
            if flags & os.O_CREAT:
                self._sys.set_umask(task, 0)
            file = ScratchFile(self, self._sys.open(task, path, flags, mode), path, flags)
            self.opened[file] = None
            return file
        number = facts_of(client).next_fd
        self._sys.set_umask(task, client.umask)
        with self._sys.numbered(task, number):
            fd = self._sys.of_client(task, call, [path])
            real = fd if number is None else self._sys.real_fd(task)
        file = ScratchFile(self, real, path, flags, number)
        self.opened[file] = None
        return file

    def read(self, client: Client, file: ScratchFile, size: int, offset: int) -> bytes:
        """Read from an open file by a call of the client's task; see ScratchFile. Lock: held."""
        task = self._task(client)
        call = facts_of(client).call
        if call is not None and call.fd is not None:
            with self._sys.numbered(task, call.fd, file.fd):
                self._follow(task, call, "read", file, offset)
                return self._read(task, file, call.fd, size, offset, call.name == "pread64")
        return self._read(task, file, file.fd, size, offset)

    def _read(
        self, task: GuestTask, file: ScratchFile, fd: int, size: int, offset: int, by_offset: bool = False
    ) -> bytes:
        if by_offset or offset != file.position:
            return self._sys.read(task, fd, size, offset)
        data = self._sys.read(task, fd, size)
        file.position += len(data)
        return data

    def write(self, client: Client, file: ScratchFile, data: bytes, offset: int) -> int:
        """Write to an open file by a call of the client's task; see ScratchFile. Lock: held."""
        task = self._task(client)
        call = facts_of(client).call
        if call is not None and call.fd is not None:
            with self._sys.numbered(task, call.fd, file.fd):
                self._follow(task, call, "write", file, offset)
                return self._write(task, file, call.fd, data, offset, call.name == "pwrite64")
        return self._write(task, file, file.fd, data, offset)

    def _write(
        self, task: GuestTask, file: ScratchFile, fd: int, data: bytes, offset: int, by_offset: bool = False
    ) -> int:
        if by_offset or offset != file.position:
            return self._sys.write(task, fd, data, offset)
        count = self._sys.write(task, fd, data)
        file.position += count
        return count

    def _follow(self, task: GuestTask, call: ClientCall, name: str, file: ScratchFile, offset: int) -> None:
        """Repeat an lseek(2) that the client has made before its read or write.

        `name`: read or write; if the client's `call` is another one, do nothing. FUSE does not report
        lseek(2). The client has called it if `offset`, the offset of the read or write, differs from the
        file's position in the guest.
        """
        if call.name != name or offset == file.position:
            return
        if not (name == "write" and file.flags & os.O_APPEND):
            try:
                self._sys.seek(task, call.fd or 0, offset)
            except KernelError:
                # The read or write that follows reports the wrong offset.
                return
        file.position = offset

    def close_file(self, file: ScratchFile) -> None:
        """Close a file in the guest. Lock: held."""
        if not self.guest.is_dead:
            self.guest.close_file(file.fd, file.number)

    def on_file(
        self, client: Client, path: str, file: ScratchFile | None, names: Collection[str]
    ) -> int | None:
        """Repeat in the guest the client's call on a descriptor, if the call is one of `names`.

        `file`: the file that the descriptor refers to; None for any file with the path `path` that the guest
        has open. Return the call's result, or None if no call was made. After an lseek(2), update the
        position of `file`.
        """
        call = facts_of(client).call
        if call is None or call.fd is None or call.name not in names:
            return None
        file = file or self._opened_as(path, call.fd)
        if file is None:
            return None
        task = self._task(client)
        with self._sys.numbered(task, call.fd, file.fd):
            result = self._sys.of_client(task, self._in_guest_time(call))
        if call.name == "lseek":
            file.position = result
        return result

    def _opened_as(self, path: str, number: int) -> ScratchFile | None:
        """Return the open file of the guest whose path is now `path`; None if there is none.

        If there are several, prefer a file that has the descriptor `number` in the process that opened it.
        """
        try:
            ino = self._sys.look(path).ino
            files = [opened for opened in self.opened if isinstance(opened, ScratchFile)]
            same = [found for found in files if self._sys.look_fd(found.fd).ino == ino]
        except KernelError:
            return None
        return next((found for found in same if found.number == number), same[0] if same else None)

    def _as_called(self, client: Client, names: Collection[str], *walks: str) -> bool:
        """Repeat the client's system call in the guest if it is in `names`; return whether it was repeated.

        `walks`: paths of the call, relative to the mount's root. The client's call must have as many paths;
        otherwise it is not repeated.
        """
        call = facts_of(client).call
        if call is None or call.name not in names or not call.names(len(walks)):
            return False
        task = self._task(client)
        self._sys.set_umask(task, client.umask)
        self._sys.of_client(task, self._in_guest_time(call), walks)
        return True

    def _in_guest_time(self, call: ClientCall) -> ClientCall:
        """Return `call`; for utimensat(2), return a copy with times converted to the guest's file times."""
        times = call.data.get(2)
        if call.name != "utimensat" or not times:
            return call
        words = list(struct.unpack("<4q", times))
        for at in (0, 2):
            if words[at + 1] not in (UTIME_NOW, UTIME_OMIT):
                words[at : at + 2] = divmod(
                    self.guest.times.to_guest(words[at] * 10**9 + words[at + 1]), 10**9
                )
        args = (*call.args[:3], call.args[3] & AT_SYMLINK_NOFOLLOW)
        return replace(call, args=args, data={**call.data, 2: struct.pack("<4q", *words)})

    def truncate(self, client: Client, path: str, size: int) -> None:
        """Set the size in bytes of the file at `path`; see FileSystem."""
        with self.lock:
            if not self._as_called(client, ("truncate",), path):
                self._sys.truncate(self._task(client), path, size)

    def ftruncate(self, client: Client, file: ScratchFile, size: int) -> None:
        if self.on_file(client, file.path, file, ("ftruncate",)) is None:
            self._sys.ftruncate(self._task(client), file.fd, size)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """Create a directory; see FileSystem."""
        with self.lock:
            if not self._as_called(client, ("mkdir", "mkdirat"), path):
                self._make(client, "mkdir", path, mode)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """Create a FIFO, a socket or an empty file; see FileSystem.

        The host's kernel itself handles opens of FIFOs and sockets.
        """
        if is_device(mode):
            raise KernelError(errno.EPERM, path)
        with self.lock:
            if not self._as_called(client, ("mknod", "mknodat"), path):
                self._make(client, "mknod", path, mode, 0)

    def _make(self, client: Client, name: str, path: str, *args: int) -> None:
        """Create a file or directory by the system call `name`. `args`: the arguments after the path.

        Set the task's umask to 0, because the client's umask has been applied to the mode already.
        """
        task = self._task(client)
        self._sys.set_umask(task, 0)
        self._sys.with_path(task, name, path, *args)

    def rmdir(self, client: Client, path: str) -> None:
        """Remove a directory; see FileSystem."""
        with self.lock:
            if not self._as_called(client, ("rmdir", "unlinkat"), path):
                self._sys.with_path(self._task(client), "rmdir", path)
            self._moved(path, GONE)

    def unlink(self, client: Client, path: str) -> None:
        """Remove a name of a file; see FileSystem."""
        with self.lock:
            if not self._as_called(client, ("unlink", "unlinkat"), path):
                self._sys.with_path(self._task(client), "unlink", path)

    def rename(self, client: Client, old: str, new: str) -> None:
        """Rename a file or directory; see FileSystem."""
        with self.lock:
            if not self._as_called(client, ("rename", "renameat2"), old, new):
                self._sys.with_paths(self._task(client), "rename", old, new)
            self._moved(old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        """Give a file an additional name; see FileSystem."""
        with self.lock:
            if not self._as_called(client, ("link", "linkat"), old, new):
                self._sys.with_paths(self._task(client), "link", old, new)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Create a symbolic link; see FileSystem."""
        with self.lock:
            if not self._as_called(client, ("symlink", "symlinkat"), path):
                self._sys.with_paths(self._task(client), "symlink", target, path)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set a file's permission bits; see FileSystem."""
        with self.lock:
            if self.on_file(client, path, None, ("fchmod",)) is None and not self._as_called(
                client, ("chmod", "fchmodat"), path
            ):
                self._sys.with_path(self._task(client), "chmod", path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set a file's owner and group; see FileSystem."""
        with self.lock:
            if self.on_file(client, path, None, ("fchown",)) is None and not self._as_called(
                client, ("chown", "lchown", "fchownat"), path
            ):
                self._sys.with_path(self._task(client), "lchown", path, uid & 0xFFFFFFFF, gid & 0xFFFFFFFF)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set a file's access and modification times; see FileSystem."""
        with self.lock:
            if self.on_file(client, path, None, ("utimensat",)) is None and not self._as_called(
                client, ("utimensat",), path
            ):
                to_guest = self.guest.times.to_guest
                atime, mtime = (None if time is None else to_guest(time) for time in (atime_ns, mtime_ns))
                self._sys.utimens(self._task(client), path, atime, mtime)

    def _ino(self, number: int) -> int:
        return number * INO_SPACES + self._number

    def _stat(self, guest: GuestStat) -> Stat:
        wall = self.guest.times.to_wall
        kind = stat.S_IFMT(guest.mode)
        return Stat(
            ino=self._ino(guest.ino),
            mode=_shown_kind(kind) | stat.S_IMODE(guest.mode),
            nlink=guest.nlink,
            uid=guest.uid,
            gid=guest.gid,
            size=guest.size,
            atime_ns=wall(guest.atime_ns),
            mtime_ns=wall(guest.mtime_ns),
            ctime_ns=wall(guest.ctime_ns),
            blocks=guest.blocks,
            rdev=0 if kind == stat.S_IFCHR else guest.rdev,
        )


def _shown_kind(kind: int) -> int:
    """Return the S_IFMT bits to show for a file of the type `kind`. A device is shown as a regular file.

    Hazard: if a device were shown, the host would open it by the host's driver instead of the guest's driver.
    """
    return stat.S_IFREG if kind == stat.S_IFCHR else kind
