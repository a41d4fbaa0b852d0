"""FileServer: a Filesystem as a Mount, with handles and one lock; no guest kernel takes part."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from itertools import count

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.mount import Client, Stat, StatFs
from emulated_kernel.vfs.node import File
from emulated_kernel.vfs.open_file import OpenFile
from emulated_kernel.vfs.tree import Filesystem


class FileServer:
    """Implements Mount over a tree. `lock` guards the tree and all that its files reach."""

    def __init__(self, filesystem: Filesystem, lock: threading.RLock | None = None) -> None:
        self.filesystem = filesystem
        self.lock = lock or threading.RLock()
        self._handles: dict[int, OpenFile] = {}
        self._numbers = count(1)
        self._closed = threading.Event()

    def opened(self, handle: int) -> OpenFile:
        """The open file behind a handle. Raises: KernelError EBADF; ENODEV after close()."""
        if self._closed.is_set():
            raise KernelError(errno.ENODEV, "the mount has ended")
        try:
            return self._handles[handle]
        except KeyError:
            raise KernelError(errno.EBADF, f"no handle {handle}") from None

    def getattr(self, path: str) -> Stat:
        """Mount.getattr."""
        with self.lock:
            return self.filesystem.getattr(path)

    def fgetattr(self, handle: int) -> Stat:
        """Mount.fgetattr."""
        with self.lock:
            return self.filesystem.stat(self.opened(handle).node)

    def opendir(self, client: Client, path: str) -> None:
        """Mount.opendir: there is nothing to prepare."""

    def readdir(self, path: str) -> list[str]:
        """Mount.readdir."""
        with self.lock:
            return self.filesystem.readdir(path)

    def statfs(self) -> StatFs:
        """Mount.statfs."""
        return StatFs()

    def open(self, client: Client, path: str, flags: int) -> int:
        """Mount.open."""
        with self.lock:
            opened = self.filesystem.open(path, flags, client)
            handle = next(self._numbers)
            self._handles[handle] = opened
            return handle

    def create(self, client: Client, path: str, mode: int, flags: int) -> int:
        """Mount.create. Raises: KernelError EACCES."""
        del client, mode, flags
        with self.lock:
            self.filesystem.create(path)

    def is_stream(self, handle: int) -> bool:
        """Mount.is_stream."""
        return self.opened(handle).stream

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """Mount.read."""
        del client
        with self.lock:
            return self.opened(handle).read(size, offset)

    def write(self, client: Client, handle: int, data: bytes, offset: int) -> int:
        """Mount.write."""
        del client
        with self.lock:
            return self.opened(handle).write(data, offset)

    def runs_guest(self, handle: int) -> bool:
        """Whether a write to the handle runs code in the guest."""
        return self.opened(handle).node.runs_guest

    def node_runs_guest(self, path: str) -> bool:
        """The same of a file that isn't open. Raises: KernelError ENOENT, ENOTDIR."""
        node = self.filesystem.lookup(path)
        return isinstance(node, File) and node.runs_guest

    def notes_writer(self, handle: int) -> bool:
        """Whether a write to the handle is recorded as the current task's."""
        return self.opened(handle).node.notes_writer

    def wait(self, handle: int, timeout: float) -> None:
        """Mount.wait; the lock is not held meanwhile."""
        self.opened(handle).wait(timeout)

    def give_up(self, client: Client, handle: int, error: int) -> None:
        """Mount.give_up: nothing is kept of a read that gave nothing."""

    def poll(self, handle: int, notify: Callable[[], None] | None) -> int:
        """Mount.poll."""
        with self.lock:
            return self.opened(handle).poll(notify)

    def release(self, handle: int) -> None:
        """Mount.release."""
        with self.lock:
            opened = self._handles.pop(handle, None)
            if opened is not None:
                self.filesystem.release(opened)

    def truncate(self, client: Client, path: str, size: int) -> None:
        """Mount.truncate."""
        del client
        with self.lock:
            self.filesystem.truncate(path, size)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """Mount.mkdir."""
        del client
        with self.lock:
            self.filesystem.mkdir(path, mode)

    def rmdir(self, client: Client, path: str) -> None:
        """Mount.rmdir."""
        del client
        with self.lock:
            self.filesystem.rmdir(path)

    def unlink(self, client: Client, path: str) -> None:
        """Mount.unlink. Raises: KernelError EPERM."""
        del client
        with self.lock:
            self.filesystem.unlink(path)

    def rename(self, client: Client, old: str, new: str) -> None:
        """Mount.rename. Raises: KernelError EPERM."""
        del client
        with self.lock:
            self.filesystem.rename(old, new)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Mount.symlink. Raises: KernelError EPERM."""
        del client, target
        with self.lock:
            self.filesystem.link(path)

    def readlink(self, path: str) -> str:
        """Mount.readlink. Raises: KernelError EINVAL."""
        with self.lock:
            self.filesystem.readlink(path)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Mount.chmod; the front end has checked that the client may."""
        del client
        with self.lock:
            self.filesystem.lookup(path).chmod(mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Mount.chown; the front end has checked that the client may."""
        del client
        with self.lock:
            self.filesystem.lookup(path).chown(uid, gid)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Mount.utimens."""
        del client
        with self.lock:
            self.filesystem.lookup(path).utimens(atime_ns, mtime_ns)

    def close(self) -> None:
        """Mount.close."""
        self._closed.set()
        with self.lock:
            for opened in self._handles.values():
                self.filesystem.release(opened)
            self._handles.clear()
