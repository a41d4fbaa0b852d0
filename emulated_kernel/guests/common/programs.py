"""Programs of host processes: the paths that the guest's execve() gets as arguments."""

from __future__ import annotations

import os
from contextlib import suppress
from struct import Struct

COMM_MAX = 15
PATH_MAX = 4095
_ENTRY = Struct("@LL")
_AT_EXECFN = 31
_AUXV_MAX = 4096
_ARGUMENTS = 2
"""Arguments of a command line that may name the program; a script's name follows its interpreter's."""


def program_of(pid: int, comm: str) -> str | None:
    """Return the path of the program whose execve() gave the process the name `comm`.

    Return None if there is no such path, because the process set its own name or has ended.
    """
    return next((path for path in _candidates(pid) if _is_named(path, comm)), None)


def _executed(pid: int) -> list[str]:
    """Return the path that was passed to execve(), links unresolved: AT_EXECFN of the auxiliary vector.

    Return [] for processes of other users than root and this process's own. Raises: OSError.
    Hazard: reading memory of another user's process can block for ever.
    """
    if os.stat(f"/proc/{pid}").st_uid not in (0, os.geteuid()):
        return []
    with open(f"/proc/{pid}/auxv", "rb") as file:
        data = file.read(_AUXV_MAX)
    entries = dict(_ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size]))
    if _AT_EXECFN not in entries:
        return []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        name, end, _ = os.pread(memory.fileno(), PATH_MAX + 1, entries[_AT_EXECFN]).partition(b"\0")
    return [os.fsdecode(name)] if end else []


def _candidates(pid: int) -> list[str]:
    """Return the paths that may name the program, the most certain one first."""
    with suppress(OSError, OverflowError):
        return _executed(pid) + _started(pid)
    return _started(pid)


def _started(pid: int) -> list[str]:
    """Return the target of /proc/PID/exe and the first words of the command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(2 * PATH_MAX).split(b"\0")[:_ARGUMENTS]
        return [os.readlink(f"/proc/{pid}/exe"), *(os.fsdecode(word) for word in words)]
    except OSError:
        return []


def _is_named(path: str, comm: str) -> bool:
    name = path.rpartition("/")[2]
    return bool(name) and os.fsencode(name)[:COMM_MAX] == os.fsencode(comm) and len(path) <= PATH_MAX
