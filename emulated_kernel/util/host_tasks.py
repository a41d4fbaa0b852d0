"""is_runnable(): tells whether a process or thread of the host uses a CPU or waits for one."""

from __future__ import annotations

from contextlib import suppress

BUSY_INTERVAL = 0.02
"""Seconds between two checks whether a task that missed its deadline still runs or waits for a CPU."""


def is_runnable(task: str) -> bool:
    """Return True if a process or thread of the host uses a CPU or waits for one.

    `task`: path of the task's directory in /proc. Mirrors: proc(5), the field `state` of /proc/PID/stat.
    """
    with suppress(OSError), open(f"{task}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[:1] == [b"R"]
    return False
