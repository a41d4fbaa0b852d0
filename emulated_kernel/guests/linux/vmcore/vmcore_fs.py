"""VmcoreFs: shows the files of a dump as a read-only file system."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager

from emulated_kernel.guests.linux.vmcore.vmcore_files import VmcoreFiles
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import INO_SPACES, Client, DirEntry, Stat
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.filesystem import FileDescription, FileSystem

FILES = "/files"
"""Directory of the mount that shows the files of the dump."""
Request = Callable[[Client | None], AbstractContextManager[None]]
"""Function that returns a context manager, in whose block the guest may run.

The function's argument is the client that waits. If the client's process is killed, the guest's run ends. If
the argument is None, the run does not depend on a process.
"""


class VmcoreFile(FileDescription):
    """An open file of the dump. Each read opens the file in the guest again."""

    __slots__ = ()

    fs: VmcoreFs

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Read from the open file; see FileDescription."""
        with self.fs.request(client):
            return self.fs.files.read(self.fs.inside(self.path), size, offset)

    def write(self, client: Client, data: bytes, offset: int) -> int:
        """Refuse to write. Raises: KernelError EBADF (the file is open for reading only)."""
        del client, data, offset
        raise KernelError(errno.EBADF, self.path)

    def fsync(self, client: Client, *, only_data: bool) -> None:
        """Do nothing: there is no data to write back."""


class VmcoreFs(FileSystem):
    """Shows the dump's files below the mount's directory /files.

    Each access runs the guest. The guest's clock stops during lookups.
    """

    is_read_only = True

    def __init__(
        self, files: VmcoreFiles, request: Request, look_up: Request, owner: Owner, lock: ControlLock
    ) -> None:
        """Create a file system that shows `files`.

        `request` and `look_up`: functions that return the contexts in which requests and lookups run the
        guest. `owner`: the mounting user.
        """
        super().__init__(lock)
        self.files = files
        self._request = request
        self._look_up = look_up
        self._owner = owner

    def request(self, client: Client | None) -> AbstractContextManager[None]:
        """Return the context in which a client's operation runs; see FileSystem."""
        return self._request(client)

    @staticmethod
    def inside(path: str) -> str:
        """Return `path`, a path in the mount, without the leading FILES: this is the path in the dump."""
        return path.removeprefix(FILES) or "/"

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        """Return a file's attributes; see FileSystem.

        The mounting user owns the files that root owns in the dump.
        """
        with self._look_up(client() if client else None):
            found = self.files.lstat(self.inside(path))
        return found._replace(
            ino=found.ino * INO_SPACES + 1,
            mode=stat.S_IMODE(found.mode) & ~0o222 | _shown_kind(stat.S_IFMT(found.mode)),
            uid=found.uid or self._owner.uid,
            gid=found.gid or self._owner.gid,
        )

    def readdir(self, path: str, client: Client | None = None) -> list[DirEntry]:
        """Return the entries of a directory; see FileSystem."""
        with self._look_up(client):
            found = self.files.readdir(self.inside(path))
        # Some file systems report no file type: 0 means unknown and stays 0.
        return [
            entry._replace(ino=entry.ino * INO_SPACES + 1, kind=entry.kind and _shown_kind(entry.kind))
            for entry in found
        ]

    def readlink(self, client: Client, path: str) -> str:
        """Return the target of a symbolic link; see FileSystem."""
        with self._look_up(client):
            return self.files.readlink(self.inside(path))

    def open(self, client: Client, path: str, flags: int) -> VmcoreFile:
        """Open a file; see FileSystem. Raises: KernelError EROFS (`flags` ask to write)."""
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise KernelError(errno.EROFS, path)
        with self.request(client):
            self.files.read(self.inside(path), 0, 0)
        file = VmcoreFile(self, path, flags)
        self.opened[file] = None
        return file


def _shown_kind(kind: int) -> int:
    """Return the S_IFMT bits to show for `kind`: its own if it is a directory or link, else a regular file's.

    Hazard: if devices and FIFOs were shown, the host itself would open them, and would block at a FIFO.
    """
    return kind if kind in (stat.S_IFDIR, stat.S_IFLNK) else stat.S_IFREG
