"""What is said to daemons that run already: umount and status."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from kprobefs import mount
from kprobefs.failure import Exit, Failure
from kprobefs.registry import Daemon, running

END_TIMEOUT = 5.0
"""Seconds that a daemon may take to unmount by itself."""
POLL_INTERVAL = 0.01


@dataclass(frozen=True)
class State:
    """A mount of ours, and its daemon where one is known."""

    directory: str
    condition: str
    """"serving", "dead", "hung", or "mounted": by a daemon that isn't in this user's registry."""
    daemon: Daemon | None

    @property
    def serving(self) -> bool:
        """Whether a daemon is there."""
        return self.condition in ("serving", "mounted")

    @property
    def details(self) -> list[str]:
        """Words about the daemon, for people."""
        if self.daemon is None:
            return []
        return [
            f"pid {self.daemon.pid},",
            f"{self.daemon.arch},",
            f"{self.daemon.layout},",
            self.daemon.started,
        ]

    def as_dict(self) -> dict[str, object]:
        """For machines: directory, condition, daemon (null or its record)."""
        return asdict(self)


def states(directory: str | None = None) -> list[State]:
    """All mounts of ours, or the one on `directory`."""
    directories = dict.fromkeys(point.directory for point in mount.our_mounts())
    return [_state(found) for found in directories if directory in (None, found)]


def unmount(directory: str) -> None:
    """End the daemon that serves `directory`; what is left of a dead one is detached.

    Files still open there fail from now on. Raises: Failure.
    """
    if not states(directory):
        raise Failure(f"{directory}: kprobefs isn't mounted there", Exit.NOT_MOUNTED)
    daemon = running(directory)
    if daemon is not None:
        _terminate(daemon)
    while states(directory):
        mount.detach(directory)


def _state(directory: str) -> State:
    daemon = running(directory)
    if daemon is not None:
        return State(directory, "serving", daemon)
    try:
        return State(directory, "dead" if mount.is_dead(directory) else "mounted", None)
    except Failure:
        return State(directory, "hung", None)


def _terminate(daemon: Daemon) -> None:
    try:
        os.kill(daemon.pid, signal.SIGTERM)
    except PermissionError:
        raise Failure(f"{daemon.directory}: belongs to another user's daemon, pid {daemon.pid}") from None
    except ProcessLookupError:
        return
    deadline = time.monotonic() + END_TIMEOUT
    while running(daemon.directory) is not None and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
    with suppress(Failure):
        if mount.mounted_on(daemon.directory) is not None and running(daemon.directory) is not None:
            mount.detach(daemon.directory)
