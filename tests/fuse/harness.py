"""Start and stop the program in tests. Each daemon is stopped by its own pid, and within a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kprobefs.common.mountpoints import FSTYPE, detach, mounted_on
from tests.fuse.forker import Forked, forker

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, str(ROOT / "tests" / "fuse" / "bare_program.py")]
"""Command of the program that does not watch host processes."""
REAL_PROGRAM = [sys.executable, "-m", "kprobefs"]
"""Command of the program as users start it."""
PYTEST = [sys.executable, "-m", "pytest"]
"""Command of pytest. Most of kprobefs's modules are already imported, but not its plugin for pytest."""
_FORKED = (("bare_program", PROGRAM), ("kprobefs", REAL_PROGRAM), ("pytest", PYTEST))
"""Names and commands of the programs that the forker starts."""
PATIENCE = 30.0
"""Time limit in seconds for effects that should occur at once."""
RUN = 60.0
"""Time limit of a command in seconds."""
WATCHDOG = 90.0
"""Time in seconds after which a daemon is killed.

Requests that are stuck in the daemon then fail, and the test does not hang.
"""

needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK),
    reason="no access to /dev/fuse: run as root with the fuse module",
)


Process = subprocess.Popen[bytes] | Forked


@dataclass
class Daemon:
    """A daemon that runs in the foreground, and its mount point."""

    process: Process
    directory: Path
    log_file: Path

    @property
    def log(self) -> str:
        """Return the text that the daemon has written to standard error."""
        return self.log_file.read_text()

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU time in seconds that the daemon has used, rounded to clock ticks."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return sum(map(int, stat.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def path(self, *names: str) -> str:
        """Return the path of a file in the mount."""
        return str(self.directory.joinpath(*names))

    def stop(self, signal_number: int) -> int:
        """Send a signal to the daemon, and return its exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(PATIENCE)


def waits_for_mount(pid: int) -> bool:
    """Return True if the process or thread `pid` waits for the reply to a FUSE request."""
    return Path(f"/proc/{pid}/wchan").read_text() == "request_wait_answer"


def sleeps(pid: int) -> bool:
    """Return True if all threads of a process sleep."""
    # A thread that ends during the check does not sleep.
    with suppress(OSError):
        threads = Path(f"/proc/{pid}/task").glob("*/stat")
        return {stat.read_text().rpartition(")")[2].split()[0] for stat in threads} == {"S"}
    return False


def is_alive(pid: int) -> bool:
    """Return True if a process exists and is not a zombie. In a container, a process that has ended may stay
    a zombie.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_with_children(pid: int) -> None:
    """Kill a daemon and its child processes. One of these would otherwise unmount after the daemon's end."""
    for each in (*Path(f"/proc/{pid}/task/{pid}/children").read_text().split(), pid):
        # A process that reads a client's memory may have ended meanwhile.
        with suppress(ProcessLookupError):
            os.kill(int(each), signal.SIGKILL)


def environment() -> dict[str, str]:
    """Return the environment in which the program runs."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


def eventually(
    condition: object,
    message: str | Callable[[], str] = "it never happened",
    patience: float = PATIENCE,
    interval: float = 0.005,
) -> None:
    """Wait until the function `condition` returns True, for at most `patience` seconds.

    `message`: text of the failure, or a function that returns the text. `interval`: seconds between two
    calls; use more for a condition that starts processes.
    """
    assert callable(condition)
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, message() if callable(message) else message
        time.sleep(interval)


def kprobefs(
    *arguments: str,
    program: list[str] = PROGRAM,
    limit: float = RUN,
    cwd: str | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run the program until it has ended and all processes have closed its output.

    `limit`: time limit in seconds. `cwd`: the program's directory, by default that of this process. `more`:
    additional environment variables. Raises: TimeoutExpired (the program had to be killed).
    """
    with ExitStack() as stack:
        ours, theirs = zip(os.pipe(), os.pipe(), strict=True)
        output, errors = (stack.enter_context(open(descriptor, encoding="utf-8")) for descriptor in ours)
        process = _start(program, [*arguments], *theirs, cwd, **more)
        # Before the first fork, the process that forks has to start.
        began = time.monotonic()
        for descriptor in theirs:
            os.close(descriptor)
        stack.enter_context(watched(process, limit))
        reader = stack.enter_context(ThreadPoolExecutor(1)).submit(output.read)
        complaints = errors.read()
        status = process.wait()
        if time.monotonic() - began >= limit:
            raise subprocess.TimeoutExpired(list(arguments), limit)
        return subprocess.CompletedProcess(arguments, status, reader.result(), complaints)


def is_mounted(directory: Path) -> bool:
    """Return True if kprobefs is mounted on a directory."""
    point = mounted_on(str(directory))
    return point is not None and point.fstype == FSTYPE


def _answers(directory: Path) -> bool:
    """Return True if a directory is a mount point whose file system answers."""
    with suppress(OSError):
        return os.path.ismount(directory) and bool(os.statvfs(directory))
    return False


@contextmanager
def watched(process: Process, limit: float = WATCHDOG) -> Iterator[None]:
    """Kill `process` if the block takes longer than `limit` seconds.

    Raises: AssertionError (the process had to be killed). If the block itself raises an exception, this
    exception gets a note about the kill.
    """
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    said = f"process {process.pid} was killed after {limit:g} seconds: the test needed it for longer"
    watchdog = threading.Timer(limit, kill)
    watchdog.start()
    try:
        yield
    except BaseException as error:
        if late.is_set():
            error.add_note(said)
        raise
    finally:
        watchdog.cancel()
    # The process may have ended before the block did.
    assert not late.is_set() or process.wait(PATIENCE) != -signal.SIGKILL, said


def _start(
    program: list[str], arguments: list[str], output: int, errors: int, cwd: str | None = None, **more: str
) -> Process:
    env = environment() | more
    for name, command in _FORKED:
        if program is command:
            return forker().start(arguments, env, output, errors, program=name, cwd=cwd)
    command = [*program, *arguments]
    return subprocess.Popen(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)


@contextmanager
def daemon(
    directory: Path, *options: str, program: list[str] = PROGRAM, is_shared: bool = False
) -> Iterator[Daemon]:
    """Start a daemon in the foreground, and yield the daemon once its mount answers. End the daemon and
    unmount afterwards.

    `is_shared`: do not limit the daemon's time, because each user of the daemon calls watched().
    """
    log_file = directory.with_name(f"{directory.name}.log")
    with log_file.open("wb") as log, open(os.devnull, "wb") as null:
        arguments = ["mount", "-f", *options, str(directory)]
        process = _start(program, arguments, null.fileno(), log.fileno())
    try:
        with watched(process):
            # Reading a distribution's kernel takes seconds.
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
