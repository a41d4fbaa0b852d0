"""NamespaceMembers: finds out when the last other process has left the daemon's mount namespace."""

from __future__ import annotations

import os
from contextlib import suppress

from kprobefs.common.daemon_registry import parent_of, running
from kprobefs.common.errors import CliError
from kprobefs.common.mountpoints import our_mounts

INTERVAL = 30.0
"""Seconds between two scans of all processes."""
CAP_SYS_PTRACE = 19
"""Number of the capability CAP_SYS_PTRACE. Mirrors: include/uapi/linux/capability.h."""


class NamespaceMembers:
    """Checks whether other processes are in the daemon's mount namespace.

    Daemons of kprobefs mounts and their children are ignored, because two daemons in one namespace would
    keep each other alive. The host's initial namespace is not scanned, because it always has other
    processes.
    """

    def __init__(self) -> None:
        self._own = {os.getpid()}
        self._namespace = os.readlink("/proc/self/ns/mnt")
        self._had_some = False
        self.interval = INTERVAL if _may_look_at_all() and not self._is_of_host() else None
        """Seconds between two scans, or None if no scan is needed or possible."""
        if self.interval is not None:
            self._had_some = self._has_some()

    def _is_of_host(self) -> bool:
        try:
            return os.readlink("/proc/1/ns/mnt") == self._namespace
        except OSError:
            return False

    def add(self, pid: int) -> None:
        """Ignore the process `pid` in scans, because it is one of the daemon's own."""
        self._own.add(pid)

    def all_exited(self) -> bool:
        """Scan all processes.

        Return True if an earlier scan has found other processes and this scan finds none.
        """
        if self._has_some():
            self._had_some = True
            return False
        return self._had_some

    def _has_some(self) -> bool:
        daemons = _daemons()
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) not in self._own:
                # The process has exited, or it belongs to a parent user namespace.
                with suppress(OSError):
                    if os.readlink(f"/proc/{name}/ns/mnt") != self._namespace:
                        continue
                    if daemons.isdisjoint((int(name), parent_of(int(name)))):
                        return True
        return False


def _daemons() -> set[int]:
    """Return the pids of the daemons that serve kprobefs mounts in this namespace.

    If the list of mounts cannot be read, return an empty set.
    """
    try:
        found = [running(point.directory) for point in our_mounts()]
    except (OSError, CliError):
        return set()
    return {daemon.pid for daemon in found if daemon is not None}


def _may_look_at_all() -> bool:
    """Return True if this process may read the namespace links of all processes in its mount namespace.

    The creator of a namespace may read the links, because it has CAP_SYS_PTRACE in the namespace.
    """
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> CAP_SYS_PTRACE & 1)
