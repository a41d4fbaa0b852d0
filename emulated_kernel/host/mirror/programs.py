"""Which program a process of the host has become: the arguments of the guest's execve()."""

from __future__ import annotations

import os

COMM_MAX = 15
PATH_MAX = 4095
_ARGUMENTS = 2
"""A script's name is the second, behind its interpreter's."""


def program_of(pid: int, comm: str) -> str | None:
    """The path of the program whose execve() gave the process this name.

    None where there is none to be found: the process named itself, or has ended.
    """
    return next((path for path in _candidates(pid) if _is_named(path, comm)), None)


def _candidates(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(2 * PATH_MAX).split(b"\0")[:_ARGUMENTS]
        return [os.readlink(f"/proc/{pid}/exe"), *(os.fsdecode(word) for word in words)]
    except OSError:
        return []


def _is_named(path: str, comm: str) -> bool:
    name = path.rpartition("/")[2]
    return bool(name) and os.fsencode(name)[:COMM_MAX] == os.fsencode(comm) and len(path) <= PATH_MAX
