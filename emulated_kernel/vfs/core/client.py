"""Data that front ends, such as FUSE, and file systems exchange: clients, attributes, directory entries."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from emulated_kernel.util.errors import KernelError

STATUS_FLAGS = os.O_APPEND | os.O_NONBLOCK
"""Status flags that file systems follow when a client changes them with fcntl(F_SETFL)."""
INO_SPACES = 4
"""Most file systems in one mount. The mount shows inode n of file system number s as n * INO_SPACES + s.

The numbers must differ because programs take two files with the same inode number for the same file. The
tree of control files is file system number 0.
"""


class Client(NamedTuple):
    """The process that a request comes from, in the daemon's pid and user namespace."""

    pid: int
    uid: int
    gid: int
    umask: int = 0
    """The process's umask if the front end knows it, else 0. Modes in requests have it applied already."""
    facts: object = None
    """What the guest has to know about the process, as FileSystem.informed() has read it."""


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
    """True if a front end that caches pages may read any page of the file: a whole page or an errno."""


class StatFs(NamedTuple):
    """Capacity of a file system as statfs(2) shows it. The counts of a pseudo file system are 0."""

    block_size: int = 4096
    """Bytes of one block, the unit of `blocks`, `free` and `available`."""
    blocks: int = 0
    free: int = 0
    available: int = 0
    files: int = 0
    free_files: int = 0


class DirEntry(NamedTuple):
    """An entry of a directory as readdir(3) shows it. `kind` is the file type (S_IFDIR, ...)."""

    name: str
    kind: int
    ino: int


GONE = ""
"""Path of an open directory that was removed or replaced by rename(2)."""


def path_behind(path: str, old: str, new: str) -> str:
    """Return the path of an open directory after rename(2) of `old` to `new`.

    If `new` is GONE, return its path after rmdir(2) of `old`.
    """
    if path == old or path.startswith(f"{old}/"):
        return new and new + path[len(old) :]
    return GONE if path == new else path


def still_there(path: str) -> str:
    """Return `path`, the path of an open directory. Raises: KernelError ENOENT (it is GONE)."""
    if path == GONE:
        raise KernelError(errno.ENOENT, "the directory has been removed")
    return path
