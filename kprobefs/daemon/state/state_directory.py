"""StateDirectory: locks the directory of a saved state for one daemon, and renames unusable files in it."""

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
"""Seconds between two attempts to lock. A killed daemon holds the lock until its memory is freed."""
DIGITS = 9
"""Maximum number of digits in the file that counts the attempts to restore the state."""
ATTEMPTS = 3
"""Maximum number of attempts in a row to restore a state.

An attempt is counted when it begins, and a successful one resets the count. So an attempt in which the daemon
is killed counts as failed.
"""
TROUBLE = "trouble "
"""Start of each line of the file machine/state that names a part of the saved state that was not restored.

The mount command prints these lines.
"""
UNKEPT = "kept no"
"""Start of the line of the file machine/state that tells why nothing is saved.

The mount command prints the line.
"""
MAX_ASIDE = 10
"""Maximum number of new names that are tried for a file that cannot be used; see set_aside()."""
_RECORDS = re.compile(r"records\.([0-9]{1,9})")


def pending_warnings(directory: str) -> list[str]:
    """Return the warnings in machine/state of the new mount on `directory`.

    The warnings name the parts of the state that were not restored, and the reason if changes are not saved.
    Return an empty list if there are none, or if machine/state cannot be read.
    """
    from kprobefs.definitions.tracefs_files import control_root

    with suppress(OSError):
        text = (control_root(directory) / "machine" / "state").read_text("utf-8", "surrogateescape")
        lines = [line for line in text.splitlines() if line.startswith((TROUBLE, UNKEPT))]
        unkept = f"{UNKEPT}: "
        meaning = "changes are not saved until this is mended: "
        return [line.removeprefix(TROUBLE).replace(unkept, meaning) for line in lines]
    return []


class RestoreAttempts:
    """Counts, in a file, the attempts to restore a state since the last successful attempt."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> bool:
        """Count a new attempt and return True, or return False if ATTEMPTS attempts are already counted."""
        count = self._count()
        if count >= ATTEMPTS:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError), open(os.open(self._path, flags, 0o600), "w", encoding="ascii") as file:
            file.write(str(count + 1))
        return True

    def _count(self) -> int:
        """Return the number of attempts in the file, or 0 if there is no file.

        If the file contains no number or cannot be read, rename the file and return 0.
        """
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
        """Reset the count to 0, after the state has been restored."""
        with suppress(OSError):
            self._path.unlink()


class StateDirectory:
    """The directory with the files of a saved state, locked for this daemon."""

    def __init__(self, directory: str) -> None:
        """Create the directory if it does not exist, and lock it.

        Raises: CliError (it cannot be opened, is not private to this user, or is used by another daemon).
        """
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
            raise CliError(
                f"--state {directory}: not a private directory of yours; use one that only you can write to"
            )
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
        """Return the paths of all files records.NUMBER, or an empty list if the directory cannot be read."""
        with suppress(OSError):
            return [path for path in self.path.iterdir() if _RECORDS.fullmatch(path.name)]
        return []

    def new_records(self) -> BinaryIO:
        """Create a file of records with a new number, and return it, open for reading and writing.

        Raises: OSError.
        """
        names = {path.name for path in self.records()}
        path = self.path / next(name for number in count(1) if (name := f"records.{number}") not in names)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o600))
        return open(path, "r+b", buffering=0)

    def set_aside(self, *paths: Path) -> list[str]:
        """Rename files that cannot be used, so that users can inspect them.

        The new name is aside.NAME, where NAME is the part of the old name before the first dot. An earlier
        file aside.NAME is replaced. If this is impossible, for example because aside.NAME is a directory, the
        new name is aside.NAME.1 or the next possible one. Return the new names, each once. A file that cannot
        be renamed is left out.
        """
        return list(dict.fromkeys(name for path in paths if (name := _set_aside(path))))

    def copy_aside(self, path: Path) -> None:
        """Create a hard link aside.NAME to the file at `path`; for NAME, see set_aside().

        An earlier file aside.NAME is replaced. Raises: OSError.
        """
        copy = self.path / f"aside.{path.name.partition('.')[0]}"
        with suppress(FileNotFoundError):
            copy.unlink()
        # A new file replaces this one, which does not change any more.
        copy.hardlink_to(path)

    def close(self) -> None:
        """Unlock the directory, so that another daemon can use it."""
        os.close(self._lock)


def _set_aside(path: Path) -> str:
    """Rename a file that cannot be used; see set_aside().

    Return its new name, or "" if it cannot be renamed.
    """
    name = f"aside.{path.name.partition('.')[0]}"
    # rename(2) does not replace a directory by a file.
    for each in (name, *(f"{name}.{number}" for number in range(1, MAX_ASIDE))):
        with suppress(OSError):
            return path.rename(path.with_name(each)).name
    return ""
