"""The process that applies a mount's first definitions while the daemon serves it."""

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
"""Bytes that a pipe holds. Mirrors: pipe(7)."""
END_TIMEOUT = 1.0
"""Seconds."""


class ApplyProcess:
    """A process that applies the definitions that a mount begins with; it logs what fails.

    Not the daemon itself: one that waits for an answer of its own process couldn't be killed.
    """

    def __init__(self, directory: str) -> None:
        package = os.path.dirname(os.path.dirname(os.path.abspath(kprobefs.__file__)))
        paths = filter(None, (package, os.environ.get("PYTHONPATH")))
        # -P: nothing is imported from the working directory.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kprobefs", "apply", "--mount", directory],
            env={**os.environ, "PYTHONPATH": ":".join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert self._process.stderr is not None
        self._messages = self._process.stderr
        self._unfinished = b""

    @property
    def descriptor(self) -> int:
        """Can be read when there is something for read()."""
        return self._messages.fileno()

    def read(self) -> str | None:
        """Log what it has to tell; when it has ended how: "" where all was applied."""
        data = os.read(self.descriptor, PIPE_SIZE)
        *lines, self._unfinished = (self._unfinished + (data or b"\n")).split(b"\n")
        for line in filter(None, lines):
            log.warning("%s", escape_for_terminal(line.decode("utf-8", "replace").removeprefix("kprobefs: ")))
        if data:
            return None
        with suppress(subprocess.TimeoutExpired):
            # Behind its last word it only closes files.
            if self._process.wait(END_TIMEOUT) == ExitStatus.OK:
                return ""
        how = "not all definitions were applied"
        log.error("%s", how)
        return how

    def end(self) -> None:
        """Kill it, if it still runs: where a request of its hangs, it ends with the mount."""
        self._process.kill()
        self._messages.close()
