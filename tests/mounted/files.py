"""Access to files of a mount by single system calls, as a process accesses them. Errors keep their errno."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

EVENTS = "tracing/events/kprobes"
TIMEOUT = 60.0
"""Time limit of a test's command in seconds."""


@dataclass(frozen=True)
class Files:
    """The files below a mount point."""

    root: Path

    def path(self, name: str) -> Path:
        return self.root / name

    def read(self, name: str) -> str:
        """Return the text of a file."""
        return self.path(name).read_text(errors="surrogateescape")

    def lines(self, name: str) -> list[str]:
        """Return the lines of a file."""
        return self.read(name).splitlines()

    def write(self, name: str, data: str | bytes, flags: int = os.O_APPEND) -> int:
        """Write `data` with one write(2), and return the number of bytes that the file took.

        `flags`: flags of open(2) besides O_WRONLY. Raises: OSError.
        """
        descriptor = os.open(self.path(name), os.O_WRONLY | flags)
        try:
            return os.write(descriptor, data.encode() if isinstance(data, str) else data)
        finally:
            os.close(descriptor)

    def probe(self, definition: str) -> None:
        """Define an event in group kprobes, and enable it."""
        self.write("kprobe_events", definition)
        name = definition.split(maxsplit=1)[0].partition(":")[2]
        self.write(f"{EVENTS}/{name}/enable", "1")

    def records(self) -> list[str]:
        """Return the lines of tracing/trace without the header."""
        return [line for line in self.lines("tracing/trace") if not line.startswith("#")]

    def shell(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a bash script in the mount."""
        return subprocess.run(
            ["bash", "-c", script],
            cwd=self.root,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )


def assert_errno(number: int) -> pytest.RaisesExc[OSError]:
    """Return a context manager whose block must fail with this errno."""
    return pytest.raises(OSError, match=rf"Errno {number}\b")
