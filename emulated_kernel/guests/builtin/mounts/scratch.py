"""The guest's own file systems, such as scratch/: each request a system call of the client's task."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Collection
from dataclasses import replace

from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.mounts.path_walk import OPENS
from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask
from emulated_kernel.guests.builtin.runner.syscalls import AT_SYMLINK_NOFOLLOW, UTIME_OMIT, GuestStat
from emulated_kernel.guests.common.client_call import ClientCall
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.vfs.core.client import INO_SPACES, Client, DirEntry, Stat
from emulated_kernel.vfs.core.open_file import ALWAYS_READY

UTIME_NOW = UTIME_OMIT + 1
"""A file's time becomes the present."""


@dataclass(eq=False)
class GuestFile:
    """An open file or directory of the guest; `position` is where its file position stands."""

    scratch: GuestTree
    fd: int
    path: str
    flags: int
    number: int | None = None
    """The descriptor as the process knows it that opened the file, where that is known."""
    position: int = 0


class GuestTree:
    """The guest's /scratch or /dev: what GuestMount does for paths below it.

    Attributes are asked for by the host kernel's path walks, which are no system calls: nobody sees the
    answers made. What a process did, its task does: that very call where it is known, else what the request
    stands for.
    """

    def __init__(self, guest: Guest, top: str, number: int) -> None:
        """`number`: its own among the mount's file systems, 1 to INO_SPACES - 1."""
        self._top = top
        self._number = number
        self._root_ino: int | None = None
        self._guest = guest
        self._sys = guest.syscalls
        self._open: dict[GuestFile, None] = {}

    def _task(self, client: Client) -> GuestTask:
        self._guest.times.remember()
        return self._guest.processes.task_of(client.pid, client.uid, client.gid)

    def getattr(self, path: str) -> Stat:
        return self._stat(self._sys.look(path))

    def fgetattr(self, file: GuestFile) -> Stat:
        return self._stat(self._sys.look_fd(file.fd))

    def root_ino(self) -> int:
        """Inode number of its root. Raises: KernelError (the guest died before it was asked)."""
        if self._root_ino is None:
            self._root_ino = self.getattr(self._top).ino
        return self._root_ino

    def readdir(self, path: str) -> list[DirEntry]:
        """The directory's entries; what lies above the root is the mount's affair."""
        above = path if path == self._top else path.rpartition("/")[0]
        return [
            *(
                DirEntry(name, stat.S_IFDIR, self.getattr(at).ino)
                for name, at in ((".", path), ("..", above))
            ),
            *(
                DirEntry(entry.name, _shown_kind(entry.kind), self._ino(entry.ino))
                for entry in self._sys.look_entries(path)
            ),
        ]

    def readlink(self, client: Client, path: str) -> str:
        self._as_called(client, ("readlink", "readlinkat"), path)
        return self._sys.look_link(path)

    def open(self, client: Client, path: str, flags: int, mode: int = 0) -> GuestFile:
        """Of a file, or of a directory if O_DIRECTORY is among the flags."""
        call = self._guest.client_call(client.pid, client.uid)
        task = self._task(client)
        if call is None or call.name not in OPENS:
            if flags & os.O_CREAT:
                self._sys.set_umask(task, 0)
            return self._opened(GuestFile(self, self._sys.open(task, path, flags, mode), path, flags))
        number = self._guest.processes.next_fd(client.pid)
        self._sys.set_umask(task, client.umask)
        with self._sys.numbered(task, number):
            fd = self._sys.of_client(task, call, [path])
            real = fd if number is None else self._sys.real_fd(task)
        return self._opened(GuestFile(self, real, path, flags, number))

    def _opened(self, file: GuestFile) -> GuestFile:
        self._open[file] = None
        return file

    def create(self, client: Client, path: str, mode: int, flags: int) -> GuestFile:
        return self.open(client, path, flags | os.O_CREAT, mode)

    def read(self, client: Client, file: GuestFile, size: int, offset: int) -> bytes:
        """read(2) where the client reads on, or says so; else pread64(2)."""
        task = self._task(client)
        call = self._guest.client_call(client.pid, client.uid)
        if call is not None and call.fd is not None:
            with self._sys.numbered(task, call.fd, file.fd):
                self._follow(task, call, "read", file, offset)
                return self._read(task, file, call.fd, size, offset, call.name == "pread64")
        return self._read(task, file, file.fd, size, offset)

    def _read(
        self, task: GuestTask, file: GuestFile, fd: int, size: int, offset: int, by_offset: bool = False
    ) -> bytes:
        if by_offset or offset != file.position:
            return self._sys.read(task, fd, size, offset)
        data = self._sys.read(task, fd, size)
        file.position += len(data)
        return data

    def write(self, client: Client, file: GuestFile, data: bytes, offset: int) -> int:
        """write(2) where the client writes on, or says so; else pwrite64(2)."""
        task = self._task(client)
        call = self._guest.client_call(client.pid, client.uid)
        if call is not None and call.fd is not None:
            with self._sys.numbered(task, call.fd, file.fd):
                self._follow(task, call, "write", file, offset)
                return self._write(task, file, call.fd, data, offset, call.name == "pwrite64")
        return self._write(task, file, file.fd, data, offset)

    def _write(
        self, task: GuestTask, file: GuestFile, fd: int, data: bytes, offset: int, by_offset: bool = False
    ) -> int:
        if by_offset or offset != file.position:
            return self._sys.write(task, fd, data, offset)
        count = self._sys.write(task, fd, data)
        file.position += count
        return count

    def _follow(self, task: GuestTask, call: ClientCall, name: str, file: GuestFile, offset: int) -> None:
        """FUSE doesn't tell of an lseek(2): it is seen by where the next read or write starts."""
        if call.name != name or offset == file.position:
            return
        if not (name == "write" and file.flags & os.O_APPEND):
            try:
                self._sys.seek(task, call.fd or 0, offset)
            except KernelError:
                # The read or write says what is wrong with the offset.
                return
        file.position = offset

    def poll(self, _file: GuestFile, _notify: Callable[[], None] | None) -> int:
        return ALWAYS_READY

    def release(self, file: GuestFile) -> None:
        self._open.pop(file, None)
        if not self._guest.is_dead:
            self._guest.close_file(file.fd, file.number)

    def on_file(
        self, client: Client, path: str, file: GuestFile | None, names: Collection[str]
    ) -> int | None:
        """The client's call on a descriptor, if it is one of these; its result."""
        call = self._guest.client_call(client.pid, client.uid)
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

    def _opened_as(self, path: str, number: int) -> GuestFile | None:
        """An open file that is the one of this name now; if it can be, the one that a process calls so."""
        try:
            ino = self._sys.look(path).ino
            same = [found for found in self._open if self._sys.look_fd(found.fd).ino == ino]
        except KernelError:
            return None
        return next((found for found in same if found.number == number), same[0] if same else None)

    def _as_called(self, client: Client, names: Collection[str], *walks: str) -> bool:
        """Do the call that the client waits in, if it is one of these."""
        call = self._guest.client_call(client.pid, client.uid)
        named = [text for _at, text in call.paths if text] if call is not None else []
        if call is None or call.name not in names or len(named) != len(walks):
            return False
        task = self._task(client)
        self._sys.set_umask(task, client.umask)
        self._sys.of_client(task, self._in_guest_time(call), walks)
        return True

    def _in_guest_time(self, call: ClientCall) -> ClientCall:
        """utimensat(2) says when by the host's clock."""
        times = call.data.get(2)
        if call.name != "utimensat" or not times:
            return call
        words = list(struct.unpack("<4q", times))
        for at in (0, 2):
            if words[at + 1] not in (UTIME_NOW, UTIME_OMIT):
                words[at : at + 2] = divmod(
                    self._guest.times.to_guest(words[at] * 10**9 + words[at + 1]), 10**9
                )
        args = (*call.args[:3], call.args[3] & AT_SYMLINK_NOFOLLOW)
        return replace(call, args=args, data={**call.data, 2: struct.pack("<4q", *words)})

    def truncate(self, client: Client, path: str, size: int) -> None:
        if not self._as_called(client, ("truncate",), path):
            self._sys.truncate(self._task(client), path, size)

    def ftruncate(self, client: Client, file: GuestFile, size: int) -> None:
        if self.on_file(client, file.path, file, ("ftruncate",)) is None:
            self._sys.ftruncate(self._task(client), file.fd, size)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        if not self._as_called(client, ("mkdir", "mkdirat"), path):
            self._make(client, "mkdir", path, mode)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """Of a FIFO or a socket, which the host's kernel opens by itself, or of an empty file."""
        if not self._as_called(client, ("mknod", "mknodat"), path):
            self._make(client, "mknod", path, mode, 0)

    def _make(self, client: Client, name: str, path: str, *args: int) -> None:
        """The mode has lost already what the client's umask takes."""
        task = self._task(client)
        self._sys.set_umask(task, 0)
        self._sys.with_path(task, name, path, *args)

    def rmdir(self, client: Client, path: str) -> None:
        if not self._as_called(client, ("rmdir", "unlinkat"), path):
            self._sys.with_path(self._task(client), "rmdir", path)

    def unlink(self, client: Client, path: str) -> None:
        if not self._as_called(client, ("unlink", "unlinkat"), path):
            self._sys.with_path(self._task(client), "unlink", path)

    def rename(self, client: Client, old: str, new: str) -> None:
        if not self._as_called(client, ("rename", "renameat2"), old, new):
            self._sys.with_paths(self._task(client), "rename", old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        if not self._as_called(client, ("link", "linkat"), old, new):
            self._sys.with_paths(self._task(client), "link", old, new)

    def symlink(self, client: Client, path: str, target: str) -> None:
        if not self._as_called(client, ("symlink", "symlinkat"), path):
            self._sys.with_paths(self._task(client), "symlink", target, path)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        if self.on_file(client, path, None, ("fchmod",)) is None and not self._as_called(
            client, ("chmod", "fchmodat"), path
        ):
            self._sys.with_path(self._task(client), "chmod", path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        if self.on_file(client, path, None, ("fchown",)) is None and not self._as_called(
            client, ("chown", "lchown", "fchownat"), path
        ):
            self._sys.with_path(self._task(client), "lchown", path, uid & 0xFFFFFFFF, gid & 0xFFFFFFFF)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        if self.on_file(client, path, None, ("utimensat",)) is None and not self._as_called(
            client, ("utimensat",), path
        ):
            to_guest = self._guest.times.to_guest
            atime, mtime = (None if time is None else to_guest(time) for time in (atime_ns, mtime_ns))
            self._sys.utimens(self._task(client), path, atime, mtime)

    def _ino(self, number: int) -> int:
        return number * INO_SPACES + self._number

    def _stat(self, guest: GuestStat) -> Stat:
        wall = self._guest.times.to_wall
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
    """A device is shown as a file: with its own type the host would ask a driver of its own for it."""
    return stat.S_IFREG if kind == stat.S_IFCHR else kind
