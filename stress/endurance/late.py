"""What a late request's time went into: the daemon's stacks and CPU time, and how the machine stood still."""

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
"""Seconds that a request may take before its watchdog asks."""
BEAT = 0.1
"""Seconds that the watchdog sleeps: what it takes longer is the machine's."""
PROGRAM = [sys.executable, "-m", "stress.endurance.late"]
"""The program, with an ear for the signal that asks for its stacks."""
SIGNAL = signal.SIGUSR1
PRESSURE = Path("/proc/pressure/cpu")


class LateRequests(threading.Thread):
    """Looks at what its process waits for; each request that takes longer than LATE is looked into once."""

    def __init__(self, daemon: int, began: Callable[[], float]) -> None:
        """`daemon`: its pid; `began`: when the request did that is waited for (time.monotonic)."""
        super().__init__(daemon=True)
        self.reports: list[str] = []
        self._daemon = daemon
        self._began = began
        self._used = _cpu_seconds(daemon)
        self._stalled = 0.0

    def run(self) -> None:
        """For as long as the process lives."""
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
                # Stands in its log.
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


def _tell(_number: int, _frame: FrameType | None) -> None:
    # With the interpreter held: faulthandler, which looks at threads while they run, has ended daemons.
    for thread, frame in sys._current_frames().items():
        print(f"thread {thread}:", *traceback.format_stack(frame), sep="\n", file=sys.stderr, flush=True)


def main() -> int:
    """The program; asked for, the stacks of all its threads go to standard error.

    Who waits for the control lock stands in its __enter__(), and who has it doesn't.
    """
    signal.signal(SIGNAL, _tell)
    from kprobefs.cli import main as cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
