"""CliError: an error for the person at the terminal, in one line that says what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from emulated_kernel.util.errors import KernelError


class ExitStatus(IntEnum):
    """Exit statuses of the program; `run` otherwise passes on its command's."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_MOUNTED = 3
    """umount, status: nothing of ours is mounted there."""
    BUSY = 4
    """status: the mount's kernel has been at something for a while."""
    PANICKED = 5
    """status: the mount's kernel has stopped for good."""
    HUNG = 6
    """status, mount, umount: the mount's daemon doesn't answer, or doesn't end."""
    STALE = 7
    """status: the mount's daemon is gone."""
    RUN_FAILED = 125
    """run: the mount failed, the command wasn't started."""
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


class CliError(Exception):
    """Ends the program with one line on standard error and an exit status."""

    def __init__(
        self, message: str, status: ExitStatus = ExitStatus.FAILURE, *, is_explained: bool = False
    ) -> None:
        """`is_explained`: standard error says why already."""
        super().__init__(message)
        self.status = status
        self.is_explained = is_explained


FILES, ADDRESS_SPACE = 32, 1_500_000
"""What a mount of the defaults comes up with: `ulimit -n`, and kB of `ulimit -v`."""
_LACKING = {
    errno.EMFILE: f"a mount needs {FILES} open files; run ulimit -n {FILES}",
    errno.ENOMEM: f"a mount needs {ADDRESS_SPACE} kB of address space; run ulimit -v {ADDRESS_SPACE}",
}


def resource_hint(error: BaseException) -> str:
    """Of which of the caller's limits it comes, and what a mount needs; "" where it's none of them."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    return f"{os.strerror(number)}: {_LACKING[number]}" if number in _LACKING else ""


def escape_for_terminal(text: str) -> str:
    """Text with names in it that others gave, for a terminal: nothing in it moves the cursor or hides."""
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def _escape(character: str) -> str:
    # Bytes that are no UTF-8 arrive as surrogates.
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


@contextmanager
def explained(image: str) -> Iterator[None]:
    """Raises: CliError (which names the image)."""
    try:
        yield
    except KernelError as error:
        raise CliError(f"{image}: {error.strerror}", ExitStatus.USAGE) from error
    except OSError as error:
        raise CliError(f"{error.filename or image}: {error.strerror or error}", ExitStatus.USAGE) from error
