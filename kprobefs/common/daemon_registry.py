"""The registry of running daemons: one record for each, which only the daemon's user can read."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from select import POLLIN, poll

from emulated_kernel.util.fast_dataclass import asdict, dataclass
from kprobefs.common.errors import CliError

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any, Self, TextIO

RUNTIME_DIRECTORY = "KPROBEFS_RUNTIME_DIRECTORY"
"""Environment variable with the path of the runtime directory. If it is set, no other one is used."""
LOCK_TIMEOUT = 5.0
"""Maximum seconds that a starting daemon waits for a record's lock if no live daemon has a mount there."""
LOCK_PAUSE = 0.02
"""Seconds between two attempts to lock a record."""
FALLBACK = "/tmp/kprobefs-"
"""Beginning of the path of the runtime directory in /tmp; the uid follows.

The directory is used if the user has no better one.
"""
MAX_OLD_LOGS = 10
"""Maximum number of logs of failed daemons that are kept; older logs are removed."""
STATE = 0
"""Index of the process's state among the fields after the name in /proc/PID/stat. Mirrors: proc(5)."""
PARENT = 1
"""Index of the parent's pid among the fields after the name in /proc/PID/stat."""
START_TIME = 19
"""Index of the start time, in clock ticks, among the fields after the name in /proc/PID/stat."""


@dataclass(frozen=True)
class Process:
    """Identity of a process, which distinguishes it from a later process with the same pid."""

    pid: int
    started: int
    """Clock ticks from the host's boot to the process's start."""
    executable: tuple[int, int]
    """(device number, inode number) of the process's executable."""


@dataclass(frozen=True)
class Daemon:
    """The record that a daemon writes about itself."""

    pid: int
    directory: str
    arch: str
    layout: str
    version: str
    started: str
    """Time of the daemon's start, in ISO 8601 with the offset from UTC."""
    traps: str = ""
    """`native` if hits with handlers in guest code do not enter Python, else `python`; "" before the boot."""
    kernel: str = ""
    """Path of the kernel's image or vmcore, or `built-in`; "" if unknown."""
    profile: str = ""
    """Name of the kprobes' profile, or `kernel` for the mounted kernel's own kprobes; "" if unknown."""
    state: str = ""
    """Directory of --state, in which the daemon keeps definitions and records; "" without --state."""
    clock: str = ""
    """Clock that the mount was started with, as `--clock` names it; "" if unknown."""
    options: Sequence[str] = ()
    """Words of a command line that select the same kernel, as $KPROBEFS_OPTIONS has them."""
    isolate: bool = False
    """Whether the guest has pids of its own for the clients (`--isolate`)."""


def process_of(pid: int) -> Process:
    """Return the identity of the process whose pid is `pid` now. Raises: OSError."""
    executable = os.stat(f"/proc/{pid}/exe")
    return Process(pid, start_time(pid), (executable.st_dev, executable.st_ino))


def start_time(pid: int) -> int:
    """Return the start time of process `pid` in clock ticks since the host's boot. Raises: OSError."""
    return int(_fields(pid)[START_TIME])


def parent_of(pid: int) -> int:
    """Return the pid of the parent of process `pid`. Raises: OSError."""
    return int(_fields(pid)[PARENT])


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name. Raises: OSError."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()


class Registration:
    """The record file of this daemon. Its lock prevents a second daemon for the same directory."""

    def __init__(self, daemon: Daemon, is_mounted: Callable[[str], bool] = lambda _directory: True) -> None:
        """Create, lock and write the record file of `daemon`.

        `is_mounted`: whether kprobefs is mounted on a directory. If not, another daemon of this directory
        only begins or ends, so wait for its mount or its end.
        Raises: CliError (another daemon serves the directory, or the file cannot be written).
        """
        sweep()
        self.daemon = daemon
        self._path = _record_path(daemon.directory)
        try:
            self._file = _locked(self._path, daemon.directory, is_mounted)
        except OSError as error:
            raise unwritable(self._path, error) from None
        try:
            self.write(daemon)
        except CliError:
            self.close()
            raise

    def write(self, daemon: Daemon) -> None:
        """Write the record, or replace it. Raises: CliError (it cannot be written)."""
        record = json.dumps({"daemon": asdict(daemon), "process": asdict(process_of(daemon.pid))}).encode()
        try:
            os.pwrite(self._file.fileno(), record, 0)
            os.ftruncate(self._file.fileno(), len(record))
        except OSError as error:
            raise unwritable(self._path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call close(). After an exception, keep the log, because the exception is still to be logged."""
        self.close(keeps_log=kind is not None)

    def close(self, *, keeps_log: bool = False) -> None:
        """Remove the record file, because the daemon ends. Also remove an empty log unless `keeps_log`."""
        if not keeps_log:
            _remove_log(self._path, only_empty=True)
        self._path.unlink(missing_ok=True)
        self._file.close()


def _locked(
    path: Path, directory: str, is_mounted: Callable[[str], bool] = lambda _directory: True
) -> TextIO:
    """Open and lock the record file `path` of `directory`. `is_mounted`: see Registration.

    If an ending daemon removes the file meanwhile, create a new one. Raises: CliError (another daemon
    serves the directory, or the file is not a private one of this user), OSError.
    """
    while True:
        file = _open_record(path, os.O_RDWR | os.O_CREAT)
        if file is None:
            raise CliError(f"{path}: not a private file of yours; remove it")
        if not _lock(file, lambda: is_mounted(directory) and running(directory) is not None):
            file.close()
            raise CliError(f"{directory}: another kprobefs daemon serves it; unmount it first")
        if _is_at(path, file):
            return file
        file.close()


def unwritable(path: str | Path, error: OSError) -> CliError:
    """Return the CliError for a file of the runtime directory that cannot be written."""
    way = "free some space, or set" if error.errno == errno.ENOSPC else "set"
    return CliError(f"{path}: {error.strerror}; {way} {RUNTIME_DIRECTORY}")


def _open_record(path: Path, flags: int) -> TextIO | None:
    """Open a record file with `flags` of open(2). Return None if it is not a private file of this user."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "r+" if flags & os.O_RDWR else "r", encoding="utf-8")


def _is_at(path: Path, file: IO[Any]) -> bool:
    """Return True if the open file `file` is still at `path`: another process may have removed the name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    return False


def _lock(file: TextIO, is_served: Callable[[], bool]) -> bool:
    """Lock the record file of a directory's daemon. Return False if another daemon serves the directory.

    sweep() also takes the lock, for a short time, and a daemon holds it until its end, also after umount(8).
    So while `is_served` returns False, try again for at most LOCK_TIMEOUT seconds. Then return False, too.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if is_served() or time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_PAUSE)


def running(directory: str) -> Daemon | None:
    """Return the live daemon that serves `directory` in this mount namespace, or None if none is known."""
    with known(directory) as found:
        return found.daemon if found else None


@dataclass(frozen=True)
class Running:
    """A live daemon with its pidfd, so that no signal can reach a later process with the same pid."""

    daemon: Daemon
    descriptor: int

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the daemon."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)

    def ends(self, timeout: float) -> bool:
        """Wait for the daemon's end, for at most `timeout` seconds; return whether the daemon has ended."""
        waiting = poll()
        waiting.register(self.descriptor, POLLIN)
        return bool(waiting.poll(timeout * 1000))

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the daemon."""
        with suppress(OSError, IndexError):
            return _fields(self.daemon.pid)[STATE] in "Tt"
        return False


@contextmanager
def known(directory: str) -> Iterator[Running | None]:
    """Yield the live daemon that serves `directory`, or None if none is known.

    The daemon's pidfd is closed after the `with` block.
    """
    found = _find(directory)
    try:
        yield found
    finally:
        if found is not None:
            os.close(found.descriptor)


def _find(directory: str) -> Running | None:
    try:
        file = _open_record(_record_path(directory), os.O_RDONLY)
        if file is None:
            return None
        with file:
            record = json.load(file)
        fields = record["daemon"]
        daemon = Daemon(**{**fields, "options": tuple(fields.get("options", ()))})
        process = Process(**{**record["process"], "executable": tuple(record["process"]["executable"])})
        descriptor = os.pidfd_open(daemon.pid)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    # Hazard: compare only after the pidfd is open, which keeps the pid from being reused.
    with suppress(OSError, IndexError):
        if process_of(daemon.pid) == process:
            return Running(daemon, descriptor)
    os.close(descriptor)
    return None


def sweep() -> None:
    """Remove the records of killed daemons, and logs without records except the newest MAX_OLD_LOGS."""
    from emulated_kernel.util.safe_read import open_regular

    directory = runtime_directory(creates=False)
    for path in directory.glob("*.json"):
        with suppress(OSError), open_regular(path, os.O_NOFOLLOW) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Hazard: another sweep may have removed this file, so that the name is a starting daemon's.
            if _is_at(path, file):
                path.unlink()
    left = [path for path in directory.glob("*.log") if not path.with_suffix(".json").exists()]
    for path in sorted(left, key=_age)[MAX_OLD_LOGS:]:
        path.unlink(missing_ok=True)


def forget(directory: str, *, keeps_log: bool = True) -> None:
    """Remove the record of a daemon that has ended, and its log if the log is empty.

    `keeps_log`: if False, remove the log even if it is not empty. If another daemon has begun to serve
    `directory`, leave both.
    """
    with suppress(OSError, CliError):
        path = _record_path(directory, creates=False)
        if path.exists() or path.with_suffix(".log").exists():
            with ExitStack() as held:
                try:
                    held.enter_context(_locked(path, directory))
                except OSError:
                    # If the disk is too full for a record, no other daemon has one, either.
                    if path.exists():
                        raise
                _remove_log(path, only_empty=keeps_log)
                path.unlink(missing_ok=True)
        sweep()


def _remove_log(record: Path, *, only_empty: bool) -> None:
    """Remove the log of the daemon with the record file `record`. `only_empty`: leave a log that has text.

    The caller must have locked the record file, because each daemon opens its log after it has done so.
    """
    log = record.with_suffix(".log")
    with suppress(OSError):
        if not only_empty or not log.lstat().st_size:
            log.unlink()


def _age(path: Path) -> float:
    try:
        return -path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def runtime_directory(*, creates: bool = True) -> Path:
    """Return the directory of records and logs, `daemons` in the runtime directory.

    If it is missing and `creates` is True, create it for its owner only.

    Raises: CliError (the directory cannot be created, or belongs to another user).
    """
    path = _base_path() / "daemons"
    for each, mode in ((path.parent, 0o755), (path, 0o700)):
        try:
            if creates:
                each.mkdir(mode=mode, parents=True, exist_ok=True)
            found = each.lstat()
        except OSError as error:
            if not creates and isinstance(error, FileNotFoundError):
                return path
            raise unwritable(each, error) from None
        # Hazard: in /tmp another user may have made the directory first.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            remedy = f"set {RUNTIME_DIRECTORY} to a directory of your own"
            raise CliError(f"{each}: belongs to somebody else; {remedy}")
    if found.st_mode & 0o077:
        path.chmod(0o700)
    return path


def _base_path() -> Path:
    """Return the path of the runtime directory, which may be missing.

    It is the one that the environment variable RUNTIME_DIRECTORY names. Otherwise, it is root's
    /run/kprobefs, one in the user's own directories, or one in /tmp (see FALLBACK).

    Raises: CliError (the environment variable has a relative path).
    """
    if chosen := os.environ.get(RUNTIME_DIRECTORY):
        if not chosen.startswith("/"):
            # The commands, and the daemon in another working directory, would use different directories.
            raise CliError(f"{RUNTIME_DIRECTORY}={chosen}: not an absolute path; set one, or unset it")
        return Path(chosen)
    user = _outer_uid()
    places = (
        "/run" if os.geteuid() == 0 else "",
        os.environ.get("XDG_RUNTIME_DIR", ""),
        f"/run/user/{user}",
        os.environ.get("XDG_CACHE_HOME", ""),
        os.path.join(os.environ.get("HOME", ""), ".cache"),
    )
    for place in places:
        # sudo(8) and su(1) keep the environment of another user.
        with suppress(OSError):
            if place.startswith("/") and os.stat(place).st_uid == os.geteuid():
                return Path(place, "kprobefs")
    return Path(f"{FALLBACK}{user}")


def _outer_uid() -> int:
    """Return the uid that this process's user has in the parent user namespace.

    The uid in this namespace may be 0 for several users, each in a namespace of its own.
    """
    user = os.geteuid()
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            inner, outer, count = map(int, line.split())
            if inner <= user < inner + count:
                return outer + user - inner
    return user


def log_path(directory: str) -> Path:
    """Return the path of the log of a background daemon that serves `directory`."""
    return _record_path(directory).with_suffix(".log")


def _record_path(directory: str, *, creates: bool = True) -> Path:
    namespace = os.stat("/proc/self/ns/mnt").st_ino
    words = directory.strip("/").replace("/", "-")[-60:]
    key = zlib.crc32(f"{namespace}:{directory}".encode(errors="surrogateescape"))
    return runtime_directory(creates=creates) / f"{words}-{key:08x}.json"
