"""UnmountWatcher: a process that unmounts if the daemon is killed, so that no dead mount remains."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from select import POLLIN, poll
from typing import NoReturn

from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.common import mountpoints
from kprobefs.common.daemon_registry import forget
from kprobefs.common.errors import fork

MESSAGE_SIZE = 64
"""Maximum size in bytes of the message to the child, which contains the device number of the mount."""


@dataclass(frozen=True)
class Orphaned:
    """A clean-up for UnmountWatcher's child to do when both the daemon and the daemon's parent have ended.

    The two may end in any order and by any signal.
    """

    parent: int
    """pidfd of the daemon's parent."""
    clean_up: Callable[[], None]
    """Function that does the clean-up. It is called even if the parent has already cleaned up."""


class UnmountWatcher:
    """A child process that unmounts if the daemon ends by a signal that the daemon cannot handle.

    If the constructor gets an `orphaned`, the child then also waits for the end of the daemon's parent, and
    calls `orphaned.clean_up()`. The child must hold no descriptor of /dev/fuse. Otherwise, requests would
    wait for an answer even after the daemon's end. So the object must be created before /dev/fuse is opened,
    and while the caller has no threads.
    Mirrors: fusermount's option auto_unmount (libfuse 3).
    """

    def __init__(self, directory: str, orphaned: Orphaned | None) -> None:
        """Fork the child. When the daemon has ended, the child unmounts `directory` and calls forget().

        `orphaned`: clean-up after the end of the daemon's parent; None: no clean-up. If it is None, end()
        kills the child, so the child does so only if the daemon was killed.
        Raises: CliError (no process can be created).
        """
        self._orphaned = orphaned
        daemon = os.pidfd_open(os.getpid())
        reader, self._writer = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            _watch(directory, reader, daemon, orphaned)
        os.close(reader)
        os.close(daemon)

    def leave(self, device: str) -> None:
        """Send the mount's device number to the child, which then starts a session of its own (setsid(2)).

        Call this when the mount exists. `device`: the device number, as major:minor.
        """
        os.write(self._writer, device.encode())

    def end(self) -> None:
        """Kill the child and wait for its end.

        If the constructor got an `orphaned`, do nothing: the child must still call `orphaned.clean_up()`.
        """
        if self._orphaned is not None:
            return
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._writer)


def _watch(directory: str, reader: int, daemon: int, orphaned: Orphaned | None) -> NoReturn:
    """Execute the child: wait for the daemon's end, unmount `directory`, remove its record, and exit.

    `reader`: pipe from which the mount's device number is read. `daemon`: pidfd of the daemon. `orphaned`:
    see UnmountWatcher.__init__().

    The directory is not looked up before the daemon has ended: at an automount point, the lookup would wait
    for the mount.
    """
    # Hazard: this is a forked copy of the daemon. No exception may unwind into the daemon's frames.
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        signal.set_wakeup_fd(-1)
        os.chdir("/")
        _close_all_but(reader, daemon, *([] if orphaned is None else [orphaned.parent]))
        device = os.read(reader, MESSAGE_SIZE).decode()
        if device:
            os.setsid()
        _wait_for_end(daemon)
        mountpoints.detach_dead(directory, device)
        forget(directory)
        if orphaned is not None:
            _wait_for_end(orphaned.parent)
            orphaned.clean_up()
    finally:
        os._exit(0)


def _wait_for_end(process: int) -> None:
    """Wait until the process of the pidfd `process` has ended. The process may be a zombie at that time."""
    waiting = poll()
    waiting.register(process, POLLIN)
    waiting.poll()


def _close_all_but(*kept: int) -> None:
    """Close the child's descriptors from 3 on except `kept`, and redirect 0, 1 and 2 to /dev/null.

    The child must not keep copies of the daemon's descriptors, because some of them lock the daemon's record,
    and others are ends of pipes.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(null, target)
    low = 3
    for each in sorted(kept):
        os.closerange(low, each)
        low = each + 1
    os.closerange(low, 1 << 20)
