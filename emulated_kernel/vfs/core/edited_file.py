"""Files whose close has an effect: lists that clients edit, and free_buffer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.open_file import File, OpenFile
from emulated_kernel.vfs.core.seq_file import OpenSeq, Records, SeqFile, SeqReader


class Edit(Protocol):
    """Interface of the changes that a client makes to a list through one open file.

    close() applies the changes.
    """

    def records_from(self, index: int) -> Iterable[str]:
        """Return the records that the open file shows, from `index` on."""

    def write(self, data: bytes, position: int) -> int:
        """Execute one write at the file position `position`, and return the number of bytes taken.

        Raises: KernelError (the errno of the write).
        """

    @property
    def is_pending(self) -> bool:
        """Whether close() would change the list."""

    def close(self) -> None:
        """Apply the changes to the list. The last close of the open file calls this."""

    def goes_on_from(self, other: Any, /) -> None:
        """Take over the changes of `other`, the Edit of the same open file before a reboot."""


class EditedList(Protocol):
    """Interface of a list that clients change through Edit objects."""

    def records_at_open(self) -> Callable[[int], Iterable[str]]:
        """Return a function that renders the lines for a file that is being opened for reading.

        The function takes an index, and returns the lines from this index on: one for each entry, with a
        newline.
        """

    def edit(self, *, truncate: bool) -> Edit:
        """Return an Edit for a file that is opened for writing. `truncate`: whether O_TRUNC is set."""


class _OpenEdited(OpenSeq):
    node: EditedFile

    def __init__(self, node: EditedFile, flags: int, client: Client) -> None:
        super().__init__(node, flags, client)
        self._edit = node.entries.edit(truncate=bool(flags & os.O_TRUNC)) if self.writable else None
        if self._edit is not None:
            self._reader = SeqReader(self._edit.records_from)

    def _write(self, data: bytes) -> int:
        assert self._edit is not None, "write() has checked the access mode"
        return self._edit.write(data, self._write_at)

    @property
    def is_between_parts(self) -> bool:
        return self._edit is not None and self._edit.is_pending

    @property
    def acts_on_close(self) -> bool:
        return self.writable

    def goes_on_from(self, other: OpenFile) -> None:
        super().goes_on_from(other)
        if self._edit is not None and isinstance(other, _OpenEdited):
            self._edit.goes_on_from(other._edit)

    def release(self) -> None:
        if self._edit is not None:
            self._edit.close()


class EditedFile(SeqFile):
    """A file of an EditedList. A client's writes take effect when the client's open file is closed."""

    opened_as = _OpenEdited
    __slots__ = ("entries", "records_at_open")

    def __init__(self, mode: int, entries: EditedList) -> None:
        super().__init__(mode, None)
        self.entries = entries
        self.records_at_open = entries.records_at_open

    def records_for(self, client: Client) -> Records:
        del client
        return self.records_at_open()


class _OpenLastClose(OpenFile):
    node: LastCloseFile

    def _write(self, data: bytes) -> int:
        return len(data)

    def release(self) -> None:
        self.node.on_close()


class LastCloseFile(File):
    """A file whose last close has an effect, such as free_buffer. Writes do nothing and cannot fail."""

    opened_as = _OpenLastClose
    has_position = False
    __slots__ = ("on_close",)

    def __init__(self, mode: int, on_close: Callable[[], None]) -> None:
        super().__init__(mode)
        self.on_close = on_close
