"""The registry of running daemons: a record each, for its owner alone, of who serves which directory."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from select import POLLIN, poll
from typing import TextIO

from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.safe_read import open_regular
from kprobefs.common.errors import CliError

LOCK_ATTEMPTS = 5
LOCK_PAUSE = 0.02
FALLBACK = "/tmp/kprobefs-"
"""What the uid follows in the directory's name, where the user has no place of their own."""
KEPT_LOGS = 10
"""Logs of daemons that failed which are kept, the newest ones."""
STARTING = 10.0
"""Seconds between a daemon's opening of its log and its record, at most."""
STATE, PARENT, START_TIME = 0, 1, 19
"""Indices of state, ppid and starttime among the fields of /proc/PID/stat behind the name; see proc(5)."""


@dataclass(frozen=True)
class Process:
    """What tells a process from any other that has its pid later."""

    pid: int
    started: int
    """Clock ticks from the host's boot to its start."""
    executable: tuple[int, int]
    """Device and inode."""


@dataclass(frozen=True)
class Daemon:
    """What a running daemon tells about itself."""

    pid: int
    directory: str
    arch: str
    layout: str
    version: str
    started: str
    """ISO 8601, with the offset from UTC."""


def process_of(pid: int) -> Process:
    """The process that has this pid now. Raises: OSError."""
    executable = os.stat(f"/proc/{pid}/exe")
    return Process(pid, start_time(pid), (executable.st_dev, executable.st_ino))


def start_time(pid: int) -> int:
    """Clock ticks from the host's boot to its start. Raises: OSError."""
    return int(_fields(pid)[START_TIME])


def parent_of(pid: int) -> int:
    """The pid of its parent. Raises: OSError."""
    return int(_fields(pid)[PARENT])


def _fields(pid: int) -> list[str]:
    """Those of /proc/PID/stat behind the name. Raises: OSError."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()


class Registration:
    """Held by the daemon for its life; its lock keeps a second one from the same directory."""

    def __init__(self, daemon: Daemon) -> None:
        """Raises: CliError (another daemon serves the directory)."""
        sweep()
        self._path = _record_path(daemon.directory)
        self._file = self._locked(daemon.directory)
        self._file.truncate(0)
        json.dump({"daemon": asdict(daemon), "process": asdict(process_of(daemon.pid))}, self._file)
        self._file.flush()

    def _locked(self, directory: str) -> TextIO:
        """The record, locked; a new one where a daemon that ended removed it while we waited."""
        while True:
            file = _open_record(self._path, os.O_RDWR | os.O_CREAT)
            if file is None:
                raise CliError(f"{self._path}: not a private file of yours; remove it")
            if not _lock(file):
                file.close()
                raise CliError(f"{directory}: another kprobefs serves it; use another directory")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.lstat(self._path)):
                    return file
            file.close()

    def close(self) -> None:
        """The daemon ends."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def _open_record(path: Path, flags: int) -> TextIO | None:
    """A record that nobody but its owner could have written or locked; None where it isn't one."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "r+" if flags & os.O_RDWR else "r", encoding="utf-8")


def _lock(file: TextIO) -> bool:
    # sweep() holds the lock for an instant: a daemon holds it for longer than these attempts.
    for _ in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE)
        else:
            return True
    return False


def running(directory: str) -> Daemon | None:
    """The daemon that serves `directory` in this mount namespace; None where none is known to live."""
    with known(directory) as found:
        return found.daemon if found else None


@dataclass(frozen=True)
class Running:
    """A daemon of the registry that lives, held by a descriptor: its pid can't become another's meanwhile."""

    daemon: Daemon
    descriptor: int

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)

    def ends(self, timeout: float) -> bool:
        """Whether it ends in so many seconds."""
        waiting = poll()
        waiting.register(self.descriptor, POLLIN)
        return bool(waiting.poll(timeout * 1000))

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        with suppress(OSError, IndexError):
            return _fields(self.daemon.pid)[STATE] in "Tt"
        return False


@contextmanager
def known(directory: str) -> Iterator[Running | None]:
    """The living daemon of a directory, for as long as the context lasts; None where none is known."""
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
        daemon = Daemon(**record["daemon"])
        process = Process(**{**record["process"], "executable": tuple(record["process"]["executable"])})
        descriptor = os.pidfd_open(daemon.pid)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    # Only now: what the descriptor holds is what has the pid.
    with suppress(OSError, IndexError):
        if process_of(daemon.pid) == process:
            return Running(daemon, descriptor)
    os.close(descriptor)
    return None


def sweep() -> None:
    """Remove records of daemons that were killed, and all of their logs but the newest."""
    directory = runtime_directory()
    for path in directory.glob("*.json"):
        with suppress(OSError), open_regular(path, os.O_NOFOLLOW) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    left = [path for path in directory.glob("*.log") if not path.with_suffix(".json").exists()]
    for path in sorted(left, key=_age)[KEPT_LOGS:]:
        path.unlink(missing_ok=True)


def forget(directory: str) -> None:
    """A killed daemon's mount is gone: so is its record, and its log if that says nothing.

    One that is starting has written its log's first byte, or has a record, before that is so old.
    """
    with suppress(FileNotFoundError, CliError):
        sweep()
        log = log_path(directory)
        found = log.lstat()
        is_old = time.time() - found.st_mtime > STARTING
        if is_old and not found.st_size and not _record_path(directory).exists():
            log.unlink()


def _age(path: Path) -> float:
    try:
        return -path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def runtime_directory() -> Path:
    """Where records and logs lie, for their owner alone. Raises: CliError."""
    path = _base_path() / "daemons"
    for each, mode in ((path.parent, 0o755), (path, 0o700)):
        try:
            each.mkdir(mode=mode, parents=True, exist_ok=True)
            found = each.lstat()
        except OSError as error:
            raise CliError(f"{each}: {error.strerror}; set XDG_RUNTIME_DIR") from None
        # In /tmp somebody else may have made it first.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise CliError(f"{each}: belongs to somebody else; set XDG_RUNTIME_DIR")
    if found.st_mode & 0o077:
        path.chmod(0o700)
    return path


def _base_path() -> Path:
    """/run/kprobefs, or below the user's runtime directory, or a directory of the user's own."""
    if chosen := os.environ.get("KPROBEFS_RUNTIME_DIRECTORY"):
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
        # sudo and su leave the environment of somebody else.
        with suppress(OSError):
            if place.startswith("/") and os.stat(place).st_uid == os.geteuid():
                return Path(place, "kprobefs")
    return Path(f"{FALLBACK}{user}")


def _outer_uid() -> int:
    """This process's user as the user namespace above calls it: two users may both be root in theirs."""
    user = os.geteuid()
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            inner, outer, count = map(int, line.split())
            if inner <= user < inner + count:
                return outer + user - inner
    return user


def log_path(directory: str) -> Path:
    """The log of a daemon in the background."""
    return _record_path(directory).with_suffix(".log")


def _record_path(directory: str) -> Path:
    namespace = os.stat("/proc/self/ns/mnt").st_ino
    words = directory.strip("/").replace("/", "-")[-60:]
    key = zlib.crc32(f"{namespace}:{directory}".encode(errors="surrogateescape"))
    return runtime_directory() / f"{words}-{key:08x}.json"
