"""Who forked a process that has ended unseen, on a host whose kernel doesn't tell: only what is sure."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from emulated_kernel.guests.common.proc import read

_CLIENTS = 8
"""The latest ones are followed, each for two files of /proc."""


class _Family(NamedTuple):
    """What /proc tells of a process and its children."""

    faults: int
    """Minor page faults of all children that it has waited for: they grow with each."""
    children: frozenset[str]
    """Pids of those that it still has."""


class Families:
    """What clients have forked and waited for between two looks at the host's processes."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Family | None] = OrderedDict()
        """By client, as of the last look or later; None: nothing is known of that moment."""

    def add(self, pid: int) -> None:
        """A client makes a request.

        One that had children at the last look may have waited for them: later waits are for others.
        """
        if pid not in self._known or _has_children(self._known[pid]):
            self._known[pid] = _family(pid)
            if len(self._known) > _CLIENTS:
                self._known.popitem(last=False)
        self._known.move_to_end(pid)

    def forget(self, pid: int) -> None:
        """It has ended."""
        self._known.pop(pid, None)

    def who_waited(self) -> list[int]:
        """The clients that have waited for children since the last look, and have all that they had then.

        So those children were forked since.
        """
        before = dict(self._known)
        self._known.update((pid, _family(pid)) for pid in before)
        return [pid for pid, was in before.items() if was is not None and _has_waited(was, self._known[pid])]


def _has_children(family: _Family | None) -> bool:
    return family is not None and bool(family.children)


def _has_waited(was: _Family, now: _Family | None) -> bool:
    return now is not None and now.faults > was.faults and now.children >= was.children


def _family(pid: int) -> _Family | None:
    """None where nobody can tell: other threads' children stand in other files."""
    stat = read(f"/proc/{pid}/stat")
    children = read(f"/proc/{pid}/task/{pid}/children")
    if stat is None or children is None:
        return None
    fields = stat.rpartition(")")[2].split()
    return _Family(int(fields[8]), frozenset(children.split())) if fields[17] == "1" else None
