"""Finds the paths of host processes' programs, which the guest's execve() gets as arguments.

Functions of this module must not be called with the control lock held. A read of a process's memory can
block.
"""

from __future__ import annotations

import os
from contextlib import suppress
from struct import Struct

from emulated_kernel.guests.common.process_memory import ProcessMemory

COMM_MAX = 15
PATH_MAX = 4095
_ENTRY = Struct("@LL")
_AT_EXECFN = 31
_AUXV_MAX = 4096


def program_of(pid: int, comm: str, memory: ProcessMemory | None) -> str | None:
    """Return the path of the program whose execve() gave the process the name `comm`.

    `memory` reads the path that was passed to execve(). Without `memory`, or if the read fails, the path is
    the target of /proc/PID/exe. Return None if neither path gave the name: the process may have set its own
    name, may have ended, or may run a script while its memory is unknown.
    """
    for path in (_passed(pid, memory) if memory is not None else None, _executed(pid)):
        if path is not None and _is_named(path, comm):
            return path
    return None


def _passed(pid: int, memory: ProcessMemory) -> str | None:
    """Return the path that was passed to execve() (AT_EXECFN), or None if it can't be read."""
    with suppress(OSError):
        with open(f"/proc/{pid}/auxv", "rb") as file:
            data = file.read(_AUXV_MAX)
        entries = dict(_ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size]))
        if _AT_EXECFN in entries:
            found = memory.read(f"/proc/{pid}/mem", [(entries[_AT_EXECFN], -PATH_MAX - 1)])
            return None if found is None else os.fsdecode(found[0])
    return None


def _executed(pid: int) -> str | None:
    """Return the target of /proc/PID/exe, or None if it can't be read."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/exe")
    return None


def _is_named(path: str, comm: str) -> bool:
    name = path.rpartition("/")[2]
    return bool(name) and os.fsencode(name)[:COMM_MAX] == os.fsencode(comm) and len(path) <= PATH_MAX
