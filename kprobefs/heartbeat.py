"""The service manager's watchdog, fed by requests through the mount: a daemon that hangs is restarted."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kprobefs.mount import STATE_LINK

PR_SET_PDEATHSIG = 1
PIPE_SIZE = 1 << 16
"""Bytes that a pipe holds: all answers that were not read yet. Mirrors: pipe(7)."""


def watchdog_interval() -> float | None:
    """Seconds between two signs of life; None where no service manager waits for them.

    Mirrors: sd_watchdog_enabled(3).
    """
    with suppress(ValueError):
        if int(os.environ.get("WATCHDOG_PID", os.getpid())) == os.getpid():
            microseconds = int(os.environ.get("WATCHDOG_USEC", "0"))
            # Half of it, as the manual page asks.
            return microseconds / 2e6 if microseconds > 0 else None
    return None


class Heartbeat:
    """A process that asks the mount for its state again and again, and passes each answer on.

    Not a thread: one that waits for an answer of its own process couldn't be killed. It has to be started
    before /dev/fuse is opened, and while the caller has no threads.
    """

    def __init__(self, directory: str, interval: float) -> None:
        """`interval` in seconds."""
        start, self._start = os.pipe()
        self.descriptor, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _ask_for_ever(directory, interval, start, answers)
        os.close(start)
        os.close(answers)

    def start(self) -> None:
        """The mount is there."""
        os.close(self._start)

    def answer(self) -> str:
        """What the mount said last: its condition; "" when the process has ended."""
        told = os.read(self.descriptor, PIPE_SIZE).decode("ascii", "replace").split()
        return told[-1] if told else ""

    def end(self) -> None:
        """No more questions."""
        os.kill(self.pid, signal.SIGKILL)
        # One that waits for an answer of ours ends with us.
        os.waitpid(self.pid, os.WNOHANG)
        os.close(self.descriptor)


def _ask_for_ever(directory: str, interval: float, start: int, answers: int) -> NoReturn:
    try:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        first, last = sorted((start, answers))
        # The daemon's record is locked by a descriptor: who holds a copy would hold the lock.
        for low, high in ((3, first), (first + 1, last), (last + 1, 1 << 20)):
            os.closerange(low, high)
        os.read(start, 1)
        link = Path(directory, STATE_LINK)
        while os.getppid() == parent:
            os.write(answers, f"{os.readlink(link)}\n".encode())
            time.sleep(interval)
    # This is a forked copy of the daemon: nothing may get back into its frames.
    finally:
        os._exit(0)
