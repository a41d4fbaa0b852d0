"""Families: infers which client forked a process that ended before /proc could be read.

HostProcesses uses Families if the host's kernel does not report forks. Families reports a parent only if the
parent is certain.
"""

from __future__ import annotations

from collections import OrderedDict

from emulated_kernel.guests.common.proc import read
from emulated_kernel.util.fast_named_tuple import NamedTuple

_CLIENTS = 8
"""Maximum number of clients whose families are kept: the clients with the latest requests.

A family is a client's children and their page faults. Each look at the host's processes reads two files in
/proc for each of these clients.
"""


class _Family(NamedTuple):
    """A process, and the children that /proc shows for it at one moment."""

    faults: int
    """Number of minor page faults of all children that the process has waited for; each wait adds to it."""
    children: frozenset[str]
    """Pids of the children that the process still has."""


class Families:
    """Finds clients that have forked and waited for children between two looks at the host's processes."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Family | None] = OrderedDict()
        """Pid of a client -> its children and page faults, as last read; None if /proc did not show them."""

    def add(self, pid: int) -> None:
        """Record that a client makes a request.

        If the client is not followed yet, read its family (its children and their page faults). Read it again
        if the client had children when it was last read, because some of them may have ended. who_waited()
        leaves out a client that has lost children since the last read.
        """
        if pid not in self._known or _has_children(self._known[pid]):
            self._known[pid] = _family(pid)
            if len(self._known) > _CLIENTS:
                self._known.popitem(last=False)
        self._known.move_to_end(pid)

    def forget(self, pid: int) -> None:
        """Stop following a client that has ended."""
        self._known.pop(pid, None)

    def who_waited(self) -> list[int]:
        """Return the pids of clients that have forked a child and waited for its end since the last read.

        This method reads all families in /proc; add() reads some. A client is returned only if it still has
        all the children that the last read has shown.
        """
        before = dict(self._known)
        self._known.update((pid, _family(pid)) for pid in before)
        return [pid for pid, was in before.items() if was is not None and _has_waited(was, self._known[pid])]


def _has_children(family: _Family | None) -> bool:
    return family is not None and bool(family.children)


def _has_waited(was: _Family, now: _Family | None) -> bool:
    return now is not None and now.faults > was.faults and now.children >= was.children


def _family(pid: int) -> _Family | None:
    """Return a process's children and page faults; None if it is unreadable or has several threads.

    A process with several threads is left out, because /proc lists the children of each thread in a separate
    file.
    """
    stat = read(f"/proc/{pid}/stat")
    children = read(f"/proc/{pid}/task/{pid}/children")
    if stat is None or children is None:
        return None
    fields = stat.rpartition(")")[2].split()
    return _Family(int(fields[8]), frozenset(children.split())) if fields[17] == "1" else None
