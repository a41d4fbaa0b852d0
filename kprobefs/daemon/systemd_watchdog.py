"""Notifications to the service manager, and a watchdog process that sends requests through the mount.

If the daemon hangs, the keep-alive messages stop, so that the service manager restarts the daemon.
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

from kprobefs.common.errors import fork
from kprobefs.common.mountpoints import CONTROL_TIMEOUT, STATE_LINK, MountState

BUSY_LIMIT = 900.0
"""Seconds after which the daemon counts as hanging, if a read of the mount's state is still blocked.

One run of the guest may take 600 seconds.
"""
CPU_TIMES = slice(11, 13)
"""Range of utime and stime among the fields that follow the name in /proc/PID/stat. Mirrors: proc(5)."""
PR_SET_PDEATHSIG = 1
"""Operation of prctl(2) that sets the signal that a process gets when its parent dies. Mirrors: prctl(2)."""
PIPE_SIZE = 1 << 16
"""Capacity of a pipe in bytes. One read of this size returns all unread reports. Mirrors: pipe(7)."""


def sd_notify(*assignments: str) -> None:
    """Send assignments such as "READY=1" to the service manager, if there is one.

    Mirrors: sd_notify(3).
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.connect(address)
        channel.sendall("\n".join(assignments).encode())


def watchdog_interval() -> float | None:
    """Return the seconds between two keep-alives, or None if no service manager expects them.

    Mirrors: sd_watchdog_enabled(3).
    """
    with suppress(ValueError):
        if int(os.environ.get("WATCHDOG_PID", os.getpid())) == os.getpid():
            microseconds = int(os.environ.get("WATCHDOG_USEC", "0"))
            # The manual page recommends half of the timeout.
            return microseconds / 2e6 if microseconds > 0 else None
    return None


class ServiceWatchdog:
    """A child process that reads the mount's state at regular intervals and reports it to the daemon.

    If the read blocks because a request holds the control lock, the child reports that the mount is busy. The
    child reports this only while the daemon uses CPU time, because a stopped or deadlocked daemon uses none.
    The watchdog is not a thread: a process that waits for an answer from its own FUSE mount cannot be killed.
    The object must be created before /dev/fuse is opened, and while the caller has no threads.
    """

    def __init__(self, directory: str, interval: float) -> None:
        """Fork the child, which waits for start().

        `interval`: seconds between two reads of the mount's state. Raises: CliError (no process can be
        created).
        """
        start, self._start = os.pipe()
        self.descriptor, answers = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            _ask_for_ever(directory, interval, start, answers)
        os.close(start)
        os.close(answers)

    def start(self) -> None:
        """Let the child begin its requests to the mount. The mount must already answer requests."""
        os.close(self._start)

    def answer(self) -> str:
        """Return the latest state of the mount that the child has reported, or "" if the child has ended.

        If there is no report since the previous call, wait for the next one.
        """
        reports = os.read(self.descriptor, PIPE_SIZE).decode("ascii", "replace").split()
        return reports[-1] if reports else ""

    def end(self) -> None:
        """Kill the child process."""
        os.kill(self.pid, signal.SIGKILL)
        # A child that is blocked in a request of this mount dies only with the daemon, so do not wait.
        os.waitpid(self.pid, os.WNOHANG)
        os.close(self.descriptor)


class _Condition:
    """Observes, in the watchdog's process, the state of the mount, and whether the daemon makes progress."""

    def __init__(self, link: Path, daemon: int) -> None:
        """Prepare to watch the mount's state, which is the target of `link`, and the daemon's CPU time.

        `daemon`: pid of the daemon.
        """
        self.told = ""
        """State of the mount at the last ask(), a value of MountState; "" if it could not be read."""
        self.is_alive = True
        """Whether the daemon seemed alive at the last ask().

        False if the read of the state has blocked for BUSY_LIMIT seconds. Also False if the read blocks and
        the daemon has used no CPU time since the previous ask().
        """
        self._link = link
        self._stat = Path(f"/proc/{daemon}/stat")
        self._asking = threading.Thread()
        self._answer = ""
        self._since = time.monotonic()
        self._used: list[bytes] = []

    def ask(self) -> str:
        """Read the mount's state again, store it in `told`, and return it. Also update `is_alive`.

        If the state is not read within CONTROL_TIMEOUT seconds, store and return MountState.BUSY.
        """
        if not self._asking.is_alive():
            self._asking = threading.Thread(target=self._read, daemon=True)
            self._since = time.monotonic()
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
        # Hazard: a descriptor locks the daemon's record. A copy of it in this process would hold the lock.
        for low, high in ((3, first), (first + 1, last), (last + 1, 1 << 20)):
            os.closerange(low, high)
        os.read(start, 1)
        condition = _Condition(Path(directory, STATE_LINK), parent)
        while os.getppid() == parent and condition.ask():
            # If the answer is late, ask again at once. After another interval, the time-out would be over.
            if condition.is_alive:
                os.write(answers, f"{condition.told}\n".encode())
                time.sleep(interval)
    # Hazard: this is a forked copy of the daemon. No exception may unwind into the daemon's frames.
    finally:
        os._exit(0)
