"""Reads of other processes' memory through helper processes, because a read can take for ever.

A page of another process can belong to a file of a hung file system, or to a file of the reader's own mount.
Then the reader sleeps in the host's kernel, and not even SIGKILL ends it.
"""

from __future__ import annotations

import logging
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import monotonic

from emulated_kernel.util.host_tasks import BUSY_INTERVAL, is_runnable

log = logging.getLogger("kprobefs.clients")

PATIENCE = 0.005
"""Seconds of a read after which another thread begins to serve requests; see ProcessMemory.waiting."""
TIMEOUT = 0.1
"""Seconds after which a read by a helper that sleeps is given up."""
BUSY_TIMEOUT = 5.0
"""Seconds that a read gets after TIMEOUT, as long as its helper does not sleep.

On a busy host, a helper may wait for a CPU longer than TIMEOUT.
"""
MAX_ABANDONED = 8
"""Maximum number of abandoned helpers that may still sleep in a read. At the maximum, all reads fail."""
IDLE = 3
"""Maximum number of idle helper processes that are kept.

Usually, at most this many threads serve requests at the same time.
"""
START_TIMEOUT = 5.0
"""Maximum seconds that a new helper may take until it is ready."""

_PIECE = struct.Struct("=qq")
_SIZE = struct.Struct("=q")
_READY = b"+"
_FAILED = -1
_HELPER = """
import os, struct
piece, size = struct.Struct("=qq"), struct.Struct("=q")
os.write(1, b"+")

def exactly(count):
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            os._exit(0)
        data += part
    return data

def read(file, offset, count):
    if count >= 0:
        data = b""
        while len(data) < count:
            part = os.pread(file, count - len(data), offset + len(data))
            if not part:
                break
            data += part
        return data
    data = b""
    while len(data) < -count:
        at = offset + len(data)
        data += os.pread(file, 4096 - at % 4096, at) or b"\\0"
        if b"\\0" in data:
            break
    return data.split(b"\\0")[0]

while True:
    (count,) = size.unpack(exactly(size.size))
    path = exactly(count)
    (count,) = size.unpack(exactly(size.size))
    pieces = [piece.unpack(exactly(piece.size)) for _ in range(count)]
    answer = b""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset, length in pieces:
                data = read(file, offset, length)
                answer += size.pack(len(data)) + data
        finally:
            os.close(file)
    except (OSError, OverflowError):
        answer = size.pack(-1)
    answer = size.pack(len(answer)) + answer
    while answer:
        answer = answer[os.write(1, answer):]
"""
"""Program of a helper process, in Python.

The program answers requests (path, pieces) with the pieces' data until its input ends. The program is kept
in memory. So a daemon whose package was upgraded meanwhile still starts the program of its own version.
"""


class _GivenUpError(Exception):
    """Raised if a helper has not answered in time or has ended, or if no helper may be used."""


class _Helper:
    """A helper process. It inherits no descriptors, so that a sleeping helper keeps no mount alive."""

    def __init__(self) -> None:
        """Start the process and wait until it is ready.

        Raises: OSError (it cannot be started), _GivenUpError (it is not ready in time, or has ended).
        """
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _HELPER],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,
        )
        try:
            self._receive(len(_READY), monotonic() + START_TIMEOUT)
        except BaseException:
            self.end()
            self.process.wait()
            raise

    def read(
        self,
        path: str,
        pieces: Sequence[tuple[int, int]],
        waiting: Callable[[], AbstractContextManager[object]],
        timeout: float,
    ) -> list[bytes] | None:
        """Return the contents of each of `pieces` of the file `path`, or None if it is unreadable.

        `pieces`: see ProcessMemory.read(). `waiting`, `timeout`: see ProcessMemory. Raises: OSError (the
        helper has ended), _GivenUpError (it gave no answer in time, or ended without an answer).
        """
        assert self.process.stdin is not None
        name = os.fsencode(path)
        request = [_SIZE.pack(len(name)), name, _SIZE.pack(len(pieces))]
        request += [_PIECE.pack(offset, length) for offset, length in pieces]
        os.write(self.process.stdin.fileno(), b"".join(request))
        deadline = monotonic() + timeout
        if not self._answers_within(PATIENCE):
            with waiting():
                self._answers_by(deadline)
        (size,) = _SIZE.unpack(self._receive(_SIZE.size, deadline))
        answer = self._receive(size, deadline)
        found = []
        at = 0
        while at < size:
            (length,) = _SIZE.unpack_from(answer, at)
            if length == _FAILED:
                return None
            at += _SIZE.size
            found.append(answer[at : at + length])
            at += length
        return found

    def _answers_within(self, seconds: float) -> bool:
        assert self.process.stdout is not None
        # select(2) takes no descriptor above 1023.
        readable = select.poll()
        readable.register(self.process.stdout.fileno(), select.POLLIN)
        return bool(readable.poll(max(0.0, 1000 * seconds)))

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        data = b""
        while len(data) < size:
            if not self._answers_by(deadline):
                raise _GivenUpError
            part = os.read(self.process.stdout.fileno(), size - len(data))
            if not part:
                raise _GivenUpError
            data += part
        return data

    def _answers_by(self, deadline: float) -> bool:
        """Return True when the process has written something or has ended; return False if it takes too long.

        It takes too long if the process sleeps at the monotonic time `deadline`. A process that is runnable
        gets up to BUSY_TIMEOUT seconds more, as long as it stays runnable.
        """
        limit = deadline + BUSY_TIMEOUT
        while not self._answers_within(deadline - monotonic()):
            if monotonic() >= limit or not is_runnable(f"/proc/{self.process.pid}"):
                # The process also sleeps after an answer, which may have come meanwhile.
                return self._answers_within(0)
            deadline = monotonic() + BUSY_INTERVAL
        return True

    def end(self) -> None:
        """Close the pipes and kill the process, which may take a long time to end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.kill()


class ProcessMemory:
    """Reads files of /proc that can block. A read that takes too long fails. Thread-safe."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        """Start without helpers. `timeout`: seconds after which a read is given up if its helper sleeps."""
        self._timeout = timeout
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Function that returns a context manager for a long wait, in which another thread serves requests.

        The memory to read may be mapped from a file of the mount. Then a thread must serve the read of this
        file.
        """
        self._lock = threading.Lock()
        self._idle: list[_Helper] = []
        self._abandoned: dict[subprocess.Popen[bytes], str] = {}
        """Helper that was given up -> path of the file that it reads."""
        self.failures = 0
        """Number of reads that failed: the helper gave no answer in time, or no helper could be used."""

    def read(self, path: str, pieces: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Return the contents of each of `pieces`, (offset, size), of a file; None if the file is unreadable.

        A negative size means a C string of at most that many bytes, without its NUL.
        Hazard: a read can take the whole timeout, so no caller may hold the control lock.
        Raises: TimeoutError (the read was given up or not tried; `failures` counts it).
        """
        helper = None
        try:
            helper = self._take(path)
            found = helper.read(path, pieces, self.waiting, self._timeout)
        except (_GivenUpError, OSError, subprocess.SubprocessError) as error:
            self._abandon(helper, path)
            raise TimeoutError(f"{path}: no answer") from error
        self._give_back(helper)
        return found

    def _take(self, path: str) -> _Helper:
        """Return an idle or new helper for a read of the file `path`.

        Raises: OSError (no helper can be started), _GivenUpError (a helper sleeps in a read of this file, too
        many helpers sleep, or the new helper is not ready in time).
        """
        with self._lock:
            self._abandoned = {
                process: read for process, read in self._abandoned.items() if process.poll() is None
            }
            if path in self._abandoned.values() or len(self._abandoned) >= MAX_ABANDONED:
                raise _GivenUpError
            if self._idle:
                return self._idle.pop()
        return _Helper()

    def _give_back(self, helper: _Helper) -> None:
        with self._lock:
            if len(self._idle) < IDLE:
                self._idle.append(helper)
                return
        helper.end()
        helper.process.wait()

    def _abandon(self, helper: _Helper | None, path: str) -> None:
        with self._lock:
            self.failures += 1
            failures = self.failures
            if helper is not None:
                helper.end()
                self._abandoned[helper.process] = path
        # Each power of two is logged, so that a client cannot fill the log.
        if not failures & failures - 1:
            log.warning("memory of processes: no answer to %d reads so far; the latest: %s", failures, path)

    def close(self) -> None:
        """End the idle helpers and wait for their processes."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for helper in idle:
            helper.end()
            helper.process.wait()
