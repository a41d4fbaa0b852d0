"""The directory of a state: one daemon's at a time, and what is set aside in it."""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from emulated_kernel.util.safe_read import read_regular
from kprobefs.common.errors import CliError

LOCK_ATTEMPTS = 10
LOCK_PAUSE = 0.05
"""Seconds: a daemon that was killed has it until its memory is freed."""
DIGITS = 9
"""Bytes of the file that counts them."""
ATTEMPTS = 3
"""Starts that may end in the middle of bringing a state back; the next one does without it."""
TROUBLE, UNKEPT = "trouble ", "kept no"
"""How lines of machine/state begin that whoever mounts is told."""
MAX_ASIDE = 10
_RECORDS = re.compile(r"records\.([0-9]{1,9})")


def pending_warnings(directory: str) -> list[str]:
    """What whoever mounts there should know: what couldn't be used, and why nothing is kept."""
    from kprobefs.definitions.tracefs_files import control_root

    with suppress(OSError):
        text = (control_root(directory) / "machine" / "state").read_text("utf-8", "surrogateescape")
        lines = [line for line in text.splitlines() if line.startswith((TROUBLE, UNKEPT))]
        return [line.removeprefix(TROUBLE) for line in lines]
    return []


class RestoreAttempts:
    """How often a state was begun to be brought back since it last was."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> bool:
        """One more; whether it isn't one too many."""
        count = self._count()
        if count >= ATTEMPTS:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError), open(os.open(self._path, flags, 0o600), "w", encoding="ascii") as file:
            file.write(str(count + 1))
        return True

    def _count(self) -> int:
        """What the file says; one that says nothing is set aside."""
        try:
            text = read_regular(self._path, DIGITS, os.O_NOFOLLOW) or b"0"
            if text.isdigit():
                return int(text)
        except FileNotFoundError:
            return 0
        except OSError:
            pass
        _set_aside(self._path)
        return 0

    def end(self) -> None:
        """It is back."""
        with suppress(OSError):
            self._path.unlink()


class StateDirectory:
    """Files of a state; for this daemon alone as long as it lives."""

    def __init__(self, directory: str) -> None:
        """Raises: CliError (it can't be had, or another daemon has it)."""
        self.path = Path(directory)
        self.journal = self.path / "journal"
        self.attempts = RestoreAttempts(self.path / "attempts")
        try:
            with suppress(FileExistsError):
                self.path.mkdir(0o700)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CliError(f"--state {directory}: {error.strerror}") from None
        found = os.fstat(self._lock)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            os.close(self._lock)
            raise CliError(f"--state {directory}: must belong to you, and nobody else may write to it")
        if not self._is_locked():
            os.close(self._lock)
            raise CliError(f"--state {directory}: another daemon keeps its state there")

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
        names = {path.name for path in self.records()}
        path = self.path / next(name for name in map("records.{}".format, count(1)) if name not in names)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o600))
        return open(path, "r+b", buffering=0)

    def set_aside(self, *paths: Path) -> list[str]:
        """Keep files that can't be used, for whoever wants to look at them: of each kind the latest.

        Returns the names that they have now.
        """
        return list(dict.fromkeys(name for path in paths if (name := _set_aside(path))))

    def copy_aside(self, path: Path) -> None:
        """The same, with the file where it is. Raises: OSError."""
        copy = self.path / f"aside.{path.name.partition('.')[0]}"
        with suppress(FileNotFoundError):
            copy.unlink()
        # Another one takes its place, and is written instead: this file doesn't change any more.
        copy.hardlink_to(path)

    def close(self) -> None:
        """Another daemon may have it."""
        os.close(self._lock)


def _set_aside(path: Path) -> str:
    """The name that it has now, "" where it can't be renamed."""
    name = f"aside.{path.name.partition('.')[0]}"
    # A directory gives its name to no file, and one with something in it to nothing.
    for each in (name, *(f"{name}.{number}" for number in range(1, MAX_ASIDE))):
        with suppress(OSError):
            return path.rename(path.with_name(each)).name
    return ""
