"""Checks and opens the daemon's log, a regular file outside of the mount."""

from __future__ import annotations

import os
import stat

from kprobefs.common.daemon_registry import unwritable
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.common.mountpoints import is_inside

TAIL = 4096
"""Number of bytes at the end of the log that last_line() searches."""


def check_log(path: str, directory: str, *, is_explicit: bool) -> None:
    """Check that `path` can be the log of a daemon that serves `directory`.

    `is_explicit`: whether the user has named the path by --log.
    Raises: CliError (the path is inside a mount, is not a regular file, or cannot be opened).
    """
    os.close(_open(path, directory, 0, is_explicit=is_explicit))


def open_log(path: str, directory: str, *, truncates: bool, is_explicit: bool = True) -> int:
    """Open the log for appending and return its descriptor; truncate the log first if `truncates` is True.

    `is_explicit`: whether the user has named the path by --log.
    Raises: CliError (the path is inside a mount, is not a regular file, or cannot be opened).
    """
    return _open(path, directory, os.O_TRUNC if truncates else 0, is_explicit=is_explicit)


def _open(path: str, directory: str, flags: int, *, is_explicit: bool) -> int:
    if is_inside(os.path.dirname(path) or ".", directory):
        raise CliError(f"--log {path}: inside a mount point", ExitStatus.USAGE)
    flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        found = os.open(path, flags, 0o600)
    except OSError as error:
        if not is_explicit:
            raise unwritable(path, error) from None
        raise CliError(f"--log {path}: {_reason(path, error)}") from None
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise CliError(f"--log {path}: not a regular file")
    return found


def _reason(path: str, error: OSError) -> str:
    # The errors of open(2) for a FIFO, a socket or a link do not name the cause.
    if os.path.islink(path):
        return "a symbolic link; name the file itself"
    if os.path.exists(path) and not os.path.isfile(path):
        return "not a regular file"
    return error.strerror or str(error)


def last_line(descriptor: int) -> str:
    """Return the last line of the open log `descriptor` that is not blank, or "" if there is none.

    Only the last TAIL bytes are searched.
    """
    try:
        with open(f"/proc/self/fd/{descriptor}", "rb") as file:
            file.seek(max(0, os.fstat(descriptor).st_size - TAIL))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
