"""Files of the host's /proc, of processes that may end at any time."""

from __future__ import annotations

import signal


def read(path: str) -> str | None:
    """A file's text; None where there is none any more, or it isn't ours to read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return None


def fields(status: str) -> dict[str, str]:
    """The lines of a /proc/PID/status; the name comes first, so that none in it hides another."""
    return dict(line.split(":\t", 1) for line in status.split("\n") if ":\t" in line)


def is_dying(thread: int) -> bool:
    """Whether a thread of the host is killed: it waits for its request alone, and no signal wakes it."""
    pending = fields(read(f"/proc/{thread}/status") or "").get("SigPnd", "0")
    return bool(int(pending, 16) >> signal.SIGKILL - 1 & 1)
