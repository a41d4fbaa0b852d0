"""Kinds of files: sequences of records, single values, commands and streams."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar, Protocol, TypeVar

from emulated_kernel.util.abi import HostfsWriter
from emulated_kernel.util.control_lock import PAUSE
from emulated_kernel.util.errors import KernelError, YieldLock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.kstrtox import ascii_lines
from emulated_kernel.vfs.core.open_file import File, Moves, OpenFile, Piece, Steps, encode, finish
from emulated_kernel.vfs.core.shared_text import EMPTY, SharedText, shared

PIECE_SIZE = 1 << 10
"""Minimum size in bytes of a piece of event definitions; the piece ends at the next newline.

Executing a piece takes some milliseconds.
"""
SPLIT_SIZE = (128 << 10) - 4096
"""Minimum size in bytes of a write that may be a part of a longer write(2).

FUSE splits writes at 128 KiB, or up to a page earlier if the data does not begin at a page boundary.
"""
RECORDS_PER_STEP = 4096
"""Number of records that a read renders before it releases the control lock for a moment."""
Records = Callable[[int], Iterable[str]]
"""Function that returns a file's records from an index on.

Each read(2) that needs further records calls the function again.
"""
Store = Callable[[bytes], None]
"""Function that executes a write and takes all its data. Raises: KernelError."""
Execute = Callable[[bytes], int]
"""Function that executes a write and returns the number of bytes taken. Raises: KernelError."""
ExecuteSteps = Callable[[bytes], Steps]
"""Function that executes a write in steps. Raises: KernelError."""
Taken = TypeVar("Taken", int, None)
T = TypeVar("T")


def explained(
    log: Callable[[str], None], file: str, execute: Callable[[bytes], Taken]
) -> Callable[[bytes], Taken]:
    """Wrap `execute`: write the message of a KernelError that `execute` raises to the kernel log.

    `file` names the file in the message. The writing process sees only the errno.
    """

    def explaining(data: bytes) -> Taken:
        try:
            return execute(data)
        except KernelError as error:
            log(f"{file}: {error.strerror}")
            raise

    return explaining


def explained_steps(log: Callable[[str], None], file: str, execute: ExecuteSteps) -> ExecuteSteps:
    """Wrap `execute`: if a step raises a KernelError, write the error's message to the kernel log.

    `file` names the file in the message.
    """

    def explaining(data: bytes) -> Steps:
        try:
            return (yield from execute(data))
        except KernelError as error:
            log(f"{file}: {error.strerror}")
            raise

    return explaining


def each_line(
    log: Callable[[str], None], file: str, parsed: Callable[[str], Callable[[], None]]
) -> ExecuteSteps:
    """Return a function that parses all lines of a write, and then executes the lines, one line in each step.

    `parsed` parses a line, and returns the function that executes the line. If a line fails, the lines
    before it have been executed. `log` writes the message of a KernelError to the kernel log, with the
    file's name `file`.
    """

    def execute(data: bytes) -> Steps:
        for number, command in enumerate([parsed(line) for line in ascii_lines(data)]):
            if number:
                yield
            command()
        return len(data)

    return explained_steps(log, file, execute)


def listing(records: Callable[[], Iterable[str]]) -> Records:
    """Return a Records function that takes the records of a file from the iterable that `records` returns."""
    return lambda index: islice(records(), index, None)


def listing_of(objects: Callable[[], Iterable[T]], show: Callable[[T], str]) -> Records:
    """Return a Records function for a file with one record for each object.

    `show` renders an object when a read needs its record.
    """
    return lambda index: map(show, islice(objects(), index, None))


class RecordStream:
    """A Records function for one open file, which takes the records from one iterator.

    A read at the beginning of the file calls `begin` to get a new iterator. Other requests may run between
    two records.
    """

    def __init__(self, begin: Callable[[], Iterator[str]]) -> None:
        self._begin = begin
        self._records: Iterator[str] = iter(())

    def __call__(self, index: int) -> Iterator[str]:
        """Return the records from `index` on, which must be the index of the next record, or 0."""
        if index == 0:
            self._records = self._begin()
        return self._records


def single(show: Callable[[], str]) -> Records:
    """Return a Records function for a file of one record, the result of `show`.

    Mirrors: fs/seq_file.c:single_open.
    """
    return lambda index: (show() for _ in range(index, 1))


class WrittenList(Protocol):
    """Interface of a list that a file shows, to which a write adds entries, and which O_TRUNC clears."""

    def records_from(self, start: int) -> Iterable[str]:
        """Return the lines of the file from index `start` on. The file has one line for each entry."""

    def write(self, data: bytes) -> int:
        """Execute one write, and return the number of bytes taken. Raises: KernelError."""

    def clear(self) -> None:
        """Remove all entries of the list. Raises: KernelError EBUSY (an entry is in use)."""


class Edit(Protocol):
    """Interface of the changes that a client makes to a list through one open file.

    close() applies the changes.
    """

    def records_from(self, index: int) -> Iterable[str]:
        """Return the records that the open file shows, from `index` on."""

    def write(self, data: bytes, position: int) -> int:
        """Execute one write at `position`, and return the number of bytes taken. Raises: KernelError."""

    @property
    def is_pending(self) -> bool:
        """Whether close() would change the list."""

    def close(self) -> None:
        """Apply the changes to the list. The last close of the open file calls this."""

    def goes_on_from(self, other: Any, /) -> None:
        """Take over the changes of `other`, the Edit of the same open file before a reboot."""


class EditedList(Protocol):
    """Interface of a list that clients change through Edit objects."""

    def records_from(self, index: int) -> Iterable[str]:
        """Return the lines that the file shows: one for each entry from `index` on, with its newline."""

    def edit(self, *, truncate: bool) -> Edit:
        """Return an Edit for a file that is opened for writing. `truncate`: whether O_TRUNC is set."""


class Stream(Protocol):
    """Interface of a reader that consumes its data, such as an open trace_pipe."""

    def read(self, size: int, *, nonblock: bool = False) -> bytes:
        """Return at most `size` bytes, or b"" at the end of the stream. Raises: WouldBlock (no data yet).

        `nonblock` is True if O_NONBLOCK is set for the open file now.
        """

    def ready(self) -> bool:
        """Return True if read() would return data."""

    def wait(self, timeout: float) -> None:
        """Wait until read() may return data, for at most `timeout` seconds."""

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call `notify` once, from any thread, when read() would return data."""

    def close(self) -> None:
        """Release the reader's resources and wake all waiting readers."""


class SeqReader:
    """Reads records as a seq_file does, with a buffer of whole records that are rendered when needed.

    A read at position 0 starts again from the first record. A read that begins where the last read ended
    returns the rest of the last record, and then the current records from the next index on. A read at any
    other position renders all records before the position, and drops them. Between two reads, only the last
    record is kept. Open files that keep equal long records share one copy.
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
        """Number of bytes from the next record on that are still to be rendered and dropped."""
        self._index = 0
        self._position = 0
        self._is_paused = False
        """Whether the last call of read() raised YieldLock, so that the next call continues it."""

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
        for record in self._records(self._index):
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
    """A file of records, which are rendered when they are read. Without records, read(2) returns EINVAL.

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


class OpenCommand(OpenSeq):
    """An open CommandFile, whose writes execute commands."""

    node: CommandFile

    def __init__(self, node: CommandFile, flags: int, client: Client) -> None:
        super().__init__(node, flags, client)
        if node.truncate is not None and self.writable and flags & os.O_TRUNC:
            node.truncate()

    def _write(self, data: bytes) -> int:
        return self.node.execute(data)


class CommandFile(SeqFile):
    """A file of records to read and commands to write. Each write(2) executes all its data before it returns.

    Opening the file for writing with O_TRUNC calls `truncate`. open(2) returns the errno that `truncate`
    raises.
    """

    opened_as: ClassVar[type[OpenFile]] = OpenCommand
    __slots__ = ("execute", "truncate")

    def __init__(
        self,
        mode: int,
        records: Records | None,
        execute: Execute,
        truncate: Callable[[], None] | None = None,
        *,
        moves: Moves = Moves.NOT,
    ) -> None:
        super().__init__(mode, records, moves)
        self.execute = execute
        self.truncate = truncate


class GuestCommandFile(CommandFile):
    """A CommandFile whose commands run guest code."""

    runs_guest = True
    __slots__ = ()


class _OpenStepped(OpenCommand):
    node: SteppedFile

    def _write_steps(self, data: bytes) -> Steps:
        return self.node.execute_steps(data)


class SteppedFile(CommandFile):
    """A CommandFile whose writes are executed in steps, between which other requests may run.

    If a line fails, the line changes nothing, but the lines before it keep their effect.
    """

    opened_as = _OpenStepped
    __slots__ = ("execute_steps",)

    def __init__(
        self,
        mode: int,
        records: Records | None,
        execute: ExecuteSteps,
        truncate: Callable[[], None] | None = None,
        *,
        moves: Moves = Moves.NOT,
    ) -> None:
        super().__init__(mode, records, lambda data: finish(execute(data)), truncate, moves=moves)
        self.execute_steps = execute


class GuestSteppedFile(SteppedFile):
    """A SteppedFile whose commands run guest code."""

    runs_guest = True
    __slots__ = ()


class MarkerFile(CommandFile):
    """A CommandFile whose writes are recorded together with the writing task: trace_marker."""

    notes_writer = True
    has_position = False
    writer = HostfsWriter.TRACING_MARK
    __slots__ = ()


class RawMarkerFile(MarkerFile):
    """A MarkerFile whose writes are binary data: trace_marker_raw."""

    writer = HostfsWriter.TRACING_MARK_RAW
    __slots__ = ()


class _OpenLines(OpenCommand):
    """An open LinesFile, which keeps an unfinished line if the front end splits a write(2) within the line.

    Linux never splits a write(2). Deviates: if a later part of the write(2) fails, the earlier parts have
    been executed.
    """

    _unfinished = b""

    @property
    def is_between_parts(self) -> bool:
        return bool(self._unfinished)

    @property
    def acts_on_close(self) -> bool:
        return bool(self._unfinished)

    def _write(self, data: bytes) -> int:
        before = self._unfinished
        self._unfinished = b""
        end = data.rfind(b"\n") + 1 if self._is_part else len(data)
        taken = self.node.execute(before + data[:end]) - len(before)
        if taken < end:
            return max(taken, 0)
        self._unfinished = data[end:]
        return len(data)

    def pieces(self, data: bytes) -> list[Piece]:
        """Split the data of one write(2) into pieces of whole lines.

        Other requests may run between two pieces. Linux takes its lock for each line separately.
        """
        found = []
        start = 0
        while start < len(data):
            end = data.find(b"\n", start + PIECE_SIZE) + 1 or len(data)
            found.append(Piece(data[start:end]))
            start = end
        if len(data) >= SPLIT_SIZE > len(data) - data.rfind(b"\n") - 1 > 0:
            found[-1] = found[-1]._replace(is_part=True)
        return found or [Piece(data)]

    def release(self) -> None:
        if self._unfinished:
            with suppress(KernelError):
                self.node.execute(self._unfinished)


class LinesFile(GuestCommandFile):
    """A GuestCommandFile whose commands are lines, such as event definitions.

    A line is executed as a whole, even if a front end splits a long write(2) within the line.
    """

    opened_as = _OpenLines
    __slots__ = ()


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
    """A file of an EditedList. A client's writes take effect when its open file is closed."""

    opened_as = _OpenEdited
    __slots__ = ("entries",)

    def __init__(self, mode: int, entries: EditedList) -> None:
        super().__init__(mode, entries.records_from)
        self.entries = entries


class _OpenHostReading(OpenSeq):
    node: HostReadingFile

    def prepare(self, client: Client, data: bytes) -> Callable[[], Steps]:
        return self.node.prepare(client, data)


class HostReadingFile(PerClientFile):
    """A PerClientFile whose commands name host files, which are read before the control lock is taken."""

    opened_as = _OpenHostReading
    runs_guest = True
    reads_host = True
    __slots__ = ("prepare",)

    def __init__(
        self,
        mode: int,
        records_for: Callable[[Client], Records],
        prepare: Callable[[Client, bytes], Callable[[], Steps]],
    ) -> None:
        """Create the file. `prepare` reads host files, and returns a function that begins the write."""
        super().__init__(mode, records_for, Moves.NOT)
        self.prepare = prepare


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


class _OpenAttribute(OpenFile):
    node: AttributeFile
    _text: SharedText | None = None

    def _read(self, size: int, position: int) -> bytes:
        if self.node.show is None:
            return super()._read(size, position)
        if position == 0 or self._text is None:
            self._text = shared(encode(self.node.show()))
        return self._text.data[position : position + size]

    def _write(self, data: bytes) -> int:
        if self.node.store is None:
            return super()._write(data)
        self.node.store(data)
        # If a client has read a part of the old text, its next read continues in the text of the new value.
        self._text = None
        return len(data)


class AttributeFile(File):
    """A file of one value. A read at 0 renders the value, and later reads return further parts of its text.

    If `show` is None, read(2) returns EINVAL. If `store` is None, write(2) returns EINVAL.
    """

    opened_as = _OpenAttribute
    __slots__ = ("show", "store")

    def __init__(
        self,
        mode: int,
        show: Callable[[], str] | None,
        store: Store | None = None,
        moves: Moves = Moves.BY_BYTES,
    ) -> None:
        super().__init__(mode, moves)
        self.show = show
        self.store = store


class UnseekableAttribute(AttributeFile):
    """An AttributeFile whose file_operations in Linux have no llseek."""

    has_position = False
    __slots__ = ()


class _OpenSteppedAttribute(_OpenAttribute):
    node: SteppedAttribute

    def _write_steps(self, data: bytes) -> Steps:
        yield from self.node.store_steps(data)
        return len(data)


class SteppedAttribute(AttributeFile):
    """An AttributeFile whose writes take effect in steps. Other requests may run between two steps."""

    opened_as = _OpenSteppedAttribute
    __slots__ = ("store_steps",)

    def __init__(
        self, mode: int, show: Callable[[], str], store_steps: Callable[[bytes], Iterator[None]]
    ) -> None:
        super().__init__(mode, show)
        self.store_steps = store_steps


class _OpenOneRead(_OpenAttribute):
    def _read(self, size: int, position: int) -> bytes:
        return b"" if position else super()._read(size, position)


class OneReadFile(AttributeFile):
    """A file of one value, of which only a read at position 0 returns text.

    Text that does not fit into the buffer of this read is not returned by later reads. The files `filter`
    of events behave so.
    Mirrors: kernel/trace/trace_events.c:event_filter_read (v6.1).
    """

    opened_as = _OpenOneRead
    __slots__ = ()


class _OpenSysctl(_OpenOneRead):
    def _write(self, data: bytes) -> int:
        return len(data) if self._write_at else super()._write(data)


class SysctlFile(OneReadFile):
    """A file of /proc/sys. At a position other than 0, a read returns nothing, and a write is ignored.

    This is the behaviour of Linux if the sysctl kernel.sysctl_writes_strict has its default value, 1.
    Mirrors: kernel/sysctl.c:__do_proc_dointvec, proc_first_pos_non_zero_ignore (v6.1).
    """

    opened_as = _OpenSysctl
    __slots__ = ()


class OpenPipe(OpenFile):
    """An open PipeFile, whose reads consume the stream."""

    def __init__(self, node: PipeFile, flags: int, client: Client) -> None:
        """Connect to the stream. Raises: KernelError EBUSY (the stream has a reader and allows only one)."""
        super().__init__(node, flags, client)
        self._source = node.connect()

    def _read(self, size: int, position: int) -> bytes:
        del position
        return self._source.read(size, nonblock=bool(self.flags & os.O_NONBLOCK))

    def poll(self, notify: Callable[[], None] | None = None) -> int:
        if notify is not None:
            self._source.subscribe(notify)
        return select.POLLIN | select.POLLRDNORM if self._source.ready() else 0

    def wait(self, timeout: float) -> None:
        self._source.wait(timeout)

    def release(self) -> None:
        self._source.close()


class PipeFile(File):
    """A file without a position, whose reads consume a stream and block while the stream is empty."""

    has_position = False
    opened_as = OpenPipe
    __slots__ = ("connect",)

    def __init__(self, mode: int, connect: Callable[[], Stream]) -> None:
        super().__init__(mode)
        self.connect = connect
