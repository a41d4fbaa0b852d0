"""Files that others name or made: none is read that makes its reader wait, or has no end."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll
from threading import Event
from time import monotonic
from typing import IO, BinaryIO

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.threads import start_thread

_PART = 1 << 20
"""Bytes read at once: no memory is taken for what isn't there."""
MOST_LATE = 8
"""Threads that file systems keep waiting."""
PATIENCE = 1.0
"""Seconds that a client's write may read files of others: the host lets nobody else write there meanwhile."""


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> BinaryIO:
    """Open for reading, with further flags of open(2).

    Raises: OSError, EISDIR, EINVAL (what else isn't a regular file), ValueError (a path with NUL).
    """
    # A FIFO would wait for its writer, and opening a device may do something: it isn't opened for that.
    place = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    try:
        mode = os.fstat(place).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return open(os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    finally:
        os.close(place)


def is_word(value: object) -> bool:
    """Whether a value out of a file is a number of 64 bits."""
    return isinstance(value, int) and 0 <= value < 1 << 64


def identity(file: os.PathLike[str] | int) -> tuple[int, ...]:
    """What tells a file from others, and from what it was. Raises: OSError."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def replace_file(target: Path, prefix: str, write: Callable[[IO[bytes]], None]) -> None:
    """Have a file written beside, which appears under its name when all of it is there. Raises: OSError."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=prefix, delete=False) as file:
        try:
            write(file)
            file.flush()
            os.rename(file.name, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def read_open(file: BinaryIO, limit: int) -> bytes:
    """All of it. Raises: OSError, EFBIG (more bytes than `limit`), EINVAL (it lets readers wait)."""
    parts: list[bytes] = []
    left = limit
    while left >= 0:
        part: bytes | None = file.read(_PART)
        if part is None:
            # Of tracefs and procfs: "regular" there says nothing of waiting.
            raise OSError(errno.EINVAL, "nothing to read: its readers wait")
        if not part:
            return b"".join(parts)
        parts.append(part)
        left -= len(part)
    raise OSError(errno.EFBIG, f"more than {limit} bytes")


def read_regular(path: str | os.PathLike[str], limit: int, flags: int = 0) -> bytes:
    """All of a file. Raises: as the two above (with the file's name)."""
    with open_regular(path, flags) as file:
        try:
            return read_open(file, limit)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None


class BoundedFileReader:
    """Reads files whose file systems may be slow, or hang: a thread stays behind with each that does.

    Nobody else's reading waits for those, but for new ones when there are MOST_LATE.
    """

    def __init__(self) -> None:
        self._late: set[object] = set()

    def read(self, path: str | os.PathLike[str], limit: int, deadline: float | None) -> bytes:
        """All of a file, by `deadline` of time.monotonic(); None: whenever it answers.

        Raises: as `read_regular`, OSError ETIMEDOUT, EBUSY (while MOST_LATE are behind), ENOMEM.
        """
        if len(self._late) >= MOST_LATE:
            raise OSError(errno.EBUSY, f"{MOST_LATE} files are waited for already", os.fspath(path))
        answered, answers = Event(), list[bytes | Exception]()

        def read() -> None:
            try:
                answers.append(read_regular(path, limit))
            except Exception as error:
                answers.append(error)
            finally:
                answered.set()
                self._late.discard(answered)

        try:
            start_thread("read-file", read)
        except KernelError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        if not answered.wait(None if deadline is None else max(deadline - monotonic(), 0)):
            self._late.add(answered)
            if not answered.is_set():
                raise OSError(errno.ETIMEDOUT, "its file system doesn't answer in time", os.fspath(path))
            self._late.discard(answered)
        answer = answers[0] if answers else OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), os.fspath(path))
        if isinstance(answer, Exception):
            raise answer
        return answer


def read_named(path: str | os.PathLike[str], limit: int) -> bytes:
    """All of a file that a user names; of what the process was given open, /dev/stdin or <(...), all of that.

    Raises: as read_regular.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if _reads(descriptor, found):
                return read_given(descriptor, limit)
    return read_regular(path, limit)


def _reads(descriptor: int, file: os.stat_result) -> bool:
    try:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        return mode != os.O_WRONLY and os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        # That of the listing itself.
        return False


def read_given(descriptor: int, limit: int) -> bytes:
    """All that comes until its end. Raises: OSError, EFBIG (more bytes than `limit`)."""
    data = bytearray()
    readable = poll()
    readable.register(descriptor, POLLIN)
    while len(data) <= limit:
        try:
            part = os.read(descriptor, _PART)
        except BlockingIOError:
            readable.poll()
            continue
        if not part:
            return bytes(data)
        data += part
    raise OSError(errno.EFBIG, f"more than {limit} bytes")
