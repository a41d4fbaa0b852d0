"""Requests that a mount must answer during an attack, with the time that each takes."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stress.fuzz.report import Violation
from tests.fuse.harness import Daemon
from tests.mounted.files import EVENTS, Files

SLOWEST = 2.0
"""Maximum time of a request in seconds, if the machine is otherwise idle."""
WITHIN = 120.0
"""Maximum time in seconds after which a client must have ended."""


def read_each(pipes: list[Path]) -> list[str]:
    """Start a thread for each pipe that reads the pipe once, and return a list for the results.

    When a read ends, its thread appends the name of the errno, or "" after success.
    """
    answers: list[str] = []

    def read(descriptor: int) -> None:
        answers.append(errno_of(lambda: os.read(descriptor, 4096)))
        with suppress(OSError):
            os.close(descriptor)

    for pipe in pipes:
        threading.Thread(target=read, args=(os.open(pipe, os.O_RDONLY),), daemon=True).start()
    return answers


def errno_of(request: Callable[[], object]) -> str:
    """Make a request, and return the name of its errno, or "" after success."""
    try:
        request()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def look(files: Files, event: str | None) -> tuple[float, str]:
    """Read lists and the log, and disable `event` if it is not None.

    Return the duration in seconds and the name of the slowest request.
    """
    late = max(
        timed("kprobes/list", lambda: files.read("kprobes/list")),
        timed("machine/dmesg", lambda: files.read("machine/dmesg")),
    )
    if event is not None:
        late = max(late, timed("disabling", lambda: files.write(f"{EVENTS}/{event}/enable", "0")))
    return late


def timed(name: str, request: Callable[[], object]) -> tuple[float, str]:
    """Make a request, and return its duration in seconds and its name."""
    start = time.monotonic()
    request()
    return time.monotonic() - start, name


def lateness(late: tuple[float, str], slowest: float) -> str:
    """Return a text about the slowest request, `late`: its seconds and its name.

    Raises: Violation if it took more than `slowest` seconds.
    """
    seconds, request = late
    if seconds > slowest:
        raise Violation(f"{request} took {seconds:.2f} s")
    return f"{seconds:.2f} s the slowest request: {request}"


def soundly_serves(running: Daemon) -> None:
    """Check that a daemon answers, records a hit, and has logged no error. Raises: Violation."""
    files = Files(running.directory)
    files.write("kprobes/enabled", "1")
    files.write("tracing/tracing_on", "1")
    files.write("kprobe_events", "p:endured vfs_mkdir\n")
    files.write(f"{EVENTS}/endured/enable", "1")
    path = files.path("scratch/endured")
    path.mkdir()
    path.rmdir()
    files.write(f"{EVENTS}/endured/enable", "0")
    hits = files.read("kprobes/stats/kprobes/endured/hits")
    if int(hits) != 1:
        raise Violation(f"{hits.strip()} hits of one mkdir")
    files.write("kprobe_events", "-:endured\n")
    if "Traceback" in running.log or "ERROR" in running.log:
        raise Violation(running.log[-2000:])
