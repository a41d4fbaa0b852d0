"""IsolatedProcesses: watches only the mount's clients, and assigns pids in the order of their requests."""

from __future__ import annotations

from emulated_kernel.guests.common.host_processes import Fork, HostProcesses, parent_of

FIRST_PID = 1000
_PIDS = 1 << 21
"""Number of pids that are assigned before pids repeat; kprobefs's own tasks have higher pids."""


class IsolatedProcesses(HostProcesses):
    """Watches only the mount's clients, so that the guest depends only on the clients' requests.

    If a client was forked by another client, the guest sees the fork at the first request of the child. A
    process that makes no request is not seen. A client's end is seen at the next request of any client.
    """

    def __init__(self) -> None:
        super().__init__(sees_forks=False)
        self._numbers: dict[int, int] = {}
        """Pid on the host -> pid in the guest."""
        self._pids: dict[int, int] = {}
        """Pid in the guest -> pid on the host."""
        self._next = FIRST_PID

    def number(self, pid: int) -> int:
        """Return the guest's pid of a host process; assign the next free pid if the process has none."""
        found = self._numbers.get(pid)
        if found is None:
            while self._next in self._pids:
                self._advance()
            found = self._next
            self._numbers[pid] = found
            self._pids[found] = pid
            self._advance()
        return found

    def _advance(self) -> None:
        self._next = FIRST_PID + (self._next + 1 - FIRST_PID) % _PIDS

    def host_pid(self, number: int) -> int:
        return self._pids.get(number, number)

    def parent(self, number: int) -> int | None:
        """Return the guest's pid of the parent of a client; None if the parent is no client.

        `number`: the guest's pid of the client.
        """
        parent = parent_of(self.host_pid(number))
        return None if parent is None else self._numbers.get(parent)

    def forks(self) -> list[Fork]:
        """Return [], since forks on the host are not watched."""
        return []

    def follow(self, pid: int) -> None:
        super().follow(self.host_pid(pid))

    def exited(self) -> list[int]:
        """Return the guest's pids of clients that have ended since the last call, in ascending order.

        The list is sorted because the host reports ends in any order, and the guest must not depend on that
        order.
        """
        ended = sorted(self._numbers.pop(pid) for pid in super().exited() if pid in self._numbers)
        for number in ended:
            del self._pids[number]
        return ended

    def has_ended(self, pid: int) -> bool:
        host = self.host_pid(pid)
        if not super().has_ended(host):
            return False
        del self._numbers[host]
        del self._pids[pid]
        return True

    def comm(self, pid: int) -> str | None:
        return super().comm(self.host_pid(pid))

    def pinned_to(self, pid: int) -> int | None:
        return super().pinned_to(self.host_pid(pid))
