"""The service manager: how the daemon is, and a watchdog that requests through the mount feed.

A daemon that hangs is restarted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kprobefs.common.mountpoints import CONTROL_TIMEOUT, STATE_LINK, MountState

BUSY_LIMIT = 900.0
"""Seconds that a request may keep the kernel: a run's budget is 600 at most."""
CPU_TIMES = slice(11, 13)
"""utime and stime among the fields of /proc/PID/stat behind the name; see proc(5)."""
PR_SET_PDEATHSIG = 1
PIPE_SIZE = 1 << 16
"""Bytes that a pipe holds: all answers that were not read yet. Mirrors: pipe(7)."""


def sd_notify(*assignments: str) -> None:
    """Send assignments such as "READY=1" to the service manager, if one listens. Mirrors: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.connect(address)
        channel.sendall("\n".join(assignments).encode())


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


class ServiceWatchdog:
    """A process that asks the mount for its state again and again, and passes each answer on.

    While a request keeps the kernel, and the state waits for its lock, it says that the mount is busy if the
    daemon uses its CPU: one that is stopped, or has locked itself out, doesn't.
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


class _Condition:
    """What the mount says of itself, as long as a daemon works at it."""

    def __init__(self, link: Path, daemon: int) -> None:
        """`daemon`: its pid."""
        self.told = ""
        """MountState's value; "" where the mount is gone."""
        self.is_alive = True
        """Whether an answer came, or is still worked for."""
        self._link = link
        self._stat = Path(f"/proc/{daemon}/stat")
        self._asking = threading.Thread()
        self._answer = ""
        self._since = time.monotonic()
        self._used: list[bytes] = []

    def ask(self) -> str:
        """Look again; what is told then."""
        if not self._asking.is_alive():
            self._asking, self._since = threading.Thread(target=self._read, daemon=True), time.monotonic()
            self._asking.start()
        self._asking.join(CONTROL_TIMEOUT)
        is_busy = self._asking.is_alive()
        used = self._stat.read_bytes().rpartition(b")")[2].split()[CPU_TIMES]
        is_working = used != self._used and time.monotonic() < self._since + BUSY_LIMIT
        self._used = used
        self.is_alive = is_working or not is_busy
        self.told = MountState.BUSY.value if is_busy else self._answer
        return self.told

    def _read(self) -> None:
        try:
            self._answer = os.readlink(self._link)
        except OSError:
            self._answer = ""


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
        condition = _Condition(Path(directory, STATE_LINK), parent)
        while os.getppid() == parent and condition.ask():
            if condition.is_alive:
                os.write(answers, f"{condition.told}\n".encode())
            time.sleep(interval)
    # This is a forked copy of the daemon: nothing may get back into its frames.
    finally:
        os._exit(0)
