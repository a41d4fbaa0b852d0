"""Reads and writes journals: files of entries with checksums, whose writer may be killed at any time."""

from __future__ import annotations

import json
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.safe_read import open_regular

Entry = dict[str, Any]
"""Entry of a journal: a JSON object. Its text has surrogates for bytes that are not UTF-8."""
_FRAME = struct.Struct("<II")
"""Layout of the header of an entry: size of its text in bytes, and CRC-32 of the text."""
_SIZE_LIMIT = 1 << 26
"""Maximum size in bytes of an entry's text."""


@dataclass(frozen=True)
class JournalText:
    """Content of a journal: the readable entries, and the number of unreadable bytes after them."""

    entries: list[Entry]
    lost: int
    """Number of bytes after `entries` that cannot be read."""


def read(path: Path) -> JournalText:
    """Return all entries of a journal up to the first damaged entry. Raises: OSError."""
    entries: list[Entry] = []
    read = 0
    with open_regular(path) as file:
        # A damaged header cannot make _entry() read more than _SIZE_LIMIT.
        while (entry := _entry(file)) is not None:
            entries.append(entry)
            read = file.tell()
        return JournalText(entries, os.fstat(file.fileno()).st_size - read)


def _entry(file: BinaryIO) -> Entry | None:
    """Read the next entry of the journal `file` and return it.

    Return None at the end, or if the entry is damaged.
    """
    frame = file.read(_FRAME.size)
    if len(frame) != _FRAME.size:
        return None
    size, checksum = _FRAME.unpack(frame)
    text = file.read(size) if size <= _SIZE_LIMIT else b""
    if len(text) != size or zlib.crc32(text) != checksum:
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def encoded(entry: Entry) -> bytes:
    """Return an entry as a journal contains it: a header and the text.

    Raises: OSError (the entry is too long).
    """
    text = json.dumps(entry, separators=(",", ":")).encode()
    if len(text) > _SIZE_LIMIT:
        raise OSError(None, "an entry that is too long")
    return _FRAME.pack(len(text), zlib.crc32(text)) + text


class Journal:
    """A journal to which entries are appended.

    The journal is written to a new file. When the first entries are written, the new file replaces the file
    at `path`.
    """

    def __init__(self, path: Path, data: bytes) -> None:
        """Write a new journal with the encoded entries `data`, in place of the file at `path`.

        Raises: OSError (the entries cannot be written; the file at `path` is then unchanged).
        """
        new = path.with_name(f"{path.name}.new")
        with suppress(FileNotFoundError):
            new.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(new, flags, 0o600), "wb", buffering=0)
        self.size = 0
        """Size of all entries in bytes, with their headers."""
        try:
            self.append(data)
            os.fsync(self._file.fileno())
            new.rename(path)
        except OSError:
            self._file.close()
            with suppress(OSError):
                new.unlink()
            raise

    def append(self, data: bytes) -> None:
        """Append the encoded entries `data` to the journal.

        Raises: OSError (they cannot be written; then nothing is appended).
        """
        try:
            taken = self._file.write(data)
            while taken < len(data):
                taken += self._file.write(data[taken:])
        except OSError:
            # Entries after a partial one could not be read.
            with suppress(OSError):
                self._file.truncate(self.size)
            raise
        self.size += len(data)

    def close(self) -> None:
        """Close the journal's file."""
        self._file.close()
