"""Start the program in tests by a fork(2) of a process that has imported all modules.

This saves most of the time that a start takes.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.kept_images import keep_images

END_TIMEOUT = 10.0
"""Seconds after which a thread that has been joined must have ended."""


class Forked:
    """A running program, with the methods of subprocess.Popen that tests use."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self._forker = forker
        self.pid = pid
        self.returncode: int | None = None
        self._process = os.pidfd_open(pid)
        self._end = select.poll()
        self._end.register(self._process, select.POLLIN)

    def poll(self) -> int | None:
        """Return the exit status, or -N if signal N has ended the program.

        Return None while the program runs.
        """
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the program ends, and return its exit status. Raises: subprocess.TimeoutExpired."""
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("kprobefs", timeout or 0)
        return status

    def _status(self, timeout: float | None) -> int | None:
        """Return the exit status once the program has ended, or None after `timeout` seconds."""
        if self.returncode is None and self._end.poll(timeout and timeout * 1000):
            self.returncode = int(self._forker.ask(pid=self.pid))
            os.close(self._process)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the signal `number` to the program.

        The pid cannot belong to another process, because it is not reused before the exit status is read.
        """
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """A child process that forks programs on request, and that ends when this process ends."""

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

    def start(
        self,
        arguments: list[str],
        environment: dict[str, str],
        output: int,
        errors: int,
        *,
        program: str,
        cwd: str | None = None,
    ) -> Forked:
        """Run a program with `output` and `errors` as its standard output and error.

        `program`: "kprobefs", "bare_program" (bare_program.py) or "pytest". `cwd`: the program's directory,
        by default that of this process.
        """
        own = {
            "arguments": arguments,
            "environment": environment,
            "cwd": cwd or os.getcwd(),
            "program": program,
        }
        return Forked(self, self.ask(output, errors, **own))

    def ask(self, *descriptors: int, **request: object) -> Any:
        """Send a request, with open `descriptors`, to the process that forks; return the answer.

        `request`: the fields of the request, which are sent as JSON.
        """
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            return json.loads(self._channel.recv(100))


@cache
def forker() -> Forker:
    """Return the Forker of this process, which is started at the first call."""
    return Forker()


def main() -> int:
    """Fork a program for each request. In the child process, return the program's exit status."""
    keep_images()
    import pytest

    import kprobefs
    from emulated_kernel.kernel.api import Kernel
    from emulated_kernel.util.config import ARCHITECTURES, MachineConfig
    from kprobefs.cli import main as cli
    from kprobefs.fuse.memory_reserve import share_heap
    from tests.fuse import bare_program

    # The boots below start threads. The heap of a thread would remain, and a daemon's threads would use it.
    share_heap()
    # Import the modules that commands import later, so that all forks have these modules.
    for module in pkgutil.walk_packages(kprobefs.__path__, "kprobefs."):
        if module.name not in ("kprobefs.__main__", "kprobefs.pytest_plugin"):
            importlib.import_module(module.name)
    # A boot of each kernel loads the modules and tables that a mount needs. This saves a third of a mount.
    for arch in ARCHITECTURES:
        with Kernel(MachineConfig(arch=arch)) as kernel:
            kernel.filesystem()
    del kernel

    programs: dict[str, Callable[[], int]] = {
        "kprobefs": cli.main,
        "bare_program": bare_program.main,
        "pytest": lambda: int(pytest.main()),
    }
    # The host lists a joined thread until the thread has ended completely.
    deadline = time.monotonic() + END_TIMEOUT
    while os.listdir("/proc/self/task") != [str(os.getpid())]:
        assert time.monotonic() < deadline, "threads wouldn't be in a fork"
        time.sleep(0.01)
    gc.collect()
    gc.freeze()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not data:
            return 0
        request = json.loads(data)
        if "pid" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                channel.close()
                _set_up(request, *descriptors)
                _end(programs[request["program"]]())
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(json.dumps(answer).encode())


def _end(status: int) -> NoReturn:
    """End this process with an exit status, as a program does at its end, but without unloading modules.

    To unload the modules would copy all of their memory, which is shared with the parent process.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _set_up(request: dict[str, Any], *outputs: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in enumerate((null, *outputs)):
        os.dup2(source, target)
    for descriptor in (null, *outputs):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv[1:] = request["arguments"]


if __name__ == "__main__":
    sys.exit(main())
