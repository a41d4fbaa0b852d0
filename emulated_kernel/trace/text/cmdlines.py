"""saved_cmdlines: a cache of the names and thread groups of traced tasks."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from struct import Struct

from emulated_kernel.util.errors import KernelError

PID_MAX_DEFAULT = 0x8000
"""Number of pids that the cache distinguishes: only the low 15 bits of a pid select an entry."""
DEFAULT_SIZE = 6552
"""Number of tasks that the cache can hold at boot."""
_HEADER = 4 * (PID_MAX_DEFAULT + 1) + 20
"""Size in bytes of Linux's struct saved_cmdlines_buffer without the names and pids of the tasks."""
_ELEMENT = 20
"""Size in bytes of a task's name and pid in Linux's buffer."""
_PAGE = 4096
_SAVED_CMDLINE = Struct("<i16s")
SAVED_CMDLINES_SIZE = 1 << 20
"""Size in bytes of the memory for SavedCmdlines.keep_in(); sufficient for the largest possible cache."""
UNKNOWN_COMM = "<...>"
"""Name shown for tasks that are not in the cache."""
_NO_PID = -1


class TaskNames(ABC):
    """Interface to the names and thread groups of the tasks that made records."""

    @abstractmethod
    def find(self, pid: int) -> str:
        """Return the name of the task `pid`; "<...>" if it is unknown."""

    @abstractmethod
    def find_tgid(self, pid: int) -> int:
        """Return the thread group id of the task `pid`; 0 if it is unknown."""


class SavedCmdlines(TaskNames):
    """Cache of task names: pid -> name, for a fixed number of tasks.

    If the cache is full, a new entry replaces the oldest one. Pids with the same low 15 bits share an entry.
    Mirrors: kernel/trace/trace.c:trace_save_cmdline, trace_find_cmdline (v6.1).
    """

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        self._tgids: dict[int, int] = {}
        self.recorders = 0
        """Number of enabled events in all trace arrays: while it is not 0, names are saved.

        Mirrors: trace_sched_switch.c:sched_cmdline_ref.
        """
        self._kept: memoryview | None = None
        self.changes = 0
        """Number of changes to the entries so far. While it is unchanged, the entries are unchanged."""
        self._clear(size)

    def _clear(self, size: int) -> None:
        self.changes += 1
        self.size = size
        """Number of tasks that the cache can hold (file saved_cmdlines_size)."""
        self._index = 0
        self._slots: dict[int, int] = {}
        self._pids = [_NO_PID] * size
        self._comms = [""] * size
        if self._kept is not None:
            self._kept[:] = bytes(len(self._kept))

    def resize(self, size: int) -> None:
        """Forget all names, and set the size of the cache to at least `size` tasks.

        The size becomes the number of tasks that fit into the pages that Linux would allocate.
        Raises: KernelError EINVAL (0, or more than PID_MAX_DEFAULT).
        Mirrors: kernel/trace/trace.c:tracing_saved_cmdlines_size_write (v6.1).
        """
        if not 0 < size <= PID_MAX_DEFAULT:
            raise KernelError(errno.EINVAL, f"saved_cmdlines_size: {size} is not in 1..{PID_MAX_DEFAULT}")
        self._clear(_fitting(size))

    def take_over(self, other: SavedCmdlines) -> None:
        """Replace the content of this cache by that of `other`."""
        kept = self._kept
        self._kept = None
        changes = self.changes + 1
        self.__dict__.update(
            other.__dict__ | {"recorders": self.recorders, "_kept": None, "changes": changes}
        )
        if kept is not None:
            self.keep_in(kept)

    def save(self, pid: int, comm: str) -> None:
        """Store `comm` as the name of the task `pid`. Do nothing for the idle task, whose pid is 0."""
        if not pid:
            return
        key = pid & (PID_MAX_DEFAULT - 1)
        slot = self._slots.get(key)
        if slot is None:
            slot = (self._index + 1) % self.size
            self._index = slot
            if (old := self._pids[slot]) != _NO_PID:
                self._slots.pop(old & (PID_MAX_DEFAULT - 1), None)
            self._slots[key] = slot
        if self._pids[slot] == pid and self._comms[slot] == comm:
            return
        self.changes += 1
        if self._kept is not None:
            self._keep(slot, pid, comm)
        self._pids[slot] = pid
        self._comms[slot] = comm

    def keep_in(self, memory: memoryview) -> None:
        """Copy the names to `memory` (SAVED_CMDLINES_SIZE bytes), now and at every change.

        After the daemon has ended, kept() restores the names from `memory`.
        """
        self._kept = memory
        memory[:] = bytes(len(memory))
        for slot, (pid, comm) in enumerate(zip(self._pids, self._comms, strict=True)):
            if pid != _NO_PID:
                self._keep(slot, pid, comm)

    def _keep(self, slot: int, pid: int, comm: str) -> None:
        assert self._kept is not None
        _SAVED_CMDLINE.pack_into(
            self._kept, slot * _SAVED_CMDLINE.size, pid, comm.encode("utf-8", "surrogateescape")
        )

    @classmethod
    def kept(cls, memory: bytes) -> SavedCmdlines:
        """Return a cache with the names that keep_in() has written to `memory`."""
        found = cls(PID_MAX_DEFAULT)
        for pid, comm in _SAVED_CMDLINE.iter_unpack(
            memory[: len(memory) // _SAVED_CMDLINE.size * _SAVED_CMDLINE.size]
        ):
            if pid > 0:
                found.save(pid, comm.split(b"\0", 1)[0].decode("utf-8", "surrogateescape"))
        return found

    def find(self, pid: int) -> str:
        if not pid:
            return "<idle>"
        if pid < 0:
            return "<XXX>"
        slot = self._slots.get(pid & (PID_MAX_DEFAULT - 1))
        return UNKNOWN_COMM if slot is None or self._pids[slot] != pid else self._comms[slot]

    def save_tgid(self, pid: int, tgid: int) -> None:
        """Store the thread group id of the task `pid`."""
        if pid:
            self._tgids[pid] = tgid

    def find_tgid(self, pid: int) -> int:
        return self._tgids.get(pid, 0)

    def records(self) -> list[str]:
        """Return the lines of the file saved_cmdlines: pid and name."""
        entries = zip(self._pids, self._comms, strict=True)
        return [f"{pid} {comm}\n" for pid, comm in entries if pid != _NO_PID]

    def tgid_records(self) -> list[str]:
        """Return the lines of the file saved_tgids: pid and thread group id."""
        return [f"{pid} {tgid}\n" for pid, tgid in sorted(self._tgids.items()) if tgid]


def _fitting(size: int) -> int:
    """Return the number of tasks that fit into the pages that Linux allocates for `size` tasks.

    Mirrors: kernel/trace/trace.c:allocate_cmdlines_buffer (v6.1).
    """
    pages = -(-(_HEADER + size * _ELEMENT) // _PAGE)
    allocated = _PAGE << (pages - 1).bit_length()
    return (allocated - _HEADER) // _ELEMENT
