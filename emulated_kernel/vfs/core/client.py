"""What crosses the border between a front end, such as FUSE, and the files: clients, attributes, entries."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from emulated_kernel.util.errors import KernelError

STATUS_FLAGS = os.O_APPEND | os.O_NONBLOCK
"""What fcntl(F_SETFL) changes of an open file that anybody here looks at."""
INO_SPACES = 4
"""Filesystems that one mount is made of: inode n of the one numbered s is n * INO_SPACES + s outside.

Programs take two files with one number for the same file. The tree of control files is number 0.
"""


class Client(NamedTuple):
    """The process that a request comes from, in the daemon's pid and user namespace."""

    pid: int
    uid: int
    gid: int
    umask: int = 0
    """What the mode of a new file has lost already, where the front end is told."""


class Stat(NamedTuple):
    """A node's attributes as stat(2) shows them; times in nanoseconds, size in bytes."""

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
    """A front end that caches pages may ask for any page of it, and gets a whole one or an errno."""


class StatFs(NamedTuple):
    """What a file system has room for, as statfs(2) shows it; a pseudo file system has nothing to count."""

    block_size: int = 4096
    """Bytes; `blocks`, `free` and `available` are counted in them."""
    blocks: int = 0
    free: int = 0
    available: int = 0
    files: int = 0
    free_files: int = 0


class DirEntry(NamedTuple):
    """A name in a directory as readdir(3) shows it: `kind` is the type of its mode (S_IFDIR, ...)."""

    name: str
    kind: int
    ino: int


GONE = ""
"""The path of an open directory that has been removed, or another one has taken its place."""


def path_behind(path: str, old: str, new: str) -> str:
    """Where an open directory is when rename(2) has made `new` of `old`; GONE for `new` is rmdir(2)'s."""
    if path == old or path.startswith(f"{old}/"):
        return new and new + path[len(old) :]
    return GONE if path == new else path


def still_there(path: str) -> str:
    """The path of an open directory. Raises: KernelError ENOENT (GONE)."""
    if path == GONE:
        raise KernelError(errno.ENOENT, "the directory has been removed")
    return path
