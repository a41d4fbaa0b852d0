"""Reads the host's /proc, whose processes may end at any time."""

from __future__ import annotations

import signal


def read(path: str) -> str | None:
    """Return the text of a file, or None if the file is gone or unreadable."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return None


def fields(status: str) -> dict[str, str]:
    """Return the lines of a /proc/PID/status as field -> value.

    The process's name comes first, so a field that the name imitates is overwritten by the real field.
    """
    return dict(line.split(":\t", 1) for line in status.split("\n") if ":\t" in line)


def is_dying(thread: int) -> bool:
    """Return True if SIGKILL is pending for a host thread, which then waits only for its request to end."""
    pending = fields(read(f"/proc/{thread}/status") or "").get("SigPnd", "0")
    return bool(int(pending, 16) >> signal.SIGKILL - 1 & 1)
