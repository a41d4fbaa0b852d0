"""Daemons of tests, forked by a process that has imported the program already: that is most of a start."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

POLL = 0.005
"""Seconds."""


class Forked:
    """A running daemon, with what subprocess.Popen has."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self._forker = forker
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, or minus the signal; None while it runs."""
        if self.returncode is None:
            status = self._forker.ask(pid=self.pid)
            self.returncode = None if status is None else int(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Raises: subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("kprobefs", timeout)
            time.sleep(POLL)
        return status

    def send_signal(self, number: int) -> None:
        """It keeps its pid until somebody asked for its status."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        root = str(Path(__file__).parents[2])
        with other:
            subprocess.Popen(
                [sys.executable, "-m", "tests.fuse.forker", str(other.fileno())],
                cwd=root,
                env={**os.environ, "PYTHONPATH": root},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )

    def start(self, arguments: list[str], environment: dict[str, str], log: int, *, is_bare: bool) -> Forked:
        """Run the program with its standard error in `log`; `is_bare`: that of bare_program.py."""
        own = {"arguments": arguments, "environment": environment, "cwd": os.getcwd(), "is_bare": is_bare}
        return Forked(self, self.ask(log, **own))

    def ask(self, *descriptors: int, **request: object) -> Any:
        """A request and its answer."""
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            return json.loads(self._channel.recv(100))


@cache
def forker() -> Forker:
    """The one of this process."""
    return Forker()


def main() -> int:
    """Fork on request; what a fork returns is the program's exit status."""
    import kprobefs.adapter
    import kprobefs.daemon
    import kprobefs.power  # noqa: F401 (for the forks)
    from kprobefs import cli
    from tests.fuse import bare_program

    programs = {True: bare_program.main, False: cli.main}
    assert os.listdir("/proc/self/task") == [str(os.getpid())], "threads wouldn't be in a fork"
    gc.collect()
    gc.freeze()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 1)
        if not data:
            return 0
        request = json.loads(data)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                channel.close()
                _set_up(request, *descriptors)
                return programs[request["is_bare"]]()
            os.close(descriptors[0])
        channel.send(json.dumps(answer).encode())


def _set_up(request: dict[str, Any], log: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in enumerate((null, null, log)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv[1:] = request["arguments"]


if __name__ == "__main__":
    sys.exit(main())
