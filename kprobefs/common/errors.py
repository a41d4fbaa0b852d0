"""CliError, an error that the program reports on one line, and the exit statuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from emulated_kernel.util.errors import KernelError


class ExitStatus(IntEnum):
    """Exit statuses of the program. `run` passes on its command's status."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_MOUNTED = 3
    """umount, status: kprobefs is not mounted there."""
    BUSY = 4
    """status: the mount's kernel is busy with a long request."""
    PANICKED = 5
    """status: the mount's kernel has stopped for good."""
    HUNG = 6
    """status, mount, umount: the mount's daemon does not answer or does not end."""
    STALE = 7
    """status: the mount's daemon is gone."""
    RUN_FAILED = 125
    """run: the mount failed, so the command was not started."""
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


class CliError(Exception):
    """An error that ends the program with one line on standard error and an exit status."""

    def __init__(
        self, message: str, status: ExitStatus = ExitStatus.FAILURE, *, is_explained: bool = False
    ) -> None:
        """Create the error. `is_explained`: the reason was already printed on standard error."""
        super().__init__(message)
        self.status = status
        self.is_explained = is_explained


FILES = 32
"""Number of open files (`ulimit -n`) that suffices to start a default mount."""
ADDRESS_SPACE = 1_500_000
"""Size of address space in kB (`ulimit -v`) that suffices to start a default mount."""
_LACKING = {
    errno.EMFILE: f"a mount needs {FILES} open files; run ulimit -n {FILES}",
    errno.ENOMEM: f"a mount needs {ADDRESS_SPACE} kB of address space; run ulimit -v {ADDRESS_SPACE}",
}


def resource_hint(error: BaseException) -> str:
    """Return a text about the resource limit that caused an error and the remedy, or "" if none did."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    return f"{os.strerror(number)}: {_LACKING[number]}" if number in _LACKING else ""


def escape_for_terminal(text: str) -> str:
    """Escape the unprintable characters of a text that may contain names from other users or programs.

    They would otherwise move the cursor or hide text.
    """
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def _escape(character: str) -> str:
    # Bytes that are not UTF-8 arrive as surrogates.
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


@contextmanager
def explained(image: str) -> Iterator[None]:
    """Turn errors of the block about a kernel image into CliError, which names the image.

    Raises: CliError.
    """
    try:
        yield
    except KernelError as error:
        raise CliError(f"{image}: {error.strerror}", ExitStatus.USAGE) from error
    except OSError as error:
        raise CliError(f"{error.filename or image}: {error.strerror or error}", ExitStatus.USAGE) from error
