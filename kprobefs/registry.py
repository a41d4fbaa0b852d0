"""The registry of running daemons: a locked file each, that says who serves which directory."""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from kprobefs.failure import Failure

LOCK_ATTEMPTS = 5
LOCK_PAUSE = 0.02


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


class Registration:
    """Held by the daemon for its life: the lock tells others that the record is true."""

    def __init__(self, daemon: Daemon) -> None:
        """Raises: Failure when another daemon serves the directory."""
        self._path = _record_path(daemon.directory)
        self._file = self._locked(daemon.directory)
        self._file.truncate(0)
        json.dump(asdict(daemon), self._file)
        self._file.flush()

    def _locked(self, directory: str) -> TextIO:
        """The record, locked; a new one where a daemon that ended removed it while we waited."""
        while True:
            file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115 (open as long as we run)
            if not _lock(file):
                file.close()
                raise Failure(f"{directory}: another kprobefs serves it")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    return file
            file.close()

    def close(self) -> None:
        """The daemon ends."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def _lock(file: TextIO) -> bool:
    # running() holds the lock for an instant: a daemon holds it for longer than these attempts.
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
    try:
        with open(_record_path(directory), encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Daemon(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None
    return None


def runtime_directory() -> Path:
    """Where records and logs lie: /run/kprobefs, or below the user's runtime directory. Raises: Failure."""
    path = _runtime_path()
    path.mkdir(mode=0o755 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
    # In /tmp somebody else may have made it first.
    if path.is_symlink() or path.stat().st_uid != os.geteuid():
        raise Failure(f"{path}: belongs to somebody else; set XDG_RUNTIME_DIR")
    return path


def _runtime_path() -> Path:
    chosen, user = os.environ.get("KPROBEFS_RUNTIME_DIRECTORY"), os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/run/kprobefs")
    return Path(user) / "kprobefs" if user else Path(f"/tmp/kprobefs-{os.geteuid()}")


def log_path(directory: str) -> Path:
    """The log of a daemon in the background."""
    return _record_path(directory).with_suffix(".log")


def _record_path(directory: str) -> Path:
    namespace = os.stat("/proc/self/ns/mnt").st_ino
    words = directory.strip("/").replace("/", "-")[-60:]
    key = zlib.crc32(f"{namespace}:{directory}".encode(errors="surrogateescape"))
    return runtime_directory() / f"{words}-{key:08x}.json"
