"""Who else is in the daemon's mount namespace: a mount that nobody can reach any more needs no daemon."""

from __future__ import annotations

import os
from contextlib import suppress

from kprobefs.common.daemon_registry import parent_of, running
from kprobefs.common.errors import CliError
from kprobefs.common.mountpoints import our_mounts

INTERVAL = 30.0
"""Seconds between two looks at all processes."""
CAP_SYS_PTRACE = 19


class NamespaceMembers:
    """The other processes of this mount namespace, but for daemons that keep a mount for each other alone.

    In the host's own namespace there are always some.
    """

    def __init__(self) -> None:
        self._own = {os.getpid()}
        self._namespace = os.readlink("/proc/self/ns/mnt")
        self._had_some = False
        self.interval = INTERVAL if _may_look_at_all() and not self._is_of_host() else None
        """Seconds between two looks; None where none is needed."""
        if self.interval is not None:
            self._had_some = self._has_some()

    def _is_of_host(self) -> bool:
        try:
            return os.readlink("/proc/1/ns/mnt") == self._namespace
        except OSError:
            return False

    def add(self, pid: int) -> None:
        """A process of ours that doesn't count."""
        self._own.add(pid)

    def have_gone(self) -> bool:
        """Whether there were others, and are none now."""
        if self._has_some():
            self._had_some = True
            return False
        return self._had_some

    def _has_some(self) -> bool:
        daemons = _daemons()
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) not in self._own:
                # One has ended, or is of a user namespace above.
                with suppress(OSError):
                    if os.readlink(f"/proc/{name}/ns/mnt") != self._namespace:
                        continue
                    if daemons.isdisjoint((int(name), parent_of(int(name)))):
                        return True
        return False


def _daemons() -> set[int]:
    """Pids of those that serve the mounts of this namespace, as far as they can be found now."""
    try:
        found = [running(point.directory) for point in our_mounts()]
    except (OSError, CliError):
        return set()
    return {daemon.pid for daemon in found if daemon is not None}


def _may_look_at_all() -> bool:
    """Whether each process of the mount namespace is seen; true of who has made that namespace."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> CAP_SYS_PTRACE & 1)
