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

    The process's name comes first. If the name imitates another field, the real field overwrites the
    imitation.
    """
    return dict(line.split(":\t", 1) for line in status.split("\n") if ":\t" in line)


_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""Signals that only stop a process, whose system calls go on after SIGCONT."""


def has_signal(thread: int) -> bool:
    """Return True if a host thread that waits in a system call must end the call to handle a signal.

    Blocked signals do not count, nor do signals that only stop the process, nor a stop by a tracer.
    """
    status = fields(read(f"/proc/{thread}/status") or "")
    own, shared, blocked = (int(status.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd", "SigBlk"))
    return bool((own | shared) & ~blocked & ~sum(1 << number - 1 for number in _STOPS))


def is_dying(thread: int) -> bool:
    """Return True if SIGKILL is pending for a host thread. Then it only waits for its request to end."""
    pending = fields(read(f"/proc/{thread}/status") or "").get("SigPnd", "0")
    return bool(int(pending, 16) >> signal.SIGKILL - 1 & 1)
