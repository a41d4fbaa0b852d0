"""Unnamed temporary files for the memory in dumps; they disappear when their last user closes them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import EDQUOT, EFBIG, ENOSPC
from typing import IO

from emulated_kernel.util.cache_directory import cache_directory
from emulated_kernel.util.errors import KernelError

_FULL = {ENOSPC, EDQUOT, EFBIG}
_MARGIN = 64 << 20
"""Bytes that must be free in addition to a file's size: a kernel's tables may be appended to the file."""
_IN_MEMORY = ("tmpfs", "ramfs")


def open_tmpfile(write: Callable[[IO[bytes]], None], size: int, whole: int) -> IO[bytes]:
    """Return an unnamed file, filled by `write`, in the first directory with enough space.

    `size`: bytes that the file takes on disk. `whole`: length of the file in bytes, including holes.
    Raises: KernelError ENOSPC (no directory has enough space), OSError, and the errors of `write`.
    """
    places = [*_places()]
    for directory in places:
        if not has_space(directory, size, whole):
            continue
        try:
            file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        except OSError:
            continue
        try:
            write(file)
            return file
        except BaseException as error:
            file.close()
            if isinstance(error, KernelError) or getattr(error, "errno", None) not in _FULL:
                raise
    where = ", ".join(places)
    raise KernelError(ENOSPC, f"no room for {size >> 20} MiB in {where}: set TMPDIR to a directory with room")


def _places() -> Iterator[str]:
    """Yield the directories in which a temporary file may be created, in the order of preference.

    The user's TMPDIR is first. Directories that may be on a file system in memory are last.
    """
    named = os.environ.get("TMPDIR", "")
    places = named, str(cache_directory()), "/var/tmp", "/tmp"
    return iter(dict.fromkeys(place for place in places if place.startswith("/")))


def has_space(directory: str, size: int, whole: int) -> bool:
    """Return True if a directory has space for a file, and _MARGIN bytes more.

    Return False also if the directory cannot be examined.

    In a file system in memory, the holes of the file also need space.
    `size`: bytes that the file takes on disk. `whole`: length of the file in bytes, including holes.

    Hazard: on a file system in memory, reading a mapped hole of a file allocates a page. If there is no
    memory, the reader is killed (SIGBUS).
    """
    try:
        found = os.statvfs(directory)
        device = os.stat(directory).st_dev
    except OSError:
        return False
    needed = whole if _file_system(device) in _IN_MEMORY else size
    return found.f_bavail * found.f_frsize >= needed + _MARGIN


def _file_system(device: int) -> str:
    """Return the type of the mounted file system with st_dev `device`, or "" if it is unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.split(" ", 1)[0]
    return ""
