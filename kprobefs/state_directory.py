"""The directory of a state: one daemon's at a time, and what is set aside in it."""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from kprobefs.failure import Failure

LOCK_ATTEMPTS = 10
LOCK_PAUSE = 0.05
"""Seconds: a daemon that was killed has it until its memory is freed."""
ATTEMPTS = 3
"""Starts that may end in the middle of bringing a state back; the next one does without it."""
TROUBLE, UNKEPT = "trouble ", "kept no"
"""How lines of machine/state begin that whoever mounts is told."""
_RECORDS = re.compile(r"records\.([0-9]{1,9})")


def told(directory: str) -> list[str]:
    """What whoever mounts there should know: what couldn't be used, and why nothing is kept."""
    from kprobefs.files import beside

    with suppress(OSError):
        text = (beside(directory) / "machine" / "state").read_text("utf-8", "surrogateescape")
        lines = [line for line in text.splitlines() if line.startswith((TROUBLE, UNKEPT))]
        return [line.removeprefix(TROUBLE) for line in lines]
    return []


class Attempts:
    """How often a state was begun to be brought back since it last was."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> bool:
        """One more; whether it isn't one too many."""
        with suppress(OSError, ValueError):
            if int(self._path.read_text("ascii") or "0") >= ATTEMPTS:
                return False
        with suppress(OSError), open(self._path, "a+", encoding="ascii") as file:
            file.seek(0)
            count = file.read()
            file.truncate(0)
            file.write(str(int(count) + 1 if count.isdecimal() else 1))
        return True

    def end(self) -> None:
        """It is back."""
        with suppress(OSError):
            self._path.unlink()


class StateDirectory:
    """Files of a state; for this daemon alone as long as it lives."""

    def __init__(self, directory: str) -> None:
        """Raises: Failure: it can't be had, or another daemon has it."""
        self.path = Path(directory)
        self.journal = self.path / "journal"
        self.attempts = Attempts(self.path / "attempts")
        try:
            with suppress(FileExistsError):
                self.path.mkdir(0o700)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise Failure(f"--state {directory}: {error.strerror}") from None
        found = os.fstat(self._lock)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            os.close(self._lock)
            raise Failure(f"--state {directory}: must belong to you, and nobody else may write to it")
        if not self._is_locked():
            os.close(self._lock)
            raise Failure(f"--state {directory}: another daemon keeps its state there")

    def _is_locked(self) -> bool:
        for _ in range(LOCK_ATTEMPTS):
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(LOCK_PAUSE)
        return False

    def records(self) -> list[Path]:
        """All files of records; none where the directory can't be read."""
        with suppress(OSError):
            return [path for path in self.path.iterdir() if _RECORDS.fullmatch(path.name)]
        return []

    def new_records(self) -> BinaryIO:
        """Another one, empty. Raises: OSError."""
        numbers = [int(found[1]) for path in self.records() if (found := _RECORDS.fullmatch(path.name))]
        path = self.path / f"records.{max(numbers, default=0) + 1}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o600))
        return open(path, "r+b", buffering=0)

    def set_aside(self, *paths: Path) -> list[str]:
        """Keep files that can't be used, for whoever wants to look at them: of each kind the latest.

        Returns the names that they have now.
        """
        kept = {}
        for path in paths:
            with suppress(OSError):
                kept[path.rename(self.path / f"aside.{path.name.partition('.')[0]}").name] = True
        return list(kept)

    def copy_aside(self, path: Path) -> None:
        """The same, with the file where it is. Raises: OSError."""
        copy = self.path / f"aside.{path.name.partition('.')[0]}"
        with suppress(FileNotFoundError):
            copy.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(copy, flags, 0o600), "wb") as file:
            file.write(path.read_bytes())

    def close(self) -> None:
        """Another daemon may have it."""
        os.close(self._lock)
