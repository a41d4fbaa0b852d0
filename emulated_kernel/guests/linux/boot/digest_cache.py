"""Digest cache: remembers the results of reading whole files until the files change.

A result is kept in a small file, which is called a note. The name of a note is a hash of the identity and
change time of the file that was read.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.util.safe_read import identity, open_regular, replace_file

SUFFIX = ".read"
MAKING = ".reading-"
_LIMIT = 32
"""Maximum number of notes (remembered results); if there are more, the least recently used are removed."""
_LONGEST = 256
_SECOND = 10**9
_SETTLED = 2.0
"""Age in seconds from which a file's change time identifies its content.

Two changes within a shorter time may leave a file with the same timestamps.
"""


class Reading(NamedTuple):
    """A file that is about to be read, and the remembered result of an earlier reading.

    `note`: path of the note in which the result is kept. `stored`: the result that remember() has stored for
    the file's present content; None if there is none. `is_settled`: whether the change time identifies the
    content. If it is False, the result of this reading is not remembered.
    """

    note: Path
    stored: str | None
    is_settled: bool


def about_to_read(directory: Path, file: int, form: str) -> Reading:
    """Return a Reading of a file, with the remembered result of an earlier reading.

    `directory`: contains the notes. `file`: descriptor of the file. `form`: a regular expression; a
    remembered result that does not match it is ignored. Raises: OSError (the file's status cannot be read).
    """
    note = _note(directory, file)
    stored = None
    with suppress(OSError, ValueError), open_regular(note) as found:
        text = found.read(_LONGEST).decode("ascii")
        if is_own(found.fileno()) and re.fullmatch(form, text):
            stored = text
            # Use the descriptor: in a directory of another user, the name may refer to another file by now.
            os.utime(found.fileno())
    changed = os.fstat(file).st_ctime_ns
    # A time in whole seconds does not come from the host's kernel: disk images and servers set any time.
    is_settled = bool(changed % _SECOND) and time.time_ns() - changed > _SETTLED * _SECOND
    return Reading(note, stored, is_settled)


def remember(reading: Reading, text: str) -> None:
    """Write a note with `text`, the result of reading a file.

    `reading`: the result of about_to_read() for the file. If the file's change time does not identify its
    content, or if no note can be written, do nothing; the file is then read again next time.
    """
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
    """Return when the note of a file was last written or used, in seconds since 1970.

    Return 0 if the file has no note (remembered result). `directory`: contains the notes. `file`: descriptor
    of the file.
    """
    with suppress(OSError):
        return _note(directory, file).stat().st_mtime
    return 0.0


def _note(directory: Path, file: int) -> Path:
    # Writing updates the change time, and no program can set that back.
    # Deviates: the time is not updated if a mapping has already changed the page.
    facts = *identity(file), os.fstat(file).st_ctime_ns
    return directory / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}{SUFFIX}"


def notes(directory: Path) -> list[Path]:
    """Return the paths of all notes (files with remembered results) in a directory."""
    return list(directory.glob(f"*{SUFFIX}"))


def is_own(file: int) -> bool:
    """Return True if no other user can have written to the file with descriptor `file`.

    Return False if the file has another owner, or if its group or others may write to it. Raises: OSError
    (the file's status cannot be read).
    """
    status = os.fstat(file)
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
