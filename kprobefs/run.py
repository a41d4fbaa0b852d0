"""`kprobefs run`: a mount for the life of one command."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from kprobefs import as_system as as_system_places
from kprobefs import daemon, mount
from kprobefs.failure import Exit, Failure
from kprobefs.options import Builder, MountOptions

END_TIMEOUT = 5.0
"""Seconds that the daemon may take to end before it is killed."""
POLL_INTERVAL = 0.01


def run(options: MountOptions, build: Builder, command: Sequence[str], *, as_system: bool = False) -> int:
    """Mount on a temporary directory, run `command` with its path in $KPROBEFS, clean up.

    `as_system`: the mount stands at the system's places too, in a mount namespace of its own.
    Returns the command's exit status, 128 + number where a signal ended it. Raises: Failure.
    """
    if as_system:
        as_system_places.enter_namespace()
    runner = _Runner(command)
    for number in daemon.SIGNALS:
        signal.signal(number, runner.on_signal)
    with tempfile.TemporaryDirectory(prefix="kprobefs-") as parent:
        base = Path(os.path.realpath(parent))
        # The mount's own modes decide who gets in.
        base.chmod(0o755)
        directory = base / "mnt"
        directory.mkdir()
        log_file = base / "log"
        try:
            child = daemon.start_as_child(replace(options, directory=str(directory)), build, log_file)
        except Failure as failure:
            raise Failure(str(failure), Exit.RUN_FAILED) from failure
        try:
            if as_system:
                runner.environment = as_system_places.lay_over(str(directory), base)
            return runner.run(str(directory))
        finally:
            _end(child, str(directory))


class _Runner:
    """Runs the command, and passes signals on to it; before there is one they are kept."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = 0
        self.environment: dict[str, str] = {}
        """What is added to the command's."""

    def run(self, directory: str) -> int:
        """The command's exit status as a shell gives it. Raises: Failure when it can't be started."""
        if self._pending:
            return 128 + self._pending
        try:
            environment = {**os.environ, **self.environment, "KPROBEFS": directory}
            self._process = subprocess.Popen(self._command, env=environment)
        except FileNotFoundError:
            raise Failure(f"{self._command[0]}: no such command", Exit.NOT_FOUND) from None
        except OSError as error:
            raise Failure(f"{self._command[0]}: {error.strerror}", Exit.NOT_EXECUTABLE) from None
        # Handlers run inside Popen() too, when the command may live already and isn't known here yet.
        if self._pending:
            self._pass_on(self._pending)
        status = self._process.wait()
        return 128 - status if status < 0 else status

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handler for the signals that end a program."""
        del frame
        if self._process is None:
            self._pending = number
        else:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        # A terminal has sent its interrupt to the command too.
        if self._process is not None and (number != signal.SIGINT or not _in_foreground()):
            self._process.send_signal(number)


def _in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def _end(child: int, directory: str) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + END_TIMEOUT
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(POLL_INTERVAL)
    if mount.mounted_on(directory) is not None:
        mount.detach(directory)
