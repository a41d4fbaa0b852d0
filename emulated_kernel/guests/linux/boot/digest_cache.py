"""What was found by reading a whole file, told again without reading as long as it is the same file."""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from emulated_kernel.util.safe_read import identity, open_regular, replace_file

SUFFIX = ".read"
MAKING = ".reading-"
_LIMIT = 32
"""Notes that are kept; what wasn't used for the longest goes first."""
_LONGEST = 256
_SECOND = 10**9
_SETTLED = 2.0
"""Seconds; a change that follows another sooner than that may leave a file with the same times."""


class Reading(NamedTuple):
    """A file that is about to be read; `told` of it before: what remember() was given."""

    note: Path
    told: str | None
    is_settled: bool


def about_to_read(directory: Path, file: int, form: str) -> Reading:
    """`directory`: where notes are; `form`: a regular expression for what is to be found.

    Raises: OSError (of the file).
    """
    note = _note(directory, file)
    told = None
    with suppress(OSError, ValueError), open_regular(note) as found:
        text = found.read(_LONGEST).decode("ascii")
        if is_own(found.fileno()) and re.fullmatch(form, text):
            told = text
            # By the descriptor: in a directory of others the name may be another file's by now.
            os.utime(found.fileno())
    changed = os.fstat(file).st_ctime_ns
    # Whole seconds are no time that the host's kernel has given: an image or a server has them as it likes.
    is_settled = bool(changed % _SECOND) and time.time_ns() - changed > _SETTLED * _SECOND
    return Reading(note, told, is_settled)


def remember(reading: Reading, text: str) -> None:
    """Say what was found. Where nothing can be written the file is read again the next time."""
    directory = reading.note.parent
    if not reading.is_settled or not directory.is_dir():
        return

    def write(file: IO[bytes]) -> None:
        file.write(text.encode("ascii"))

    with suppress(OSError):
        replace_file(reading.note, MAKING, write)
        for _, old in sorted((-note.stat().st_mtime, note) for note in notes(directory))[_LIMIT:]:
            old.unlink()


def last_read(directory: Path, file: int) -> float:
    """When somebody was told last, in seconds since 1970; 0: never. Raises: OSError (of the file)."""
    with suppress(OSError):
        return _note(directory, file).stat().st_mtime
    return 0.0


def _note(directory: Path, file: int) -> Path:
    # Writing sets the time of the last change, which nobody sets back. Deviates: it doesn't where a mapping
    # has changed the same page before.
    facts = *identity(file), os.fstat(file).st_ctime_ns
    return directory / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}{SUFFIX}"


def notes(directory: Path) -> list[Path]:
    """All of a directory."""
    return list(directory.glob(f"*{SUFFIX}"))


def is_own(file: int) -> bool:
    """Whether nobody else can have written it. Raises: OSError."""
    status = os.fstat(file)
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
