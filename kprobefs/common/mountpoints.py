"""Mount points: where ours are, whether they answer, and how to be rid of them."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from select import POLLIN, poll
from typing import NoReturn

from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.common.errors import CliError, ExitStatus

FSTYPE = "fuse.kprobefs"
STATE_LINK = ".kprobefs"
"""A symbolic link in each mount's root that no listing shows; its target is the mount's condition."""
FUSE_CONF = "/etc/fuse.conf"
ALLOWS_OTHER = "user_allow_other"
"""Its line that lets ordinary users take --allow-other. Mirrors: mount.fuse(8)."""
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
MAX_LINKS = 40
ANSWER_TIMEOUT = 1.2
"""Seconds after which a mount counts as hung."""
CONTROL_TIMEOUT = 0.5
"""Seconds more after which one that answers counts as busy: something keeps its kernel."""
REAP_ATTEMPTS = 10
REAP_PAUSE = 0.005
_STALE = (errno.ENOTCONN, errno.ECONNABORTED)


class MountState(Enum):
    """What a mount of ours is found to be."""

    SERVING = "serving"
    BUSY = "busy"
    """Its daemon answers, and its kernel has been at something for a while."""
    PANICKED = "panicked"
    """Its kernel has stopped for good; the files still answer."""
    HUNG = "hung"
    """Its daemon doesn't answer."""
    STALE = "stale"
    """Its daemon is gone."""
    MOUNTED = "mounted"
    """Another user's, which lets nobody else ask."""

    @property
    def status(self) -> ExitStatus:
        """Exit status of `kprobefs status`."""
        return ExitStatus.OK if self in (MountState.SERVING, MountState.MOUNTED) else ExitStatus[self.name]


@dataclass(frozen=True)
class MountPoint:
    """One line of /proc/self/mountinfo."""

    directory: str
    device: str
    """major:minor"""
    fstype: str
    source: str
    owner: int | None
    """Who mounted it, where that is said: the user_id of FUSE mounts."""


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


def resolve(path: str) -> str:
    """Absolute and without symbolic links; a mount of ours is asked for nothing: its daemon may hang.

    Raises: CliError.
    """
    if not path:
        raise CliError("directory: its name is empty; give a path", ExitStatus.USAGE)
    ours = [point.directory for point in our_mounts()]
    try:
        found = "/" if path.startswith("/") else os.getcwd()
    except FileNotFoundError:
        raise CliError("working directory: it is gone; give an absolute path") from None
    pending = path.split("/")[::-1]
    links = 0
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
        if name == "..":
            found = os.path.dirname(found)
            continue
        found = os.path.join(found, name)
        if any(_is_in(found, directory) for directory in ours):
            continue
        try:
            target = os.readlink(found)
        except OSError:
            continue
        links += 1
        if links > MAX_LINKS:
            raise CliError(f"{path}: {os.strerror(errno.ELOOP)}")
        pending += target.split("/")[::-1]
        found = "/" if target.startswith("/") else os.path.dirname(found)
    return found


def is_inside(path: str, directory: str) -> bool:
    """Whether a path lies in a mount of ours, or in the one to be on `directory`. Raises: CliError."""
    found = resolve(path)
    return any(_is_in(found, each) for each in (directory, *(point.directory for point in our_mounts())))


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory.rstrip('/')}/")


def conditions(directories: Iterable[str]) -> dict[str, MountState]:
    """What mounts of ours are, all asked at the same time, in less than two seconds."""
    # A request that has reached a hung daemon can't be interrupted: only processes of their own wait for it.
    asked = {directory: _Question(directory) for directory in directories}
    start = time.monotonic()
    return {directory: question.answer(start) for directory, question in asked.items()}


def condition(directory: str) -> MountState:
    """What a mount of ours is."""
    return conditions([directory])[directory]


def check_answers(directory: str) -> None:
    """Raises: CliError (the daemon of a mount of ours hangs or is gone)."""
    found = condition(directory)
    if found in (MountState.STALE, MountState.HUNG):
        raise unanswered(directory, found)


def unanswered(directory: str, found: MountState) -> CliError:
    """What to say of a mount of ours whose daemon hangs or is gone."""
    if found is MountState.STALE:
        return CliError(f"{directory}: its daemon is gone; run kprobefs umount {directory}", found.status)
    from kprobefs.common.daemon_registry import known

    with known(directory) as daemon:
        stopped = daemon.daemon.pid if daemon is not None and daemon.is_stopped else None
    why = f"is stopped; run kill -CONT {stopped}, or" if stopped else "does not answer; run"
    return CliError(f"{directory}: its daemon {why} kprobefs umount --force {directory}", found.status)


class _Question:
    """A process that asks a mount how it is."""

    def __init__(self, directory: str) -> None:
        self._pipe, writer = os.pipe()
        self._told = b""
        self._child = os.fork()
        if self._child == 0:
            _ask(directory, writer)
        os.close(writer)
        self._readable = poll()
        self._readable.register(self._pipe, POLLIN)

    def answer(self, start: float) -> MountState:
        """What comes of it, waiting no longer than the time-outs from `start`."""
        try:
            found = self._line(start + ANSWER_TIMEOUT)
            if not found:
                return MountState.HUNG
            number = int(found)
            if number in _STALE:
                return MountState.STALE
            if number:
                return MountState.MOUNTED
            told = self._line(start + ANSWER_TIMEOUT + CONTROL_TIMEOUT)
            if not told:
                return MountState.BUSY
            return MountState.PANICKED if told == MountState.PANICKED.value else MountState.SERVING
        finally:
            os.close(self._pipe)
            os.kill(self._child, signal.SIGKILL)
            # One that can't be interrupted is left to init.
            for _ in range(REAP_ATTEMPTS):
                if os.waitpid(self._child, os.WNOHANG) != (0, 0):
                    break
                time.sleep(REAP_PAUSE)

    def _line(self, deadline: float) -> str:
        """The next line that it tells; "" where none comes in time."""
        while b"\n" not in self._told:
            if not self._readable.poll(1000 * max(0, deadline - time.monotonic())):
                return ""
            data = os.read(self._pipe, 256)
            if not data:
                return ""
            self._told += data
        line, _, self._told = self._told.partition(b"\n")
        return line.decode("ascii", "replace")


def _ask(directory: str, writer: int) -> NoReturn:
    """Write the errno of a request that the daemon answers alone, then the state, which needs its kernel."""
    try:
        # Whoever waits for the end of our parent's output must not wait for us.
        os.closerange(0, writer)
        os.closerange(writer + 1, 1 << 20)
        try:
            # Not stat(2): the host kernel may know the attributes of a moment ago.
            os.statvfs(directory)
        except OSError as error:
            os.write(writer, f"{error.errno}\n".encode())
            os._exit(0)
        os.write(writer, b"0\n")
        try:
            told = os.readlink(os.path.join(directory, STATE_LINK))
        except OSError:
            told = MountState.SERVING.value
        os.write(writer, f"{told}\n".encode())
    finally:
        os._exit(0)


def detach(directory: str) -> None:
    """Take a mount out of the tree at once; open files stay until they are closed. Raises: CliError."""
    if os.geteuid() == 0:
        _umount2(directory)
    else:
        _fusermount(directory)


def check_owner(point: MountPoint) -> None:
    """Raises: CliError (only somebody else may unmount it)."""
    if os.geteuid() in (0, point.owner) or point.owner is None:
        return
    import pwd

    try:
        name = pwd.getpwuid(point.owner).pw_name
    except KeyError:
        name = f"user {point.owner}"
    others = "" if point.owner == 0 else f"{name} or "
    raise CliError(f"{point.directory}: mounted by {name}; only {others}root can unmount it")


@contextmanager
def prepared(directory: str, *, make: bool = False, allow_other: bool = False) -> Iterator[None]:
    """See that `directory` can be mounted on; what a killed daemon of ours left there is removed.

    `make`: a directory that isn't there is made, and goes again where what follows ends in an exception.
    `allow_other`: others shall get in. Raises: CliError.
    """
    for point in our_mounts():
        if point.directory != directory and _is_in(directory, point.directory):
            raise CliError(f"{directory}: inside a mount of kprobefs, {point.directory}; mount elsewhere")
    found = mounted_on(directory)
    if found is not None and found.fstype == FSTYPE:
        _remove_stale(found)
    made: list[str] = []
    try:
        if make:
            _make(directory, made)
        _check_directory(directory)
        _check_device()
        if allow_other and os.geteuid() != 0:
            _check_configuration()
        yield
    except BaseException:
        for each in reversed(made):
            # Somebody may have put something there.
            with suppress(OSError):
                os.rmdir(each)
        raise


def _make(directory: str, made: list[str]) -> None:
    """Make what of the path isn't there, and note it in `made`. Raises: CliError."""
    missing = []
    place = directory
    while not os.path.lexists(place):
        missing.append(place)
        place = os.path.dirname(place)
    for each in reversed(missing):
        try:
            os.mkdir(each)
        except OSError as error:
            raise CliError(f"{directory}: can't create it: {error.strerror}") from None
        made.append(each)


def _remove_stale(point: MountPoint) -> None:
    directory = point.directory
    found = condition(point.directory)
    if found is MountState.HUNG:
        raise CliError(
            f"{directory}: a kprobefs that hangs is mounted there; run kprobefs umount --force {directory}",
            ExitStatus.HUNG,
        )
    if found is not MountState.STALE:
        raise CliError(f"{directory}: kprobefs is mounted there already; run kprobefs umount {directory}")
    check_owner(point)
    detach(directory)


def _check_directory(directory: str) -> None:
    try:
        if os.listdir(directory):
            raise CliError(f"{directory}: not empty; take an empty directory")
    except FileNotFoundError:
        raise CliError(f"{directory}: no such directory; run mkdir -p {directory}, or add --mkdir") from None
    except NotADirectoryError:
        raise CliError(f"{directory}: not a directory; take an empty directory") from None
    except OSError as error:
        raise CliError(f"{directory}: {error.strerror}; take a directory of yours") from None
    if os.geteuid() != 0 and not os.access(directory, os.W_OK):
        raise CliError(f"{directory}: not writable for you; take a directory of yours")


def _check_device() -> None:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise CliError(
            "/dev/fuse: it does not exist; run modprobe fuse, or give the container --device /dev/fuse"
        ) from None
    except PermissionError:
        raise CliError("/dev/fuse: no access; run chmod 666 /dev/fuse as root, or run as root") from None
    except OSError as error:
        raise CliError(f"/dev/fuse: {error.strerror}; run modprobe fuse") from None


def _check_configuration() -> None:
    # One that can't be read is left to fusermount, which may.
    with suppress(PermissionError):
        try:
            with open(FUSE_CONF, encoding="utf-8", errors="replace") as lines:
                is_allowed = any(line.partition("#")[0].strip() == ALLOWS_OTHER for line in lines)
        except FileNotFoundError:
            is_allowed = False
        if not is_allowed:
            why = f"{FUSE_CONF} has no line {ALLOWS_OTHER}; add it as root"
            raise CliError(f"--allow-other: {why}", ExitStatus.USAGE)


def _parse(line: str) -> MountPoint:
    left, _, right = line.rstrip("\n").partition(" - ")
    _, _, device, _, directory, *_ = left.split(" ")
    fstype, source, options, *_ = [*right.split(" "), ""]
    users = [option[8:] for option in options.split(",") if option.startswith("user_id=")]
    owner = int(users[0]) if users else None
    return MountPoint(_unescape(directory), device, fstype, _unescape(source), owner)


def _unescape(field: str) -> str:
    head, *rest = field.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def _umount2(directory: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(directory), MNT_DETACH | UMOUNT_NOFOLLOW) != 0:
        raise CliError(f"{directory}: can't unmount: {os.strerror(ctypes.get_errno())}")


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
        raise CliError("fusermount: program not found; install fuse3") from None
    if result.returncode != 0:
        raise CliError(f"{directory}: can't unmount: {result.stderr.strip()}")
