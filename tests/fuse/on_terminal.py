"""A program on a pseudoterminal of a given size, and what `kprobefs top` draws on such a console."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

from rich.console import Console

from kprobefs.cli.top import Probes, View, picture
from tests.fuse.harness import PATIENCE, REAL_PROGRAM, environment


def drawn(view: View, probes: Probes, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, no_color=True)
    with console.capture() as capture:
        console.print(picture(view, probes, console))
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).rstrip("\n").split("\n")


def _control_by_terminal() -> None:
    """Let the terminal send the signals of its keys, such as Ctrl-C, to this process's group."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A program that runs on a pseudoterminal of a given size."""

    def __init__(self, columns: int, rows: int, *command: str, **more: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        variables = {"COLUMNS": "", "LINES": "", "NO_COLOR": "", "TERM": "xterm-256color"}
        found = environment() | variables | more
        for name in ("COLUMNS", "LINES"):
            del found[name]
        self.process = subprocess.Popen(
            [*REAL_PROGRAM, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=found,
            start_new_session=True,
            preexec_fn=_control_by_terminal,  # noqa: PLW1509 - it makes only one system call
        )
        os.close(slave)
        self.said = ""
        self._matched = 0
        """Length of the part of `said` that ends with the last match of until()."""

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, pattern: str) -> None:
        """Read the program's output until the output since the call of this method matches `pattern`.

        Fail after PATIENCE seconds.
        """
        start, deadline = len(self.said), time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.said[start:])):
            assert time.monotonic() < deadline, self.said[start:]
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.said += os.read(self._master, 1 << 16).decode("utf-8", "replace")
                except OSError:
                    # The program has closed its end of the terminal.
                    assert re.search(pattern, self.said[start:]), self.said[start:]
        self._matched = start + found.end()

    def lines(self) -> list[str]:
        """Return the drawing of the screen in which the last match of until() ends, up to this end.

        Escape sequences are left out. After the match, the next drawing may have begun.
        """
        picture = self.said[: self._matched].rpartition("\x1b[H")[2]
        return [line.rstrip() for line in re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", picture).splitlines()]

    def end(self) -> int:
        status = self.process.wait(PATIENCE)
        os.close(self._master)
        return status
