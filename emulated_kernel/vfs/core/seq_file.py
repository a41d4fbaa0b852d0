"""Files of records, which reads render as Linux's seq_file does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import ClassVar, TypeVar

from emulated_kernel.util.control_lock import END, PAUSE
from emulated_kernel.util.errors import YieldLock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.open_file import File, Moves, OpenFile, encode
from emulated_kernel.vfs.core.shared_text import EMPTY, shared

RECORDS_PER_STEP = 4096
"""Number of records that a read renders before it releases the control lock for a moment."""
Records = Callable[[int], Iterable[str]]
"""Function that returns a file's records from an index on.

Each read(2) that needs further records calls the function again.
"""
T = TypeVar("T")


def listing(records: Callable[[], Iterable[str]]) -> Records:
    """Return a Records function for a file.

    `records` returns all records of the file. It is called again for each read(2) that needs further ones.
    """
    return lambda index: islice(records(), index, None)


def listing_of(objects: Callable[[], Iterable[T]], show: Callable[[T], str]) -> Records:
    """Return a Records function for a file with one record for each object.

    `show` renders an object when a read needs its record.
    """
    return lambda index: map(show, islice(objects(), index, None))


class RecordStream:
    """A function of type Records for one open file, which keeps its iterator between two reads.

    A read at the beginning of the file calls the constructor's `begin` to get a new iterator. Other requests
    may run between two records.
    """

    def __init__(self, begin: Callable[[], Iterator[str]]) -> None:
        self._begin = begin
        self._records: Iterator[str] = iter(())

    def __call__(self, index: int) -> Iterator[str]:
        """Return the records from `index` on. `index` must be 0 or the index of the next record."""
        if index == 0:
            self._records = self._begin()
        return self._records


def single(show: Callable[[], str]) -> Records:
    """Return a Records function for a file of one record, the result of `show`.

    Mirrors: fs/seq_file.c:single_open.
    """
    return lambda index: (show() for _ in range(index, 1))


class SeqReader:
    """Reads records as a seq_file does, with a buffer of whole records that are rendered when needed.

    A read at position 0 starts again from the first record. A read that begins where the last read ended
    returns the rest of the last record, and then the current records from the next index on. A read at any
    other position renders all records before the position, and drops them. Between two reads, only the last
    record is kept. Open files that keep equal long records share one copy.
    At the record END the file ends once: a read returns no data, and the next read continues after END.
    Mirrors: fs/seq_file.c:seq_read_iter, traverse (v6.1).
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._last = EMPTY
        """The last rendered record if reads have returned only a part of it, or EMPTY."""
        self._start = 0
        """Number of bytes of `_last` that reads have returned."""
        self._buffer = b""
        """The data that an unfinished read has rendered so far."""
        self._skipped = 0
        """Number of bytes, from the next record on, that the current read must still render and drop."""
        self._index = 0
        self._position = 0
        self._is_paused = False
        """Whether the last call of read() raised YieldLock, and the next call continues the read."""
        self._is_at_end = False
        """Whether the last read returned the data before an END, and the next read returns no data."""

    def read(self, size: int, position: int) -> bytes:
        """Return at most `size` bytes from the file position `position` on, or b"" at the end.

        Raises: YieldLock (more records must be rendered: call again to continue).
        """
        if position != self._position or (position == 0 and not self._is_paused):
            self._last = EMPTY
            self._start = 0
            self._buffer = b""
            self._skipped = position
            self._index = 0
            self._position = position
            self._is_at_end = False
        elif self._is_at_end:
            self._is_at_end = False
            return b""
        elif not self._is_paused:
            self._buffer = self._last.data[self._start : self._start + size]
            self._start += len(self._buffer)
        self._is_paused = True
        self._fill(size)
        self._is_paused = False
        data = self._buffer[:size]
        self._buffer = b""
        self._position += len(data)
        return data

    def _fill(self, size: int) -> None:
        missing = self._skipped + size - len(self._buffer)
        if missing <= 0:
            return
        rendered: list[bytes] = []
        is_paused = False
        has_ended = False
        for record in self._records(self._index):
            if record is END:
                has_ended = True
                break
            rendered.append(encode(record))
            missing -= len(rendered[-1])
            if missing <= 0:
                break
            if record is PAUSE or len(rendered) >= RECORDS_PER_STEP:
                is_paused = True
                break
        self._index += len(rendered)
        data = b"".join(rendered)
        self._buffer += data[self._skipped :]
        self._skipped = max(0, self._skipped - len(data))
        self._is_at_end = has_ended and bool(self._buffer)
        if is_paused:
            raise YieldLock
        self._last = shared(rendered[-1]) if missing < 0 else EMPTY
        self._start = len(self._last.data) + min(missing, 0)


class OpenSeq(OpenFile):
    """An open SeqFile, whose SeqReader renders the records that a read needs."""

    node: SeqFile

    def __init__(self, node: SeqFile, flags: int, client: Client) -> None:
        super().__init__(node, flags, client)
        records = node.records_for(client)
        self._reader = None if records is None or not self.readable else SeqReader(records)

    def _read(self, size: int, position: int) -> bytes:
        if self._reader is None:
            return super()._read(size, position)
        return self._reader.read(size, position)


class SeqFile(File):
    """A file of records, which are rendered when they are read. If `records` is None, read(2) returns EINVAL.

    Linux: root can open the file for writing, and write(2) returns EINVAL.
    """

    opened_as: ClassVar[type[OpenFile]] = OpenSeq
    __slots__ = ("_records",)

    def __init__(self, mode: int, records: Records | None, moves: Moves = Moves.BY_BYTES) -> None:
        super().__init__(mode, moves)
        self._records = records

    def records_for(self, client: Client) -> Records | None:
        """Return the records for a client that opens the file, or None if read(2) returns EINVAL."""
        del client
        return self._records


class StreamFile(SeqFile):
    """A SeqFile whose records come from one iterator for each open file; see RecordStream."""

    __slots__ = ("_begin",)

    def __init__(self, mode: int, begin: Callable[[], Iterator[str]]) -> None:
        super().__init__(mode, None)
        self._begin = begin

    def records_for(self, client: Client) -> Records:
        del client
        return RecordStream(self._begin)


class PerClientFile(SeqFile):
    """A SeqFile whose records depend on the client that opens it."""

    __slots__ = ("_records_for",)

    def __init__(
        self, mode: int, records_for: Callable[[Client], Records], moves: Moves = Moves.BY_BYTES
    ) -> None:
        super().__init__(mode, None, moves)
        self._records_for = records_for

    def records_for(self, client: Client) -> Records:
        return self._records_for(client)
