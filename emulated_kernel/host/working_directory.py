"""What a host process passes to chdir(2): FUSE shows that a directory is entered, not by which name."""

from __future__ import annotations

import os
from typing import NamedTuple

from emulated_kernel.abi import PAGE_SIZE


class _Numbers(NamedTuple):
    chdir: int
    fchdir: int


_GENERIC = _Numbers(49, 50)
_BY_MACHINE = {"x86_64": _Numbers(80, 81)}
_NUMBERS = _BY_MACHINE.get(os.uname().machine, _GENERIC)


def chdir_argument(pid: int) -> str | None:
    """The path that a process, or thread, that waits for us in chdir(2) named.

    Empty for fchdir(2), or where it can't be read. None where it is in another system call, or nobody can say
    in which: that takes the right to trace it.
    """
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            fields = file.read().split()
    except OSError:
        return None
    if fields[0] == str(_NUMBERS.fchdir):
        return ""
    if fields[0] != str(_NUMBERS.chdir):
        return None
    return _string_of(pid, int(fields[1], 16))


def _string_of(pid: int, address: int) -> str:
    """A C string of at most two pages."""
    data = b""
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        for _ in range(2):
            # The page behind it need not be there.
            data += os.pread(memory, PAGE_SIZE - (address + len(data)) % PAGE_SIZE, address + len(data))
            if b"\0" in data:
                return os.fsdecode(data.split(b"\0")[0])
    except OSError:
        pass
    finally:
        os.close(memory)
    return ""
