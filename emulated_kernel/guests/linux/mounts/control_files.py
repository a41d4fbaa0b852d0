"""ControlFiles: files of ours over a distribution's kernel, as a mount serves them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count

from emulated_kernel.guests.linux.guest.tasks import LinuxTask
from emulated_kernel.guests.linux.mounts.control_calls import READ_SIZE, ControlCalls, GuestFileHandle
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.chunked_write import ChunkedWrite, RunOnce, retry_yielding_lock
from emulated_kernel.vfs.core.client import Client, DirEntry, Stat, StatFs
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.open_file import OpenFile, Piece

FIRST_HANDLE = 1 << 41
"""Handles of these files begin there."""


class ControlFiles:
    """The methods are Mount's. Takes the control lock. All raise KernelError with Linux's errno."""

    def __init__(
        self,
        files: NodeTree,
        lock: ControlLock,
        control: Callable[[Client], AbstractContextManager[LinuxTask | None]],
        calls: ControlCalls | None = None,
    ) -> None:
        """`control`: around what a client does with a file, by its task; `calls`: what that makes."""
        self._files = files
        self.lock = lock
        self._control = control
        self._in_guest = calls
        self._parts: dict[int, GuestFileHandle] = {}
        """The guest's, by handle."""
        self._opened_files: dict[int, OpenFile | str] = {}
        """By handle; of a directory its path."""
        self._entries: dict[int, list[DirEntry]] = {}
        """Of open directories, from when they were read from their beginning."""
        self._numbers = count(FIRST_HANDLE)

    def _file(self, handle: int) -> OpenFile:
        found = self._opened_files.get(handle)
        if found is None:
            raise KernelError(errno.EBADF, f"no handle {handle}")
        if isinstance(found, str):
            raise KernelError(errno.EISDIR, found)
        return found

    def _keep(self, opened: OpenFile | str) -> int:
        handle = next(self._numbers)
        self._opened_files[handle] = opened
        return handle

    def open_in_guest(self) -> None:
        """The guest is about to be watched: it takes part in the files that are open from now on."""
        if self._in_guest is not None:
            self._in_guest.open_unseen(self._parts.values())

    # Attributes and names

    def getattr(self, path: str, _client: Callable[[], Client] | None = None) -> Stat:
        """Attributes of a file."""
        with self.lock:
            return self._files.getattr(path)

    def fgetattr(self, handle: int, client: Callable[[], Client] | None = None) -> Stat:
        """Attributes of an open file or directory."""
        found = self._opened_files.get(handle)
        if isinstance(found, str):
            return self.getattr(found, client)
        with self.lock:
            return self._files.stat(self._file(handle).node)

    def opendir(self, client: Client, path: str) -> int:
        """A handle for getdents()."""
        if self._in_guest is not None and self._in_guest.is_watched:
            with self._control(client) as task:
                self._in_guest.list_directory(task, path)
        return self._keep(path)

    def getdents(self, client: Client, handle: int, start: int) -> list[DirEntry]:
        """The entries of an open directory from number `start` on."""
        return self.listed(handle, start, lambda path: self.readdir(path, client))

    def listed(self, handle: int, start: int, read: Callable[[str], list[DirEntry]]) -> list[DirEntry]:
        """From number `start` on; 0 makes a snapshot of what `read` finds in that directory."""
        path = self._opened_files.get(handle)
        if not isinstance(path, str):
            raise KernelError(errno.ENOTDIR, f"handle {handle}")
        if start == 0 or handle not in self._entries:
            self._entries[handle] = read(path)
        return self._entries[handle][start:]

    def readdir(self, path: str, _client: Client | None = None) -> list[DirEntry]:
        """The entries, "." and ".." first."""
        with self.lock:
            return self._files.readdir(path)

    def readlink(self, client: Client, path: str) -> str:
        """Where a symbolic link leads."""
        return self._files.readlink(client, path)

    # Open files

    def open(self, client: Client, path: str, flags: int) -> int:
        """Open with open(2)'s flags; returns the handle for the calls below."""
        with self._control(client) as task:
            once = RunOnce(lambda: self._files.open(path, flags, client))
            part = GuestFileHandle(path, flags)
            if self._in_guest is not None:
                self._in_guest.open(task, part, once)
            handle = self._keep(once())
            self._parts[handle] = part
            return handle

    def create(self, _client: Client, path: str, _mode: int, _flags: int) -> int:
        """creat(2) of a name that isn't there."""
        return self._files.create(path)

    def is_stream(self, handle: int) -> bool:
        """Whether lseek(2) on the handle has to answer ESPIPE."""
        return self._file(handle).stream

    def set_status_flags(self, handle: int, flags: int) -> None:
        """Those of a request on it."""
        self._file(handle).set_status_flags(flags)

    def reads_host(self, handle: int) -> bool:
        """Whether a write to it reads files of the host, and so takes as long as they do; no lock is held."""
        found = self._opened_files.get(handle)
        return isinstance(found, OpenFile) and found.node.reads_host

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """At most `size` bytes; b"" is the end. Raises: WouldBlock."""
        with self._control(client) as task:
            file, size = self._file(handle), min(size, READ_SIZE)
            once = RunOnce(lambda: file.read(size, offset))
            if self._in_guest is not None:
                self._in_guest.read(task, self._parts[handle], handle, size, once)
            return once()

    def read_page(self, client: Client, handle: int, size: int, _offset: int) -> bytes:
        """What the host's page cache asks for."""
        with self._control(client):
            return self._file(handle).read_page(size)

    def write(self, client: Client, handle: int, data: bytes, offset: int) -> int:
        """Number of bytes taken. Raises: WouldBlock."""
        file = self._file(handle)
        commands = file.prepare(client, data) if file.node.reads_host else None

        def write_piece(piece: Piece, at: int) -> int:
            return self._file(handle).write(piece.data, at, commands, is_part=piece.is_part)

        once = RunOnce(ChunkedWrite(file, data, offset, write_piece))

        def write() -> int:
            with self._control(client) as task:
                # Such a write makes other calls by the client's task.
                if self._in_guest is not None and commands is None:
                    self._in_guest.write(task, self._parts[handle], handle, data, once)
                return once()

        return retry_yielding_lock(self.lock, write)

    def wait(self, handle: int, timeout: float) -> None:
        """Return once something may have come, or after `timeout` seconds."""
        self._file(handle).wait(timeout)

    def give_up(self, client: Client, handle: int, error: int) -> None:
        """The client doesn't wait any more: its task, if it waits, neither."""
        if self._in_guest is not None and self._in_guest.is_waited_for(handle):
            with self._control(client) as task:
                self._in_guest.give_up(task, handle, error)

    def poll(self, handle: int, notify: Callable[[], None] | None) -> int:
        """Readiness as poll(2)'s mask."""
        with self.lock:
            return self._file(handle).poll(notify)

    def release(self, handle: int) -> None:
        """The last descriptor was closed."""
        with self.lock:
            opened = self._opened_files.pop(handle, None)
            self._entries.pop(handle, None)
            if isinstance(opened, OpenFile):
                self._files.release(opened)
            part = self._parts.pop(handle, None)
            if part is not None and self._in_guest is not None:
                self._in_guest.release(part)

    def ftruncate(self, _client: Client, handle: int, _size: int) -> None:
        """ftruncate(2): nothing happens."""
        self._file(handle)

    def fsync(self, _client: Client, handle: int) -> None:
        """Raises: KernelError EINVAL, EBADF."""
        if handle not in self._opened_files:
            raise KernelError(errno.EBADF, f"no handle {handle}")
        raise KernelError(errno.EINVAL, f"handle {handle}")

    def statfs(self, _path: str) -> StatFs:
        """There is nothing to count."""
        return StatFs()

    # Changes of the tree

    def truncate(self, client: Client, path: str, size: int) -> None:
        """truncate(2)."""
        with self._control(client):
            self._files.truncate(client, path, size)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """mkdir(2); in instances/ it makes a trace array."""
        with self._control(client):
            self._files.mkdir(client, path, mode)

    def rmdir(self, client: Client, path: str) -> None:
        """rmdir(2)."""
        with self._control(client):
            self._files.rmdir(client, path)

    def unlink(self, client: Client, path: str) -> None:
        """unlink(2)."""
        self._files.unlink(client, path)

    def rename(self, client: Client, old: str, new: str) -> None:
        """rename(2)."""
        self._files.rename(client, old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        """link(2)."""
        self._files.link(client, old, new)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """mknod(2)."""
        self._files.mknod(client, path, mode)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """symlink(2)."""
        self._files.symlink(client, path, target)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set the permission bits."""
        with self.lock:
            self._files.chmod(client, path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set the owner; -1 leaves a field alone."""
        with self.lock:
            self._files.chown(client, path, uid, gid)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times, in nanoseconds since the epoch; None leaves one alone."""
        with self.lock:
            self._files.utimens(client, path, atime_ns, mtime_ns)
