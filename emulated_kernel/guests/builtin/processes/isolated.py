"""IsolatedProcesses: the mount's clients alone, numbered as they come, whatever else happens on the host."""

from __future__ import annotations

from emulated_kernel.guests.common.host_processes import Fork, HostProcesses, parent_of

FIRST_PID = 1000
_ROOM = 1 << 21
"""Pids that are given before they begin anew; those of the program's own tasks are above."""


class IsolatedProcesses(HostProcesses):
    """What the guest sees follows from the clients' requests and their order.

    A client that another one forked is its child, forked when its first request comes; a process that asks
    for nothing isn't seen. A client's end is seen at the next request of anybody.
    """

    def __init__(self) -> None:
        super().__init__(sees_forks=False)
        self._numbers: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        """The other way round."""
        self._next = FIRST_PID

    def number(self, pid: int) -> int:
        """The next one that is free, if the process has none."""
        found = self._numbers.get(pid)
        if found is None:
            while self._next in self._pids:
                self._advance()
            found = self._numbers[pid] = self._next
            self._pids[found] = pid
            self._advance()
        return found

    def _advance(self) -> None:
        self._next = FIRST_PID + (self._next + 1 - FIRST_PID) % _ROOM

    def host_pid(self, number: int) -> int:
        return self._pids.get(number, number)

    def parent(self, number: int) -> int | None:
        """The client that forked this one, if it was one."""
        parent = parent_of(self.host_pid(number))
        return None if parent is None else self._numbers.get(parent)

    def forks(self) -> list[Fork]:
        """None are watched for."""
        return []

    def follow(self, pid: int) -> None:
        super().follow(self.host_pid(pid))

    def exited(self) -> list[int]:
        """Clients that have ended, in the order in which they came: the host tells them in any."""
        ended = sorted(self._numbers.pop(pid) for pid in super().exited() if pid in self._numbers)
        for number in ended:
            del self._pids[number]
        return ended

    def comm(self, pid: int) -> str | None:
        return super().comm(self.host_pid(pid))

    def pinned_to(self, pid: int) -> int | None:
        return super().pinned_to(self.host_pid(pid))
