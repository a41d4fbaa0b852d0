"""Starting and stopping the program in tests; every daemon is stopped by its own pid, and in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kprobefs.common.mountpoints import FSTYPE, detach, mounted_on
from tests.fuse.forker import Forked, forker

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, str(ROOT / "tests" / "fuse" / "bare_program.py")]
"""The program without an eye on host processes."""
REAL_PROGRAM = [sys.executable, "-m", "kprobefs"]
"""The program as users have it."""
PATIENCE = 10.0
"""Seconds for anything that should happen at once."""
RUN = 30.0
"""Seconds for a command."""
WATCHDOG = 60.0
"""Seconds after which a daemon is killed, so that requests stuck in it fail instead of hanging the test."""

needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK),
    reason="no access to /dev/fuse: run as root with the fuse module",
)


Process = subprocess.Popen[bytes] | Forked


@dataclass
class Daemon:
    """A daemon in the foreground, and where it is mounted."""

    process: Process
    directory: Path
    log_file: Path

    @property
    def log(self) -> str:
        """What it has written to standard error."""
        return self.log_file.read_text()

    @property
    def cpu_seconds(self) -> float:
        """CPU time that it has used, in the clock's ticks."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return sum(map(int, stat.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def path(self, *names: str) -> str:
        """A path in the mount."""
        return str(self.directory.joinpath(*names))

    def stop(self, signal_number: int) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(PATIENCE)


def kill_with_children(pid: int) -> None:
    """Kill a daemon and the process that would unmount after it."""
    for each in (*Path(f"/proc/{pid}/task/{pid}/children").read_text().split(), pid):
        os.kill(int(each), signal.SIGKILL)


def environment() -> dict[str, str]:
    """What the program runs with."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


def eventually(condition: object, message: str = "it never happened", patience: float = PATIENCE) -> None:
    """Wait until a callable is true, so many seconds at most."""
    assert callable(condition)
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.005)


def kprobefs(*arguments: str, program: list[str] = PROGRAM, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end, and until nobody has its output; `more` is set in its environment.

    Raises: TimeoutExpired for one that had to be killed.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        ours, theirs = zip(os.pipe(), os.pipe(), strict=True)
        output, errors = (stack.enter_context(open(descriptor, encoding="utf-8")) for descriptor in ours)
        process = _start(program, [*arguments], *theirs, **more)
        for descriptor in theirs:
            os.close(descriptor)
        stack.enter_context(watched(process, RUN))
        reader = stack.enter_context(ThreadPoolExecutor(1)).submit(output.read)
        complaints = errors.read()
        status = process.wait()
        if time.monotonic() - began >= RUN:
            raise subprocess.TimeoutExpired(list(arguments), RUN)
        return subprocess.CompletedProcess(arguments, status, reader.result(), complaints)


def is_mounted(directory: Path) -> bool:
    """Whether something of ours is mounted there."""
    point = mounted_on(str(directory))
    return point is not None and point.fstype == FSTYPE


def _answers(directory: Path) -> bool:
    """Whether it is mounted, and not by a daemon that was killed."""
    with suppress(OSError):
        return os.path.ismount(directory) and bool(os.statvfs(directory))
    return False


@contextmanager
def watched(process: Process, limit: float = WATCHDOG) -> Iterator[None]:
    """Within, there is a limit to how long it may be stuck."""
    watchdog = threading.Timer(limit, process.kill)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def _start(program: list[str], arguments: list[str], output: int, errors: int, **more: str) -> Process:
    env = environment() | more
    if program in (PROGRAM, REAL_PROGRAM):
        return forker().start(arguments, env, output, errors, is_bare=program is PROGRAM)
    null = subprocess.DEVNULL
    return subprocess.Popen([*program, *arguments], env=env, stdin=null, stdout=output, stderr=errors)


@contextmanager
def daemon(
    directory: Path, *options: str, program: list[str] = PROGRAM, is_shared: bool = False
) -> Iterator[Daemon]:
    """A foreground daemon that is mounted; ended and unmounted afterwards, whatever happened.

    `is_shared`: whoever uses it has it watched meanwhile.
    """
    log_file = directory.with_name(f"{directory.name}.log")
    with log_file.open("wb") as log, open(os.devnull, "wb") as null:
        arguments = ["mount", "-f", *options, str(directory)]
        process = _start(program, arguments, null.fileno(), log.fileno())
    try:
        with watched(process):
            # A distribution's kernel takes seconds to be read.
            eventually(lambda: _answers(directory) or process.poll() is not None, patience=WATCHDOG)
            assert process.poll() is None, log_file.read_text()
        with nullcontext() if is_shared else watched(process):
            yield Daemon(process, directory, log_file)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if is_mounted(directory):
            detach(str(directory))
