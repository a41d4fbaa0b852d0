"""scratch/ and dev/: the guest's own files, each request a system call of the client's task."""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Callable
from dataclasses import dataclass

from emulated_kernel.host.executive import GuestTask
from emulated_kernel.host.guest import Guest
from emulated_kernel.host.syscalls import GuestStat
from emulated_kernel.vfs.mount import Client, Stat

_ALWAYS_READY = select.POLLIN | select.POLLOUT | select.POLLRDNORM | select.POLLWRNORM


@dataclass(eq=False)
class ScratchFile:
    """An open file of the guest; `position` is where its file position stands."""

    fd: int
    position: int = 0


class Scratch:
    """The guest's /scratch and /dev, with the methods of Mount. Callers hold the control lock.

    Attributes are asked for by the host kernel's path walks, which are no system calls of the
    client's: init's task answers them.
    """

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._sys = guest.syscalls

    def _task(self, client: Client) -> GuestTask:
        self._guest.times.remember()
        return self._guest.mirror.task_of(client.pid, client.uid, client.gid)

    @property
    def _init(self) -> GuestTask:
        return self._guest.mirror.init

    def getattr(self, path: str) -> Stat:
        return self._stat(self._sys.lstat(self._init, path))

    def fgetattr(self, file: ScratchFile) -> Stat:
        return self._stat(self._sys.fstat(self._init, file.fd))

    def readdir(self, path: str) -> list[str]:
        return self._sys.listdir(self._init, path)

    def readlink(self, path: str) -> str:
        return self._sys.readlink(self._init, path)

    def open(self, client: Client, path: str, flags: int) -> ScratchFile:
        return ScratchFile(self._sys.open(self._task(client), path, flags))

    def create(self, client: Client, path: str, mode: int, flags: int) -> ScratchFile:
        return ScratchFile(self._sys.open(self._task(client), path, flags | os.O_CREAT, mode))

    def read(self, client: Client, file: ScratchFile, size: int, offset: int) -> bytes:
        """read(2) where the client reads on, pread64(2) where it jumped."""
        task = self._task(client)
        if offset != file.position:
            return self._sys.read(task, file.fd, size, offset)
        data = self._sys.read(task, file.fd, size)
        file.position += len(data)
        return data

    def write(self, client: Client, file: ScratchFile, data: bytes, offset: int) -> int:
        """write(2) where the client writes on, pwrite64(2) where it jumped."""
        task = self._task(client)
        if offset != file.position:
            return self._sys.write(task, file.fd, data, offset)
        count = self._sys.write(task, file.fd, data)
        file.position += count
        return count

    def poll(self, _file: ScratchFile, _notify: Callable[[], None] | None) -> int:
        return _ALWAYS_READY

    def release(self, file: ScratchFile) -> None:
        if not self._guest.is_dead:
            self._guest.close_file(file.fd)

    def truncate(self, client: Client, path: str, size: int) -> None:
        self._sys.truncate(self._task(client), path, size)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        self._sys.with_path(self._task(client), "mkdir", path, mode)

    def rmdir(self, client: Client, path: str) -> None:
        self._sys.with_path(self._task(client), "rmdir", path)

    def unlink(self, client: Client, path: str) -> None:
        self._sys.with_path(self._task(client), "unlink", path)

    def rename(self, client: Client, old: str, new: str) -> None:
        self._sys.with_paths(self._task(client), "rename", old, new)

    def symlink(self, client: Client, path: str, target: str) -> None:
        self._sys.with_paths(self._task(client), "symlink", target, path)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        self._sys.with_path(self._task(client), "chmod", path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        self._sys.with_path(self._task(client), "lchown", path, uid & 0xFFFFFFFF, gid & 0xFFFFFFFF)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        atime, mtime = (
            None if time is None else self._guest.times.to_guest(time) for time in (atime_ns, mtime_ns)
        )
        self._sys.utimens(self._task(client), path, atime, mtime)

    def _stat(self, guest: GuestStat) -> Stat:
        """A device is shown as a file: with its own type the host would ask a driver of its own for it."""
        wall = self._guest.times.to_wall
        is_device = stat.S_ISCHR(guest.mode)
        return Stat(
            ino=guest.ino,
            mode=stat.S_IFREG | stat.S_IMODE(guest.mode) if is_device else guest.mode,
            nlink=guest.nlink,
            uid=guest.uid,
            gid=guest.gid,
            size=guest.size,
            atime_ns=wall(guest.atime_ns),
            mtime_ns=wall(guest.mtime_ns),
            ctime_ns=wall(guest.ctime_ns),
            blocks=guest.blocks,
            rdev=0 if is_device else guest.rdev,
        )
