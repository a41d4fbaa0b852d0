"""Reports of late requests: the daemon's stacks, its CPU time, and stalls of the machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

LATE = 1.0
"""Time in seconds after which a request is late."""
BEAT = 0.1
"""Time in seconds for which the watchdog sleeps. If a sleep takes much longer, the machine has stalled."""
PROGRAM = [sys.executable, "-m", "stress.endurance.late"]
"""Command that runs kprobefs with a handler for SIGNAL, which prints the stacks of its threads."""
SIGNAL = signal.SIGUSR1
PRESSURE = Path("/proc/pressure/cpu")


class LateRequests(threading.Thread):
    """Thread that watches the current request of its process, and reports each late request once."""

    def __init__(self, daemon: int, began: Callable[[], float]) -> None:
        """Watch requests to the daemon whose pid is `daemon`.

        `began` returns the value of time.monotonic() at which the current request began.
        """
        super().__init__(daemon=True)
        self.reports: list[str] = []
        self._daemon = daemon
        self._began = began
        self._used = _cpu_seconds(daemon)
        self._stalled = 0.0

    def run(self) -> None:
        """Watch until the process ends."""
        since = told = 0.0
        while True:
            before = time.monotonic()
            time.sleep(BEAT)
            now, began = time.monotonic(), self._began()
            if began != since:
                since, self._used, self._stalled = began, _cpu_seconds(self._daemon), 0.0
            self._stalled = max(self._stalled, now - before - BEAT)
            if now - began > LATE and began != told:
                told = began
                self.reports.append(self._look(now - began))
                # The daemon writes its stacks to its log.
                os.kill(self._daemon, SIGNAL)

    def _look(self, seconds: float) -> str:
        used = _cpu_seconds(self._daemon) - self._used
        return (
            f"after {seconds:.2f} s: the daemon has used {used:.2f} s of the CPU, a sleep of {BEAT} s took"
            f" {self._stalled:.2f} s more at most, {os.getloadavg()[0]:.1f} processes run; {_pressure()}"
        )


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _pressure() -> str:
    return PRESSURE.read_text().splitlines()[0] if PRESSURE.exists() else "no /proc/pressure"


def _print_stacks(_number: int, _frame: FrameType | None) -> None:
    # The handler holds the interpreter lock. faulthandler would read the stacks of running threads, which can
    # crash the daemon.
    for thread, frame in sys._current_frames().items():
        print(f"thread {thread}:", *traceback.format_stack(frame), sep="\n", file=sys.stderr, flush=True)


def main() -> int:
    """Run kprobefs; on SIGNAL, print the stacks of all threads to standard error.

    A thread that waits for the control lock is in the lock's __enter__(), unlike the thread that holds it.
    """
    signal.signal(SIGNAL, _print_stacks)
    from kprobefs.cli import main as cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
