"""CliError, an error that the program reports on one line, and the exit statuses."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from emulated_kernel.util.errors import KernelError


class ExitStatus(IntEnum):
    """Exit statuses of the program. `kprobefs run` ends with the status of its command."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_MOUNTED = 3
    """Exit status of `umount` and `status`: kprobefs is not mounted on the given directory."""
    BUSY = 4
    """Exit status of `kprobefs status`: the mount's kernel is busy with a long request."""
    PANICKED = 5
    """Exit status of `kprobefs status`: the mount's kernel has stopped for good."""
    HUNG = 6
    """Exit status of `status`, `mount` and `umount`: the mount's daemon does not answer or does not end."""
    STALE = 7
    """Exit status of `kprobefs status`: the mount's daemon is gone."""
    RUN_FAILED = 125
    """Exit status of `kprobefs run`: the mount failed, so the command was not started."""
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


class CliError(Exception):
    """An error that ends the program with one line on standard error and an exit status."""

    def __init__(
        self, message: str, status: ExitStatus = ExitStatus.FAILURE, *, is_explained: bool = False
    ) -> None:
        """Create the error. `is_explained`: whether the reason was printed on standard error before."""
        super().__init__(message)
        self.status = status
        self.is_explained = is_explained


FILES = 32
"""Number of open files (`ulimit -n`) that suffices to start a default mount."""
ADDRESS_SPACE = 1_500_000
"""Size of address space in kB (`ulimit -v`) that suffices to start a default mount."""
DATA = 200_000
"""Size of data in kB (`ulimit -d`) that suffices to start a default mount."""
_KB = 1024
_FILE_LIMITS = ((resource.RLIMIT_NOFILE, "-n", FILES, 1, "open files"),)
_MEMORY_LIMITS = (
    (resource.RLIMIT_AS, "-v", ADDRESS_SPACE, _KB, "kB of address space"),
    (resource.RLIMIT_DATA, "-d", DATA, _KB, "kB of data"),
)
"""Limits of memory: (RLIMIT_ constant, option of ulimit, needed value, bytes per unit of it, name)."""
_NO_THREAD = "can't start new thread"
"""Message of the RuntimeError that Python raises if it cannot start a thread."""
_TOO_MANY = "too many processes and threads; end some, or run ulimit -u with a larger number"


def resource_hint(error: BaseException) -> str:
    """Return a text that names the resource limit behind `error`, and a remedy; "" for other errors."""
    number = getattr(error, "errno", None)
    if number == errno.EMFILE:
        return _exceeded(os.strerror(number), _FILE_LIMITS)
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        none = "the host has no memory left; free some"
        return _exceeded(os.strerror(errno.ENOMEM), _MEMORY_LIMITS) or f"{os.strerror(errno.ENOMEM)}: {none}"
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return _exceeded("no thread", _MEMORY_LIMITS) or f"no thread: {_TOO_MANY}"
    if isinstance(error, (SystemError, ImportError)):
        # The interpreter and the loader of libraries may report a lack of memory in this way.
        return _exceeded(os.strerror(errno.ENOMEM), _MEMORY_LIMITS)
    return ""


def fork() -> int:
    """Fork. Return 0 in the child, and the child's pid in the parent.

    Raises: CliError (the host allows no further process).
    """
    try:
        return os.fork()
    except OSError as error:
        hint = f"no process: {_TOO_MANY}" if error.errno == errno.EAGAIN else resource_hint(error)
        raise CliError(hint or f"no process: {error.strerror}") from error


def _exceeded(what: str, limits: Iterable[tuple[int, str, int, int, str]]) -> str:
    """Return a message about the first limit that is too low for a mount, and the remedy.

    `what`: beginning of the message. `limits`: items of _MEMORY_LIMITS. Return "" if all limits are high
    enough.
    """
    for limit, option, needed, unit, name in limits:
        if 0 <= resource.getrlimit(limit)[0] < needed * unit:
            return f"{what}: a mount needs {needed} {name}; run ulimit {option} {needed}"
    return ""


def escape_for_terminal(text: str) -> str:
    """Return `text` with its unprintable characters escaped.

    The text may contain names from other users or programs, whose unprintable characters could move the
    cursor or hide text.
    """
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def _escape(character: str) -> str:
    # Bytes that are not UTF-8 arrive as surrogates.
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


@contextmanager
def explained(image: str) -> Iterator[None]:
    """Convert KernelErrors and OSErrors of the `with` block to CliErrors that name the kernel image `image`.

    Raises: CliError.
    """
    try:
        yield
    except KernelError as error:
        raise CliError(f"{image}: {error.strerror}", ExitStatus.USAGE) from error
    except OSError as error:
        raise CliError(f"{error.filename or image}: {error.strerror or error}", ExitStatus.USAGE) from error
