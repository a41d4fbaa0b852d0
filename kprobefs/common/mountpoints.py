"""Mount points of kprobefs: lists them, checks whether the mounts' daemons answer, and unmounts them."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from select import POLLIN, poll

from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.common.errors import CliError, ExitStatus, fork

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

FSTYPE = "fuse.kprobefs"
STATE_LINK = ".kprobefs"
"""Name of a hidden symbolic link in the root of each mount. Its target is a word for the mount's state."""
LOST = "lost "
"""Start of each line of machine/power about something that the last reboot has lost.

The reboot command prints these lines.
"""
FUSE_CONF = "/etc/fuse.conf"
ALLOWS_OTHER = "user_allow_other"
"""Line of /etc/fuse.conf that permits --allow-other to ordinary users. Mirrors: mount.fuse(8)."""
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
MAX_LINKS = 40
ANSWER_TIMEOUT = 1.2
"""Seconds that a mount's daemon may take to answer before the mount is reported as hung."""
CONTROL_TIMEOUT = 0.5
"""Further seconds that a mount's kernel may take to answer before the mount is reported as busy."""
CPU_TIMEOUT = 5.0
"""Maximum further seconds that a daemon may take to answer if it or the asking process waits for a CPU."""
REAP_ATTEMPTS = 10
REAP_PAUSE = 0.005
_SHOWN = 3
"""Maximum number of mounts that an error names."""
STALE = (errno.ENOTCONN, errno.ECONNABORTED)
"""Errors of requests to a mount whose daemon is gone."""


class MountState(Enum):
    """State of a mount of kprobefs."""

    SERVING = "serving"
    BUSY = "busy"
    """The mount's daemon answers, but its kernel is busy with a long request."""
    DEBUGGED = "debugged"
    """gdb has stopped the mount's kernel through machine/gdb. Only files of machine/ are served."""
    PANICKED = "panicked"
    """The mount's kernel has stopped for good; control files still answer."""
    HUNG = "hung"
    """The mount's daemon does not answer."""
    STALE = "stale"
    """The mount's daemon is gone."""
    MOUNTED = "mounted"
    """The mount belongs to another user, and this user cannot enter it, so its condition is unknown."""

    @property
    def status(self) -> ExitStatus:
        """Exit status of `kprobefs status` for a mount in this state."""
        if self is MountState.DEBUGGED:
            return ExitStatus.BUSY
        return ExitStatus.OK if self in (MountState.SERVING, MountState.MOUNTED) else ExitStatus[self.name]


@dataclass(frozen=True)
class MountPoint:
    """One line of /proc/self/mountinfo."""

    number: int
    """Mount id. After the unmount, a later mount may get the same id."""
    directory: str
    device: str
    """Device number, as major:minor."""
    fstype: str
    source: str
    owner: int | None
    """Uid of the user who mounted a FUSE mount (option user_id); None for other mounts."""


def check_proc() -> None:
    """Check that /proc shows this pid namespace and is not mounted with subset=pid.

    Raises: CliError (a check fails, or nothing is mounted on /proc).
    """
    if not os.path.lexists("/proc/self"):
        raise CliError("/proc: no file system of processes; run mount -t proc proc /proc")
    try:
        own = os.readlink("/proc/self")
    except OSError:
        own = ""
    if own != str(os.getpid()):
        why = "shows another pid namespace; run mount -t proc proc /proc in this one, or unshare --mount-proc"
        raise CliError(f"/proc: {why}")
    if not os.path.exists("/proc/loadavg"):
        raise CliError("/proc: has only processes; mount it without subset=pid")


def mount_points() -> list[MountPoint]:
    """Return all mounts of this mount namespace, in order: a mount covers earlier ones on its directory.

    Raises: CliError (/proc is not mounted, or shows another pid namespace).
    """
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            return [_parse(line) for line in lines]
    except FileNotFoundError:
        check_proc()
        raise


def our_mounts() -> list[MountPoint]:
    """Return the mounts of kprobefs in this mount namespace."""
    return [point for point in mount_points() if point.fstype == FSTYPE]


def not_mounted(named: str) -> CliError:
    """Return the error, with a remedy, for a directory on which kprobefs is not mounted.

    `named`: the directory as the user wrote it.
    """
    mounts = sorted({point.directory for point in our_mounts()})
    more = f" and {len(mounts) - _SHOWN} more" if len(mounts) > _SHOWN else ""
    remedy = f"the mounts are {', '.join(mounts[:_SHOWN])}{more}" if mounts else f"run kprobefs mount {named}"
    return CliError(f"{named}: kprobefs isn't mounted there; {remedy}", ExitStatus.NOT_MOUNTED)


def mounted_on(directory: str) -> MountPoint | None:
    """Return the topmost mount on a directory, or None if the directory is no mount point."""
    found = [point for point in mount_points() if point.directory == directory]
    return found[-1] if found else None


def is_mounted(directory: str) -> bool:
    """Return True if kprobefs is mounted on a directory, perhaps below another mount."""
    return any(point.directory == directory for point in our_mounts())


def resolve(path: str) -> str:
    """Return `path` as an absolute path without symbolic links; send no request to a mount of kprobefs.

    realpath(3) would wait for the mount's daemon, which may hang.
    Raises: CliError (the path is empty, the working directory was removed, or links form a loop).
    """
    if not path:
        raise CliError("empty directory name; give a directory", ExitStatus.USAGE)
    ours = [point.directory for point in our_mounts()]
    try:
        found = "/" if path.startswith("/") else os.getcwd()
    except FileNotFoundError:
        raise CliError("the working directory was removed; give an absolute path") from None
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
    """Return True if `path` is inside any mount of kprobefs, or is `directory` or below it.

    Raises: CliError (see resolve()).
    """
    found = resolve(path)
    return any(_is_in(found, each) for each in (directory, *(point.directory for point in our_mounts())))


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory.rstrip('/')}/")


def conditions(directories: Iterable[str]) -> dict[str, MountState]:
    """Return a map: directory -> state of the kprobefs mount on the directory.

    The check of all mounts takes at most two seconds, unless daemons wait for a CPU.
    """
    # Hazard: a request that has reached a hung daemon cannot be interrupted, so a child process waits for it.
    asked = {directory: _Question(directory) for directory in directories}
    start = time.monotonic()
    return {directory: question.answer(start) for directory, question in asked.items()}


def condition(directory: str) -> MountState:
    """Return the state of the kprobefs mount on a directory."""
    return conditions([directory])[directory]


def check_answers(directory: str) -> None:
    """Check that a mount's daemon answers. Raises: CliError (it hangs or is gone)."""
    found = condition(directory)
    if found in (MountState.STALE, MountState.HUNG):
        raise unanswered(directory, found)


def unanswered(directory: str, found: MountState) -> CliError:
    """Return the error for a mount whose daemon hangs or is gone; `found`: state of the mount."""
    if found is MountState.STALE:
        return CliError(f"{directory}: its daemon is gone; run kprobefs umount {directory}", found.status)
    from kprobefs.common.daemon_registry import known

    with known(directory) as daemon:
        stopped = daemon.daemon.pid if daemon is not None and daemon.is_stopped else None
    why = f"is stopped; run kill -CONT {stopped}, or" if stopped else "does not answer; run"
    return CliError(f"{directory}: its daemon {why} kprobefs umount --force {directory}", found.status)


class _Question:
    """A child process that requests the state of a mount. The request may block."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._pipe, writer = os.pipe()
        self._received = b""
        self._child = fork()
        if self._child == 0:
            _ask(directory, writer)
        os.close(writer)
        self._readable = poll()
        self._readable.register(self._pipe, POLLIN)

    def answer(self, start: float) -> MountState:
        """Return the mount's state, which the child process reports.

        Wait for the daemon until ANSWER_TIMEOUT after `start`, and for its kernel until CONTROL_TIMEOUT after
        that. `start`: monotonic time in seconds.
        """
        try:
            deadline = start + ANSWER_TIMEOUT
            found = self._line(deadline) or self._late_line(deadline + CPU_TIMEOUT)
            if not found:
                return MountState.HUNG
            number = int(found)
            if number in STALE:
                return MountState.STALE
            if number:
                return MountState.MOUNTED
            told = self._line(max(deadline, time.monotonic()) + CONTROL_TIMEOUT)
            if not told:
                return MountState.BUSY
            known = (MountState.PANICKED, MountState.DEBUGGED)
            return next((state for state in known if told == state.value), MountState.SERVING)
        finally:
            os.close(self._pipe)
            os.kill(self._child, signal.SIGKILL)
            # A child that cannot be interrupted is left to init.
            for _ in range(REAP_ATTEMPTS):
                if os.waitpid(self._child, os.WNOHANG) != (0, 0):
                    break
                time.sleep(REAP_PAUSE)

    def _late_line(self, deadline: float) -> str:
        """Return the child's next line; wait for it as long as the child or the daemon waits for a CPU.

        Return "" if neither of them waits for a CPU any more, or at the monotonic time `deadline`.
        """
        from emulated_kernel.util.host_tasks import BUSY_INTERVAL, is_runnable
        from kprobefs.common.daemon_registry import running

        processes = [self._child]
        with suppress(CliError):
            daemon = running(self._directory)
            if daemon is not None:
                processes.append(daemon.pid)

        def is_late() -> bool:
            threads = (f"/proc/{pid}/task" for pid in processes)
            return any(is_runnable(f"{each}/{name}") for each in threads for name in _names(each))

        found = ""
        while not found and time.monotonic() < deadline and is_late():
            found = self._line(time.monotonic() + BUSY_INTERVAL)
        return found

    def _line(self, deadline: float) -> str:
        """Return the child's next line, or "" if no line comes until the monotonic time `deadline`."""
        while b"\n" not in self._received:
            if not self._readable.poll(1000 * max(0, deadline - time.monotonic())):
                return ""
            data = os.read(self._pipe, 256)
            if not data:
                return ""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line.decode("ascii", "replace")


def _names(directory: str) -> list[str]:
    """Return the names in a directory, or an empty list if the directory is gone."""
    with suppress(OSError):
        return os.listdir(directory)
    return []


def _ask(directory: str, writer: int) -> NoReturn:
    """Request the mount's state, and write one or two lines to the descriptor `writer`.

    The first line is the errno of a request that only the daemon must answer. If the errno is 0, the second
    line is the state, for which the kernel of the mount must answer, too. After another errno, there is no
    second line.
    """
    try:
        # A process that waits for the end of the parent's output must not wait for this child.
        os.closerange(0, writer)
        os.closerange(writer + 1, 1 << 20)
        try:
            # Do not use stat(2), which the host's kernel may answer from its cache.
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
    """Unmount a directory at once, even if it has open files (MNT_DETACH).

    Raises: CliError (it is still mounted).
    """
    try:
        if os.geteuid() == 0:
            _umount2(directory, UMOUNT_NOFOLLOW)
        else:
            _fusermount(directory)
    except CliError:
        # Another process may have unmounted it meanwhile.
        if mounted_on(directory) is not None:
            raise


def detach_dead(directory: str, device: str) -> None:
    """Unmount a mount whose daemon is gone, and its bind mounts; leave a mount that answers.

    `directory`: the mount's directory, which is used only if `device` is "". `device`: the mount's device
    number, by which it and its bind mounts are found; "": unmount only what is mounted on `directory`.
    """
    for point in reversed(our_mounts()):
        if point.device == device if device else point.directory == directory:
            with suppress(OSError, CliError):
                _detach_if_dead(point)


def _detach_if_dead(point: MountPoint) -> None:
    # O_PATH opens the topmost mount without a request to it.
    place = os.open(point.directory, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # If the mount ids differ, another mount covers this one.
        if _mount_number(place) == point.number and _is_dead(place):
            if os.geteuid() == 0:
                # Use the descriptor, because the path may belong to another mount meanwhile.
                _umount2(f"/proc/self/fd/{place}", 0)
            else:
                _fusermount(point.directory)
    finally:
        os.close(place)


def _is_dead(place: int) -> bool:
    try:
        os.statvfs(place)
    except OSError as error:
        return error.errno in STALE
    return False


def _mount_number(descriptor: int) -> int:
    """Return the mount id of an open file. Mirrors: proc_pid_fdinfo(5)."""
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


def check_owner(point: MountPoint) -> None:
    """Check that this user may unmount a mount point.

    Raises: CliError (another user has mounted it).
    """
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
    """Prepare a directory for a mount, which the `with` block makes; unmount a killed daemon's stale mount.

    `make`: create a missing directory, and remove it again if the block ends in an exception. `allow_other`:
    the mount will admit other users, so also check that /etc/fuse.conf permits this. Raises: CliError (the
    directory, /dev/fuse or /etc/fuse.conf does not permit the mount).
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
            # It is no longer empty.
            with suppress(OSError):
                os.rmdir(each)
        raise


def _make(directory: str, made: list[str]) -> None:
    """Create the missing directories of a path, and append their paths to `made`.

    Raises: CliError (a directory cannot be created).
    """
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
    if mounted_on(directory) != point:
        # The mount is gone: its daemon ended, or the UnmountWatcher has unmounted it.
        return
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
            raise CliError(f"{directory}: not empty; use an empty directory")
    except FileNotFoundError:
        raise CliError(f"{directory}: no such directory; run mkdir -p {directory}, or add --mkdir") from None
    except NotADirectoryError:
        raise CliError(f"{directory}: not a directory; use an empty directory") from None
    except OSError as error:
        raise CliError(f"{directory}: {error.strerror}; use a directory that belongs to you") from None
    if os.geteuid() != 0 and not os.access(directory, os.W_OK):
        raise CliError(f"{directory}: not writable for you; use a directory that belongs to you")


def _check_device() -> None:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise CliError(
            "/dev/fuse: missing; run modprobe fuse, or give the container --device /dev/fuse"
        ) from None
    except PermissionError:
        raise CliError("/dev/fuse: no access; run chmod 666 /dev/fuse as root, or run as root") from None
    except OSError as error:
        raise CliError(f"/dev/fuse: {error.strerror}; run modprobe fuse") from None


def fusermount_advice() -> str:
    """Return advice after a refused mount if fusermount(1), a setuid program, cannot work here, else "".

    fusermount needs root's rights, and an entry for the user in the user database. A container may withhold
    both.
    """
    import pwd

    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        withheld = os.geteuid() == 0 or "NoNewPrivs:\t1\n" in file
    with suppress(KeyError):
        pwd.getpwuid(os.geteuid())
        if not withheld:
            return ""
    return "; if this container gives fusermount no rights, work in a shell of `unshare -Urm`"


def _check_configuration() -> None:
    # An unreadable file is left to fusermount, which can read it.
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
    number, _, device, _, directory, *_ = left.split(" ")
    fstype, source, options, *_ = [*right.split(" "), ""]
    users = [option[8:] for option in options.split(",") if option.startswith("user_id=")]
    owner = int(users[0]) if users else None
    return MountPoint(int(number), _unescape(directory), device, fstype, _unescape(source), owner)


def _unescape(field: str) -> str:
    head, *rest = field.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def _umount2(directory: str, flags: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(directory), MNT_DETACH | flags) != 0:
        raise CliError(f"{directory}: can't unmount: {os.strerror(ctypes.get_errno())}")


def _fusermount(directory: str) -> None:
    import subprocess

    try:
        result = subprocess.run(
            ["fusermount", "-u", "-z", "--", directory],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except FileNotFoundError:
        raise CliError("fusermount: missing; install it (Debian, Fedora: fuse3)") from None
    if result.returncode != 0:
        raise CliError(f"{directory}: can't unmount: {result.stderr.strip()}")
