"""GuestMount: every request of a host process, made by its task inside the guest."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from emulated_kernel.abi import HostfsOp
from emulated_kernel.errors import KernelError
from emulated_kernel.host.executive import GuestTask, RunElsewhere
from emulated_kernel.host.guest import Guest
from emulated_kernel.vfs.mount import Client, Stat, StatFs
from emulated_kernel.vfs.scratch import Scratch, ScratchFile
from emulated_kernel.vfs.server import FileServer

GUESTS_OWN = ("/scratch", "/dev")
"""Directories whose files are the guest's own."""


@dataclass(eq=False)
class ControlFile:
    """An open file of ours: the file server's handle, and the guest's descriptor for it."""

    path: str
    flags: int
    inner: int
    fd: int | None
    """None where the guest has no part in it: it wasn't watched at the open, was dead, or had no room."""


class GuestMount:
    """Implements Mount: takes the control lock, for the guest stands still while nobody holds it.

    A file of ours is opened, read and written by the guest's own system calls, whose file operations
    come back to the file server; scratch/ is the guest's alone. While nothing in the guest's text is
    patched nobody could see those calls, and our files answer without them; when the guest is dead too:
    who asks why it died has to get an answer.
    """

    def __init__(self, files: FileServer, guest: Guest) -> None:
        self._files = files
        self._guest = guest
        self._scratch = Scratch(guest)
        names = files.readdir("/")
        self._guests_own = tuple(path for path in GUESTS_OWN if path[1:] in names)
        """None where tracefs stands at the root."""
        self._lock = files.lock
        self._handles: dict[int, ControlFile | ScratchFile] = {}
        self._numbers = count(1)

    def _at(self, path: str) -> FileServer | Scratch:
        """Who answers for a path."""
        for top in self._guests_own:
            if path.startswith(top) and path[len(top) : len(top) + 1] in ("", "/"):
                return self._scratch
        return self._files

    def _opened(self, handle: int) -> ControlFile | ScratchFile:
        try:
            return self._handles[handle]
        except KeyError:
            raise KernelError(errno.EBADF, f"no handle {handle}") from None

    def _add(self, opened: ControlFile | ScratchFile) -> int:
        handle = next(self._numbers)
        self._handles[handle] = opened
        return handle

    def _task(self, client: Client) -> GuestTask:
        return self._guest.mirror.task_of(client.pid, client.uid, client.gid)

    def getattr(self, path: str) -> Stat:
        """Mount.getattr."""
        with self._lock:
            return self._at(path).getattr(path)

    def fgetattr(self, handle: int) -> Stat:
        """Mount.fgetattr."""
        with self._lock:
            opened = self._opened(handle)
            if isinstance(opened, ScratchFile):
                return self._scratch.fgetattr(opened)
            return self._files.fgetattr(opened.inner)

    def opendir(self, client: Client, path: str) -> None:
        """Mount.opendir: the guest opens and closes the directory; its names don't come from there."""
        with self._lock:
            if self._guest.is_dead:
                return
            task = self._task(client)
            if not self._guest.is_watched:
                return
            # A guest without room for it keeps nobody from listing.
            with suppress(KernelError):
                fd = self._guest.syscalls.open(
                    task, path, os.O_RDONLY | os.O_DIRECTORY, hostfs=lambda _op, _buffer, _count: 0
                )
                self._guest.close_file(fd)

    def chdir(self, client: Client, path: str) -> None:
        """Mount.chdir: the guest can't refuse it any more."""
        with self._lock:
            if self._guest.is_dead:
                return
            task = self._task(client)
            if self._guest.is_watched:
                with suppress(KernelError):
                    self._guest.syscalls.with_path(task, "chdir", path)

    def readdir(self, path: str) -> list[str]:
        """Mount.readdir."""
        with self._lock:
            return self._at(path).readdir(path)

    def readlink(self, path: str) -> str:
        """Mount.readlink."""
        with self._lock:
            return self._at(path).readlink(path)

    def statfs(self) -> StatFs:
        """Mount.statfs."""
        return self._files.statfs()

    def open(self, client: Client, path: str, flags: int) -> int:
        """Mount.open."""
        with self._lock:
            if self._at(path) is self._scratch:
                return self._add(self._scratch.open(client, path, flags))
            return self._open_control(client, path, flags)

    def _open_control(self, client: Client, path: str, flags: int) -> int:
        if self._guest.is_dead:
            return self._add(ControlFile(path, flags, self._files.open(client, path, flags), None))
        task = self._task(client)
        if not self._guest.is_watched:
            return self._add(ControlFile(path, flags, self._files.open(client, path, flags), None))
        inner: list[int] = []

        def execute() -> int:
            inner.append(self._files.open(client, path, flags))
            return 0

        def serve(op: int, _buffer: int, _count: int) -> int:
            if op != HostfsOp.OPEN:
                return 0
            # What a definitions file holds goes with O_TRUNC, and its directories in the guest.
            if flags & os.O_TRUNC and self._files.node_runs_guest(path):
                raise RunElsewhere(execute)
            return execute()

        try:
            fd = self._guest.syscalls.open(task, path, flags & ~os.O_CREAT, hostfs=serve)
        except BaseException:
            # The guest's open failed behind ours: nobody would ever close it.
            for handle in inner:
                self._files.release(handle)
            raise
        return self._add(ControlFile(path, flags, inner[0], fd))

    def open_in_guest(self) -> None:
        """The guest is about to be watched: open there what was opened while it was not.

        What it has no room for it will not take part in: that must not keep a probe from being armed.
        """
        if self._guest.is_dead or self._guest.executive.is_busy:
            return
        with suppress(KernelError):
            for opened in self._handles.values():
                if isinstance(opened, ControlFile) and opened.fd is None:
                    opened.fd = self._guest.open_file(opened.path, opened.flags)

    def create(self, client: Client, path: str, mode: int, flags: int) -> int:
        """Mount.create."""
        with self._lock:
            if self._at(path) is self._scratch:
                return self._add(self._scratch.create(client, path, mode, flags))
            return self._files.create(client, path, mode, flags)

    def is_stream(self, handle: int) -> bool:
        """Mount.is_stream."""
        opened = self._opened(handle)
        return isinstance(opened, ControlFile) and self._files.is_stream(opened.inner)

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """Mount.read."""
        with self._lock:
            opened = self._opened(handle)
            if isinstance(opened, ScratchFile):
                return self._scratch.read(client, opened, size, offset)
            inner = opened.inner
            if opened.fd is None or not self._guest.is_watched:
                return self._files.read(client, inner, size, offset)
            return self._guest.read_file(
                self._task(client), opened.fd, size, lambda: self._files.read(client, inner, size, offset)
            )

    def write(self, client: Client, handle: int, data: bytes, offset: int) -> int:
        """Mount.write."""
        with self._lock:
            opened = self._opened(handle)
            if isinstance(opened, ScratchFile):
                return self._scratch.write(client, opened, data, offset)
            if opened.fd is None or not self._guest.is_watched:
                if self._files.notes_writer(opened.inner):
                    self._enter(client)
                return self._files.write(client, opened.inner, data, offset)
            return self._guest.write_file(
                self._task(client), opened.fd, data, lambda: self._write(client, opened, data, offset)
            )

    def _enter(self, client: Client) -> None:
        if not self._guest.is_dead:
            self._guest.enter(self._task(client))

    def _write(self, client: Client, opened: ControlFile, data: bytes, offset: int) -> int:
        """What the guest's vfs_write comes back for."""

        def execute() -> int:
            return self._files.write(client, opened.inner, data, offset)

        if self._files.runs_guest(opened.inner):
            raise RunElsewhere(execute)
        return execute()

    def wait(self, handle: int, timeout: float) -> None:
        """Mount.wait; the lock is not held meanwhile."""
        opened = self._opened(handle)
        if isinstance(opened, ControlFile):
            self._files.wait(opened.inner, timeout)

    def give_up(self, client: Client, handle: int, error: int) -> None:
        """Mount.give_up."""
        with self._lock:
            opened = self._opened(handle)
            if isinstance(opened, ControlFile) and opened.fd is not None:
                self._guest.give_up(self._guest.mirror.known(client.pid), opened.fd, error)

    def poll(self, handle: int, notify: Callable[[], None] | None) -> int:
        """Mount.poll."""
        with self._lock:
            opened = self._opened(handle)
            if isinstance(opened, ScratchFile):
                return self._scratch.poll(opened, notify)
            return self._files.poll(opened.inner, notify)

    def release(self, handle: int) -> None:
        """Mount.release; the request comes from no process."""
        with self._lock:
            opened = self._handles.pop(handle, None)
            if isinstance(opened, ControlFile):
                self._files.release(opened.inner)
            if opened is None or opened.fd is None or self._guest.is_dead:
                return
            if isinstance(opened, ScratchFile):
                self._scratch.release(opened)
            else:
                self._guest.close_file(opened.fd)

    def truncate(self, client: Client, path: str, size: int) -> None:
        """Mount.truncate."""
        with self._lock:
            self._at(path).truncate(client, path, size)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """Mount.mkdir."""
        with self._lock:
            self._at(path).mkdir(client, path, mode)

    def rmdir(self, client: Client, path: str) -> None:
        """Mount.rmdir."""
        with self._lock:
            self._at(path).rmdir(client, path)

    def unlink(self, client: Client, path: str) -> None:
        """Mount.unlink."""
        with self._lock:
            self._at(path).unlink(client, path)

    def rename(self, client: Client, old: str, new: str) -> None:
        """Mount.rename. Raises: KernelError EXDEV between scratch/ and our files."""
        with self._lock:
            if self._at(old) is not self._at(new):
                raise KernelError(errno.EXDEV, "one name is in scratch/ and one isn't")
            self._at(old).rename(client, old, new)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Mount.symlink."""
        with self._lock:
            self._at(path).symlink(client, path, target)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Mount.chmod."""
        with self._lock:
            self._at(path).chmod(client, path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Mount.chown."""
        with self._lock:
            self._at(path).chown(client, path, uid, gid)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Mount.utimens."""
        with self._lock:
            self._at(path).utimens(client, path, atime_ns, mtime_ns)

    def close(self) -> None:
        """Mount.close."""
        self._files.close()
