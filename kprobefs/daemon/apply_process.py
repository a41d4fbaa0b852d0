"""ApplyProcess: applies the *.probes files of a new mount while the daemon serves the mount."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress

import kprobefs
from kprobefs.common.errors import ExitStatus, escape_for_terminal

log = logging.getLogger("kprobefs")

PIPE_SIZE = 1 << 16
"""Capacity of a pipe in bytes. Mirrors: pipe(7)."""
PROGRAM = "import sys; sys.path[:] = {paths!r}; from kprobefs.__main__ import main; sys.exit(main())"
"""Python program that runs kprobefs with the same packages as this process.

`{paths!r}` stands for the directories in which it looks for packages.
"""
END_TIMEOUT = 1.0
"""Maximum seconds that the process may take to exit after it has closed its standard error."""


class ApplyProcess:
    """A child process that applies the *.probes files of a new mount.

    The daemon logs the messages of the child. The daemon does not apply the files itself, because a process
    that waits for an answer from its own FUSE mount cannot be killed.
    """

    def __init__(self, directory: str) -> None:
        package = os.path.dirname(os.path.dirname(os.path.abspath(kprobefs.__file__)))
        # Import the same packages as the daemon, regardless of the environment and the working directory.
        paths = [package, *filter(None, sys.path)]
        # -I ignores variables such as PYTHONHOME.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", PROGRAM.format(paths=paths), "apply", "--mount", directory],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert self._process.stderr is not None
        self._messages = self._process.stderr
        self._unfinished = b""

    @property
    def descriptor(self) -> int:
        """Descriptor that becomes readable when the process has sent messages or has ended."""
        return self._messages.fileno()

    def read(self) -> str | None:
        """Log the new messages of the process.

        Return None while the process runs. After the process has ended, return "" if it has applied all
        definitions, or a message if it has not.
        """
        data = os.read(self.descriptor, PIPE_SIZE)
        *lines, self._unfinished = (self._unfinished + (data or b"\n")).split(b"\n")
        for line in filter(None, lines):
            log.warning("%s", escape_for_terminal(line.decode("utf-8", "replace").removeprefix("kprobefs: ")))
        if data:
            return None
        with suppress(subprocess.TimeoutExpired):
            # After the end of its standard error the process only closes files.
            if self._process.wait(END_TIMEOUT) == ExitStatus.OK:
                return ""
        outcome = "not all definitions were applied"
        log.error("%s", outcome)
        return outcome

    def end(self) -> None:
        """Kill the process if it still runs.

        If the process is blocked in a request to the mount, it ends when the mount ends.
        """
        self._process.kill()
        self._messages.close()
