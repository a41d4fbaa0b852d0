"""Data that front ends, such as FUSE, and file systems exchange: clients, attributes, directory entries."""

from __future__ import annotations

import errno
import os

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_named_tuple import NamedTuple

STATUS_FLAGS = os.O_APPEND | os.O_NONBLOCK
"""Status flags of an open file that take effect when a client changes them with fcntl(F_SETFL)."""
INO_SPACES = 4
"""Maximum number of file systems in one mount.

The mount shows inode n of the file system with index s as n * INO_SPACES + s, so that inode numbers are
unique. Programs take two files with equal inode numbers for one file. The control files have index 0.
"""


class Client(NamedTuple):
    """The process that makes a request, with ids in the daemon's pid and user namespaces."""

    pid: int
    uid: int
    gid: int
    umask: int = 0
    """The process's umask, or 0 if the front end does not know the umask.

    The umask is already applied to the modes in requests.
    """
    facts: object = None
    """Facts about the process that FileSystem.informed() has read for the guest; None before that."""
    is_calling: bool = True
    """Whether a system call of the client makes the request. False: the host's kernel makes it.

    In that case, the request is a read that fills a page of the host's page cache.
    Hazard: then do not read the arguments of the client's system call. They may point to memory in this page,
    which cannot be read until the page is filled.
    """


class Stat(NamedTuple):
    """A file's attributes as stat(2) shows them: times in nanoseconds, size in bytes."""

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    blocks: int = 0
    rdev: int = 0
    is_paged: bool = False
    """Whether a front end may read the file in pages, by read_page(), for splice(2).

    A read of a page returns the whole page or fails with an errno.
    """


class StatFs(NamedTuple):
    """Capacity of a file system as statfs(2) shows it. The counts of a pseudo file system are 0."""

    block_size: int = 4096
    """Size of a block in bytes, which is the unit of `blocks`, `free` and `available`."""
    blocks: int = 0
    free: int = 0
    available: int = 0
    files: int = 0
    free_files: int = 0


class DirEntry(NamedTuple):
    """An entry of a directory as readdir(3) returns it. `kind` is the file type (S_IFDIR, ...)."""

    name: str
    kind: int
    ino: int


GONE = ""
"""Path of an open directory that was removed by rmdir(2) or replaced by rename(2)."""


def path_after_rename(path: str, old: str, new: str) -> str:
    """Return the path that an open directory with the path `path` has after rename(2) of `old` to `new`.

    Return GONE if the directory was at `new`, so that rename(2) has replaced it. If `new` is GONE, return the
    path after rmdir(2) of `old`.
    """
    if path == old or path.startswith(f"{old}/"):
        return new and new + path[len(old) :]
    return GONE if path == new else path


def require_path(path: str) -> str:
    """Return `path`, the path of an open directory, after checking that the path is not GONE.

    Raises: KernelError ENOENT (the directory is GONE).
    """
    if path == GONE:
        raise KernelError(errno.ENOENT, "the directory has been removed")
    return path
