"""Safe reading of user-supplied paths: rejects FIFOs, devices and anything that could block or has no end."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from select import POLLIN, poll
from threading import Event, get_native_id
from time import monotonic
from typing import IO, Any, BinaryIO, Generic, TypeVar

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.host_tasks import BUSY_INTERVAL, is_runnable
from emulated_kernel.util.threads import start_thread

T = TypeVar("T")

_PART = 1 << 20
"""Size of one read(2) in bytes. Reading in parts allocates memory only for data that exists."""
MAX_BLOCKED_READERS = 8
"""Maximum number of threads of a BoundedFileReader that may be blocked in slow file systems."""
PATIENCE = 1.0
"""Maximum time in seconds that a client's write may take to read user-supplied files.

The host kernel blocks other writers to the same file during that time.
"""
BUSY_PATIENCE = 5.0
"""Maximum seconds that a reading thread gets after its deadline, while it runs or waits for a CPU.

On a busy host, the thread may still wait for a CPU at the deadline.
"""


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> BufferedReader:
    """Open a regular file for reading; `flags` are additional flags of open(2).

    Raises: OSError, EISDIR, EINVAL (not a regular file), ValueError (a path with NUL).
    """
    # O_PATH: opening a FIFO would wait for a writer, and opening a device can have side effects.
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
    """Return True if a value read from a file is an unsigned 64-bit integer."""
    return isinstance(value, int) and 0 <= value < 1 << 64


def identity(file: os.PathLike[str] | int) -> tuple[int, ...]:
    """Return (device, inode, size in bytes, mtime in nanoseconds) of a file.

    Callers assume that the contents are unchanged while this tuple is unchanged.
    Raises: OSError.
    """
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def replace_file(target: Path, prefix: str, write: Callable[[IO[bytes]], None]) -> None:
    """Replace a file atomically: `write` fills a temporary file, which is renamed to `target`.

    `prefix` begins the temporary file's name. Raises: OSError.
    """
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile(dir=target.parent, prefix=prefix, delete=False) as file:
        try:
            write(file)
            file.flush()
            os.rename(file.name, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def read_open(file: BinaryIO, limit: int) -> bytes:
    """Return the contents of the open file `file`.

    Raises: OSError, EFBIG (more than `limit` bytes), EINVAL (a read would block).
    """
    parts: list[bytes] = []
    left = limit
    while left >= 0:
        part: bytes | None = file.read(_PART)
        if part is None:
            # Files of tracefs and procfs can block although their type is "regular".
            raise OSError(errno.EINVAL, "nothing to read: its readers wait")
        if not part:
            return b"".join(parts)
        parts.append(part)
        left -= len(part)
    raise OSError(errno.EFBIG, f"more than {limit} bytes")


def read_regular(path: str | os.PathLike[str], limit: int, flags: int = 0) -> bytes:
    """Return the contents of the regular file at `path`, which has at most `limit` bytes.

    `flags` are additional flags of open(2). Raises: the errors of open_regular() and read_open(), with the
    path as file name.
    """
    with open_regular(path, flags) as file:
        try:
            return read_open(file, limit)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None


class BoundedFileReader:
    """Reads files from file systems that may be slow or hang, with a thread for each file.

    A thread that hangs doesn't delay other readers. While MAX_BLOCKED_READERS threads hang,
    read() refuses new files.
    """

    def __init__(self) -> None:
        self._late: set[_Reading[Any]] = set()

    def read(self, path: str | os.PathLike[str], limit: int, deadline: float | None) -> bytes:
        """Return the contents of a regular file, read by a thread; at most `limit` bytes are allowed.

        Wait for the thread until `deadline`, a time of time.monotonic(). If `deadline` is None, wait without
        a limit.
        Raises: the errors of read_regular(), and OSError ETIMEDOUT (not done at the deadline), EBUSY
        (MAX_BLOCKED_READERS threads are blocked), ENOMEM (no thread or memory is left).
        """
        return self._answer(path, lambda: read_regular(path, limit), deadline)

    def look(self, path: str | bytes, deadline: float) -> os.stat_result:
        """Return the attributes of the file at `path`, by stat(2) in a thread of its own.

        Wait for the thread until `deadline`, a time of time.monotonic().
        Raises: the errors of stat(2), ValueError (a path with NUL), and OSError ETIMEDOUT, EBUSY and ENOMEM
        in the same cases as read().
        """
        return self._answer(path, lambda: os.stat(path), deadline)

    def _answer(
        self, path: str | bytes | os.PathLike[str], ask: Callable[[], T], deadline: float | None
    ) -> T:
        if len(self._late) >= MAX_BLOCKED_READERS:
            raise OSError(errno.EBUSY, f"{MAX_BLOCKED_READERS} files are waited for already", os.fspath(path))
        reading = _Reading(path, ask, self._late)
        try:
            start_thread("read-file", reading.run)
        except KernelError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        if not reading.is_done(deadline):
            self._late.add(reading)
            if not reading.answered.is_set():
                raise OSError(errno.ETIMEDOUT, "its file system doesn't answer in time", os.fspath(path))
            self._late.discard(reading)
        return reading.result()


class _Reading(Generic[T]):
    """One call of the function `ask` in a thread. The function reads a file or its attributes.

    `late`: the set of readings that did not end in time. When a reading ends, it removes itself from this
    set.
    """

    def __init__(
        self, path: str | bytes | os.PathLike[str], ask: Callable[[], T], late: set[_Reading[Any]]
    ) -> None:
        self.answered = Event()
        self._path = path
        self._ask = ask
        self._late = late
        self._answer: T | Exception | None = None
        self._thread = 0
        """Native id (tid) of the thread, or 0 until the thread has begun."""

    def is_done(self, deadline: float | None) -> bool:
        """Wait for the end of `ask`, at most until `deadline`, and return whether it has ended.

        `deadline` is a time of time.monotonic(), or None to wait without a limit. A thread that runs or waits
        for a CPU at the deadline has BUSY_PATIENCE more seconds.
        """
        if deadline is None:
            return self.answered.wait()
        limit = deadline + BUSY_PATIENCE
        while not self.answered.wait(max(deadline - monotonic(), 0)):
            if monotonic() >= limit or not self._is_runnable():
                return False
            deadline = monotonic() + BUSY_INTERVAL
        return True

    def _is_runnable(self) -> bool:
        return not self._thread or is_runnable(f"/proc/self/task/{self._thread}")

    def run(self) -> None:
        """Call `ask` and keep its result or its exception. The thread runs this function."""
        self._thread = get_native_id()
        try:
            self._answer = self._ask()
        except Exception as error:
            self._answer = error
        finally:
            self.answered.set()
            self._late.discard(self)

    def result(self) -> T:
        """Return the result of `ask`, which has ended.

        Raises: the exception of `ask`, OSError ENOMEM (the thread could not store a result).
        """
        answer = self._answer
        if answer is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), os.fspath(self._path))
        if isinstance(answer, Exception):
            raise answer
        return answer


def read_named(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the contents of a file that a user names on the command line; at most `limit` bytes are allowed.

    If the path is an inherited descriptor, such as /dev/stdin or <(...), it is read until its end. Raises: as
    read_regular().
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            if _reads(descriptor, found):
                return read_descriptor(descriptor, limit)
    return read_regular(path, limit)


def _reads(descriptor: int, file: os.stat_result) -> bool:
    try:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        return mode != os.O_WRONLY and os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        # The descriptor is the one that listed the directory, which is closed now.
        return False


def read_descriptor(descriptor: int, limit: int) -> bytes:
    """Read a descriptor until its end, waiting for data. Raises: OSError, EFBIG (more than `limit` bytes)."""
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
