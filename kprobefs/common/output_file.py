"""OutputFile: a file for the results of a command, which is opened before the command's work."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import IO, Self, TextIO

from kprobefs.common.errors import CliError


class OutputFile:
    """Context manager for a file that a command writes.

    If the file cannot be written, the command fails before it does its work. Until write() or stream(), an
    existing file keeps its content. If neither is called, the end of the context removes a file that was
    created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file `path`, or create it. Raises: CliError (it cannot be written)."""
        self._path = path
        self._is_needless = not os.path.lexists(path)
        """Whether the end of the context removes the file: it is new, and nothing was written to it."""
        try:
            # Mode "w" would truncate the file.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CliError(f"{path}: {error.strerror}") from error
        self._file: IO[bytes] = os.fdopen(descriptor, "wb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._is_needless:
            with suppress(OSError):
                os.unlink(self._path)

    def write(self, data: bytes) -> None:
        """Replace the content of the file. Raises: CliError (for example, the disk is full)."""
        try:
            self._clear()
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise CliError(f"{self._path}: {error.strerror}") from error

    def stream(self) -> TextIO:
        """Delete the content of the file, and return a stream to it for a command that writes as it works.

        Raises: CliError (the content cannot be deleted).
        """
        try:
            self._clear()
        except OSError as error:
            raise CliError(f"{self._path}: {error.strerror}") from error
        return open(self._file.fileno(), "w", encoding="utf-8", closefd=False)

    def _clear(self) -> None:
        self._is_needless = False
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.truncate(0)
