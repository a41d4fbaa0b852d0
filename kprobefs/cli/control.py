"""Controls running daemons, for the commands `umount`, `reboot` and `status`."""

from __future__ import annotations

import os
import signal

from emulated_kernel.util.fast_dataclass import asdict, dataclass
from kprobefs.common import mountpoints
from kprobefs.common.daemon_registry import Daemon, Running, forget, known, running
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.common.mountpoints import MountState

END_TIMEOUT = 5.0
"""Maximum seconds that a daemon may take to end after SIGTERM."""


@dataclass(frozen=True)
class MountStatus:
    """A mount of kprobefs, its condition, and its daemon if the daemon is known."""

    directory: str
    condition: MountState
    daemon: Daemon | None
    """Record of the mount's daemon. None if the daemon is gone or is not in this user's registry."""

    @property
    def details(self) -> list[str]:
        """Texts about the daemon for the output: its pid, properties of its kernel, and its start time.

        The list is empty if the daemon is not known.
        """
        if self.daemon is None:
            return []
        return [
            f"pid {self.daemon.pid},",
            f"{self.daemon.arch},",
            f"{self.daemon.layout},",
            *([f"kernel {self.daemon.kernel},"] if self.daemon.kernel else []),
            *([self._kprobes(self.daemon.profile)] if self.daemon.profile else []),
            *([f"{self.daemon.traps} traps,"] if self.daemon.traps else []),
            *([f"state in {self.daemon.state},"] if self.daemon.state else []),
            self.daemon.started,
        ]

    @staticmethod
    def _kprobes(profile: str) -> str:
        """Return a text that names the implementation of the kprobes: the kernel, or kprobefs with `profile`.

        `profile`: value of Daemon.profile.
        """
        # Imported here: at the top of the file, the import would make `umount` load the profiles.
        from kprobefs.mount_options import KERNEL_KPROBES

        if profile == KERNEL_KPROBES:
            return "kprobes of the kernel,"
        return f"kprobes of kprobefs, profile: {profile},"

    def as_dict(self) -> dict[str, object]:
        """Return the status for JSON: an object with the keys directory, condition and daemon.

        The daemon is an object with the fields of its record, or None.
        """
        return {**asdict(self), "condition": self.condition.value}


def states(directory: str | None = None) -> list[MountStatus]:
    """Return the status of the mount on `directory`; None: of all mounts of kprobefs.

    This takes at most two seconds. Mounts whose daemons do not answer are included. A mount that ends in the
    meantime is left out.
    """
    directories: dict[str, str] = {}
    for point in mountpoints.our_mounts():
        # A bind mount of a mount is reported only if `directory` names it.
        if directory in (None, point.directory):
            directories.setdefault(point.device, point.directory)
    conditions = mountpoints.conditions(dict.fromkeys(directories.values()))
    left = {point.directory for point in mountpoints.our_mounts()}
    return [MountStatus(each, found, running(each)) for each, found in conditions.items() if each in left]


def unmount(directory: str, *, force: bool = False) -> None:
    """End the daemon that serves `directory`, or detach a stale mount.

    Afterwards, requests for files of the mount that are still open fail. `force`: kill a daemon that does not
    end after SIGTERM.
    Raises: CliError (not mounted, another user's mount, or the daemon does not end).
    """
    point = _mounted_on(directory)
    if point is None:
        raise mountpoints.not_mounted(directory)
    mountpoints.check_owner(point)
    with known(directory) as daemon:
        if daemon is not None:
            _terminate(daemon, force=force)
        is_left = daemon is None and mountpoints.condition(directory) is MountState.HUNG
    while _mounted_on(directory) is not None:
        mountpoints.detach(directory)
    forget(directory)
    if is_left:
        why = "its daemon hangs and is not in this user's registry; end it as the user who started it"
        raise CliError(f"{directory}: unmounted, but {why}", ExitStatus.HUNG)


def reboot(directory: str) -> list[str]:
    """Boot the kernel of the mount on `directory` again, and return messages about what was lost.

    Raises: CliError (not mounted, the daemon does not answer, or a distribution's kernel), OSError (the
    boot failed).
    """
    if _mounted_on(directory) is None:
        raise mountpoints.not_mounted(directory)
    mountpoints.check_answers(directory)
    from kprobefs.definitions.tracefs_files import control_root

    file = control_root(directory) / "machine" / "power"
    try:
        # Do not use O_CREAT, because mounts of distributions' kernels do not have the file.
        power = os.open(file, os.O_WRONLY)
    except FileNotFoundError:
        why = "a distribution's kernel can't be booted again; unmount it and mount it again"
        raise CliError(f"{directory}: {why}") from None
    try:
        os.write(power, b"reboot\n")
    finally:
        os.close(power)
    lines = file.read_text("utf-8", "surrogateescape").splitlines()
    return [line.removeprefix(mountpoints.LOST) for line in lines if line.startswith(mountpoints.LOST)]


def unmount_stale(directory: str) -> None:
    """Detach from `directory` each kprobefs mount whose daemon is gone. Also remove the daemon's record.

    Begin with the topmost mount, and stop at the first other mount.

    Raises: CliError (a mount cannot be detached).
    """
    while _mounted_on(directory) is not None and mountpoints.condition(directory) is MountState.STALE:
        mountpoints.detach(directory)
    forget(directory)


def _mounted_on(directory: str) -> mountpoints.MountPoint | None:
    """Return the topmost mount on a directory if it is a kprobefs mount, otherwise None."""
    point = mountpoints.mounted_on(directory)
    return point if point is not None and point.fstype == mountpoints.FSTYPE else None


def _terminate(daemon: Running, *, force: bool) -> None:
    """Send SIGTERM to a daemon, then SIGKILL if `force` is true and the daemon does not end.

    Raises: CliError (the daemon does not end).
    """
    daemon.send(signal.SIGTERM)
    if daemon.ends(END_TIMEOUT if not daemon.is_stopped else 0):
        return
    if force:
        daemon.send(signal.SIGKILL)
        if daemon.ends(END_TIMEOUT):
            return
    directory = daemon.daemon.directory
    pid = daemon.daemon.pid
    why = f"is stopped; run kill -CONT {pid}, or" if daemon.is_stopped else "does not end; run"
    raise CliError(f"{directory}: daemon {pid} {why} kprobefs umount --force {directory}", ExitStatus.HUNG)
