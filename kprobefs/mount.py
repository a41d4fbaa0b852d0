"""Mount points: where ours are, whether they answer, and how to be rid of them."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import threading
from dataclasses import dataclass

from kprobefs.failure import Failure

FSTYPE = "fuse.kprobefs"
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
ANSWER_TIMEOUT = 2.0
"""Seconds after which a mount counts as hung."""
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)


@dataclass(frozen=True)
class MountPoint:
    """One line of /proc/self/mountinfo."""

    directory: str
    device: str
    """major:minor"""
    fstype: str
    source: str


def mount_points() -> list[MountPoint]:
    """All mounts of this mount namespace; a later one covers an earlier one on the same directory."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return [_parse(line) for line in lines]


def our_mounts() -> list[MountPoint]:
    """Mounts of kprobefs."""
    return [point for point in mount_points() if point.fstype == FSTYPE]


def mounted_on(directory: str) -> MountPoint | None:
    """What is mounted on a directory, on top; None where it is no mount point."""
    found = [point for point in mount_points() if point.directory == directory]
    return found[-1] if found else None


def is_dead(directory: str) -> bool:
    """Whether a FUSE mount's daemon is gone. Raises: Failure when the mount hangs."""
    outcome: list[int] = []

    def ask() -> None:
        try:
            # Not stat(2): the host kernel may know the attributes of a moment ago.
            os.statvfs(directory)
            outcome.append(0)
        except OSError as error:
            outcome.append(error.errno or 0)

    # A request to a hung daemon can't be interrupted: only a thread of its own may be lost in it.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT)
    if not outcome:
        raise Failure(f"{directory}: the mount doesn't answer: end its daemon, then umount -l {directory}")
    return outcome[0] in _DEAD


def detach(directory: str) -> None:
    """Take a mount out of the tree at once; open files stay until they are closed. Raises: Failure."""
    if os.geteuid() == 0:
        _umount2(directory)
    else:
        _fusermount(directory)


def prepare(directory: str) -> None:
    """Make sure that `directory` can be mounted on; what a killed daemon left there is removed.

    Raises: Failure.
    """
    point = mounted_on(directory)
    if point is not None and point.fstype == FSTYPE:
        if not is_dead(directory):
            raise Failure(f"{directory}: kprobefs is mounted there already (kprobefs umount {directory})")
        detach(directory)
    _check_directory(directory)
    _check_device()


def _check_directory(directory: str) -> None:
    try:
        if os.listdir(directory):
            raise Failure(f"{directory}: not empty; take an empty directory")
    except (FileNotFoundError, NotADirectoryError):
        raise Failure(f"{directory}: no such directory (mkdir -p {directory})") from None
    except OSError as error:
        raise Failure(f"{directory}: {error.strerror}; take a directory of yours") from None
    if os.geteuid() != 0 and not os.access(directory, os.W_OK):
        raise Failure(f"{directory}: not writable for you; take a directory of yours")


def _check_device() -> None:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise Failure("no /dev/fuse: modprobe fuse, or give the container --device /dev/fuse") from None
    except PermissionError:
        raise Failure("no access to /dev/fuse: chmod 666 /dev/fuse as root, or run as root") from None
    except OSError as error:
        raise Failure(f"/dev/fuse: {error.strerror}: modprobe fuse") from None


def _parse(line: str) -> MountPoint:
    left, _, right = line.partition(" - ")
    _, _, device, _, directory, *_ = left.split(" ")
    fstype, source, *_ = right.split(" ")
    return MountPoint(_unescape(directory), device, fstype, _unescape(source))


def _unescape(field: str) -> str:
    head, *rest = field.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def _umount2(directory: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(directory), MNT_DETACH | UMOUNT_NOFOLLOW) != 0:
        raise Failure(f"{directory}: can't unmount: {os.strerror(ctypes.get_errno())}")


def _fusermount(directory: str) -> None:
    try:
        result = subprocess.run(
            ["fusermount", "-u", "-z", "--", directory],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except FileNotFoundError:
        raise Failure("fusermount is missing: install it (Debian, Fedora: fuse3)") from None
    if result.returncode != 0:
        raise Failure(f"{directory}: can't unmount: {result.stderr.strip()}")
