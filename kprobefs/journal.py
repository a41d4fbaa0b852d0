"""A journal: a file of entries with lengths and checksums, whose writer may end at any moment."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from emulated_kernel.dataclass import dataclass

Entry = dict[str, Any]
"""What JSON can say; text has surrogates for bytes that are no UTF-8."""
_FRAME = struct.Struct("<II")
"""Bytes of the entry, and their CRC-32."""
_SIZE_LIMIT = 1 << 26


@dataclass(frozen=True)
class JournalText:
    """What a journal says, up to what can't be read any more."""

    entries: list[Entry]
    lost: int
    """Bytes behind them."""


def read(path: Path) -> JournalText:
    """All entries up to the first that isn't whole. Raises: OSError."""
    data, at = path.read_bytes(), 0
    entries: list[Entry] = []
    while at + _FRAME.size <= len(data):
        size, checksum = _FRAME.unpack_from(data, at)
        text = data[at + _FRAME.size : at + _FRAME.size + size]
        if len(text) != size or zlib.crc32(text) != checksum:
            break
        try:
            entry = json.loads(text)
        except ValueError:
            break
        if not isinstance(entry, dict):
            break
        entries.append(entry)
        at += _FRAME.size + size
    return JournalText(entries, len(data) - at)


class Journal:
    """A journal that is written; it takes the place of the file of its name once it has its first entries."""

    def __init__(self, path: Path, entries: Iterable[Entry]) -> None:
        """Raises: OSError, with the file of that name left alone."""
        new = path.with_name(f"{path.name}.new")
        with suppress(FileNotFoundError):
            new.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(new, flags, 0o600), "wb", buffering=0)
        self.size = 0
        """Bytes."""
        try:
            for entry in entries:
                self.append(entry)
            os.fsync(self._file.fileno())
            new.rename(path)
        except OSError:
            self._file.close()
            with suppress(OSError):
                new.unlink()
            raise

    def append(self, entry: Entry) -> None:
        """Add an entry, which whoever reads the file has from then on. Raises: OSError, nothing added."""
        text = json.dumps(entry, separators=(",", ":")).encode()
        if len(text) > _SIZE_LIMIT:
            raise OSError(None, "an entry that is too long")
        data = _FRAME.pack(len(text), zlib.crc32(text)) + text
        try:
            taken = self._file.write(data)
            while taken < len(data):
                taken += self._file.write(data[taken:])
        except OSError:
            # What comes behind half an entry couldn't be read.
            with suppress(OSError):
                self._file.truncate(self.size)
            raise
        self.size += len(data)

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()
