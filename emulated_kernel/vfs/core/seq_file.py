"""Kinds of files: sequences of records, single values, commands, streams."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import ClassVar, Protocol, TypeVar

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.open_file import File, OpenFile, Piece, encode

PIECE_SIZE = 1 << 10
"""Bytes of definitions, and the rest of a line, that are taken at once: some ms of work."""
SPLIT_SIZE = (128 << 10) - 4096
"""A write of at least so many bytes may be a part of a longer one: FUSE splits at 128 KiB, less an offset."""
_USUAL_SIZE = 256
"""Bytes that most records stay below; fewer are rendered at a time than a read takes of such."""
Records = Callable[[int], Iterable[str]]
"""Records of a file from an index on; asked for anew by each read(2) that needs more of them."""
Store = Callable[[bytes], None]
"""What a write does, in that write; all of the data is taken. Raises: KernelError."""
Execute = Callable[[bytes], int]
"""What a write does, in that write; returns the number of bytes taken. Raises: KernelError."""
Taken = TypeVar("Taken", int, None)


def explained(
    log: Callable[[str], None], file: str, execute: Callable[[bytes], Taken]
) -> Callable[[bytes], Taken]:
    """`execute`, of whose failures the kernel log tells why: a process sees no more than an errno."""

    def explaining(data: bytes) -> Taken:
        try:
            return execute(data)
        except KernelError as error:
            log(f"{file}: {error.strerror}")
            raise

    return explaining


def listing(records: Callable[[], Iterable[str]]) -> Records:
    """Records of a file from a callable that gives all of them."""
    return lambda index: islice(records(), index, None)


def single(show: Callable[[], str]) -> Records:
    """A file of one record, rendered once an open. Mirrors: fs/seq_file.c:single_open."""
    return lambda index: (show() for _ in range(index, 1))


class WrittenList(Protocol):
    """A list whose lines are added by writing and all go with O_TRUNC."""

    def records(self) -> Iterable[str]:
        """A line for each, with its newline."""

    def write(self, data: bytes) -> int:
        """Execute one write(2); bytes taken, which may be fewer than given. Raises: KernelError."""

    def clear(self) -> None:
        """Remove all. Raises: KernelError EBUSY (while one is in use)."""


class Stream(Protocol):
    """A consuming reader, such as an open trace_pipe."""

    def read(self, size: int, *, nonblock: bool = False) -> bytes:
        """At most `size` bytes; b"" is the end. Raises: WouldBlock (while there is nothing).

        `nonblock`: the file has O_NONBLOCK now.
        """

    def ready(self) -> bool:
        """Whether read() would give something."""

    def wait(self, timeout: float) -> None:
        """Return once read() may give something, or after `timeout` seconds."""

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call `notify` once, from any thread, when read() would give something."""

    def close(self) -> None:
        """Let go of what the reader holds, and wake all who wait."""


class SeqReader:
    """The buffer of a seq_file: whole records, rendered when a read first needs them.

    Reading at 0 starts anew; a read that continues takes what was rendered before and then the records
    of now, by index; any other position renders up to it. Mirrors: fs/seq_file.c:seq_read_iter (v6.1).
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._buffer = b""
        self._start = 0
        self._index = 0
        self._position = 0

    def read(self, size: int, position: int) -> bytes:
        """At most `size` bytes at `position`."""
        if position == 0 or position != self._position:
            self._buffer = b""
            self._start = position
            self._index = 0
            self._position = position
        self._fill(self._start + size)
        data = self._buffer[self._start : self._start + size]
        self._start += len(data)
        self._position += len(data)
        if self._start == len(self._buffer):
            self._buffer = b""
            self._start = 0
        return data

    def _fill(self, size: int) -> None:
        missing = size - len(self._buffer)
        if missing <= 0:
            return
        records = iter(self._records(self._index))
        rendered = [self._buffer]
        while missing > 0:
            batch = list(islice(records, missing // _USUAL_SIZE + 1))
            if not batch:
                break
            self._index += len(batch)
            rendered.append(encode("".join(batch)))
            missing -= len(rendered[-1])
        self._buffer = b"".join(rendered)


class _OpenSeq(OpenFile):
    node: SeqFile

    def __init__(self, node: SeqFile, flags: int, client: Client) -> None:
        super().__init__(node, flags, client)
        records = node.records_for(client)
        self._reader = None if records is None else SeqReader(records)

    def _read(self, size: int, position: int) -> bytes:
        if self._reader is None:
            return super()._read(size, position)
        return self._reader.read(size, position)


class SeqFile(File):
    """A list of records, rendered when they are first read; with `records` None reading is EINVAL.

    Opening for writing succeeds, as it does for root; writing is EINVAL.
    """

    opened_as: ClassVar[type[OpenFile]] = _OpenSeq
    __slots__ = ("_records",)

    def __init__(self, mode: int, records: Records | None) -> None:
        super().__init__(mode)
        self._records = records

    def records_for(self, client: Client) -> Records | None:
        """What a client sees who opens it."""
        del client
        return self._records


class PerClientFile(SeqFile):
    """Records that depend on who opens the file."""

    __slots__ = ("_records_for",)

    def __init__(self, mode: int, records_for: Callable[[Client], Records]) -> None:
        super().__init__(mode, None)
        self._records_for = records_for

    def records_for(self, client: Client) -> Records:
        return self._records_for(client)


class OpenCommand(_OpenSeq):
    """An open CommandFile."""

    node: CommandFile
    moves_on_write = False

    def __init__(self, node: CommandFile, flags: int, client: Client) -> None:
        super().__init__(node, flags, client)
        if node.truncate is not None and self.writable and flags & os.O_TRUNC:
            node.truncate()

    def _write(self, data: bytes) -> int:
        return self.node.execute(data)


class CommandFile(SeqFile):
    """Records to read, and commands to write: each write(2) is executed by itself, in that write.

    A write leaves the position alone and nothing of it is kept for the next one. Opening for writing
    with O_TRUNC calls `truncate`, whose errno open(2) returns.
    """

    opened_as: ClassVar[type[OpenFile]] = OpenCommand
    __slots__ = ("execute", "truncate")

    def __init__(
        self, mode: int, records: Records | None, execute: Execute, truncate: Callable[[], None] | None = None
    ) -> None:
        super().__init__(mode, records)
        self.execute = execute
        self.truncate = truncate


class GuestCommandFile(CommandFile):
    """A CommandFile whose commands the guest itself carries out."""

    runs_guest = True
    __slots__ = ()


class MarkerFile(CommandFile):
    """A CommandFile whose writes are recorded, with who made them."""

    notes_writer = True
    __slots__ = ()


class _OpenLines(OpenCommand):
    """Keeps the unfinished line of a part of a long write for the part that follows.

    Linux: a write(2) is never split. Deviates: where a later part fails, write(2) has taken the earlier ones.
    """

    _unfinished = b""

    @property
    def is_between_parts(self) -> bool:
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
        """Linux: each line takes the lock by itself, too."""
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
    """A CommandFile of definitions, which the guest has a part in.

    Its lines survive that a front end splits a long write(2).
    """

    opened_as = _OpenLines
    __slots__ = ()


class _OpenHostReading(_OpenSeq):
    node: HostReadingFile
    moves_on_write = False

    def prepare(self, client: Client, data: bytes) -> Callable[[], int]:
        return self.node.prepare(client, data)


class HostReadingFile(PerClientFile):
    """A PerClientFile with commands that read files of the host, before the control lock is taken."""

    opened_as = _OpenHostReading
    runs_guest = True
    reads_host = True
    __slots__ = ("prepare",)

    def __init__(
        self,
        mode: int,
        records_for: Callable[[Client], Records],
        prepare: Callable[[Client, bytes], Callable[[], int]],
    ) -> None:
        """`prepare` reads the files and returns what the writer's write does: it returns the bytes taken."""
        super().__init__(mode, records_for)
        self.prepare = prepare


class _OpenLastClose(OpenFile):
    node: LastCloseFile

    def _write(self, data: bytes) -> int:
        return len(data)

    def release(self) -> None:
        self.node.on_close()


class LastCloseFile(File):
    """Writing to it does nothing, and can't fail; what it is for happens when it is closed."""

    opened_as = _OpenLastClose
    __slots__ = ("on_close",)

    def __init__(self, mode: int, on_close: Callable[[], None]) -> None:
        super().__init__(mode)
        self.on_close = on_close


class _OpenAttribute(OpenFile):
    node: AttributeFile
    _text: bytes | None = None

    def _read(self, size: int, position: int) -> bytes:
        if self.node.show is None:
            return super()._read(size, position)
        if position == 0 or self._text is None:
            self._text = encode(self.node.show())
        return self._text[position : position + size]

    def _write(self, data: bytes) -> int:
        if self.node.store is None:
            return super()._write(data)
        self.node.store(data)
        return len(data)


class AttributeFile(File):
    """One value. It is rendered by a read at 0 and sliced by those that continue.

    `show` None makes reading EINVAL, `store` None writing.
    """

    opened_as = _OpenAttribute
    __slots__ = ("show", "store")

    def __init__(self, mode: int, show: Callable[[], str] | None, store: Store | None = None) -> None:
        super().__init__(mode)
        self.show = show
        self.store = store


class _OpenOneRead(_OpenAttribute):
    def _read(self, size: int, position: int) -> bytes:
        return b"" if position else super()._read(size, position)


class OneReadFile(AttributeFile):
    """One value that a read at 0 gives; what doesn't fit into it is lost.

    Linux: events' filters are read so. Mirrors: kernel/trace/trace_events.c:event_filter_read (v6.1).
    """

    opened_as = _OpenOneRead
    __slots__ = ()


class OpenPipe(OpenFile):
    """An open PipeFile."""

    stream = True

    def __init__(self, node: PipeFile, flags: int, client: Client) -> None:
        """Raises: KernelError EBUSY (the stream has one reader at a time and there is one)."""
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
    """A consuming stream: reads block while it is empty, and have no position."""

    opened_as = OpenPipe
    __slots__ = ("connect",)

    def __init__(self, mode: int, connect: Callable[[], Stream]) -> None:
        super().__init__(mode)
        self.connect = connect
