"""Kinds of files: sequences of records, single values, commands, streams."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.mount import Client
from emulated_kernel.vfs.node import File
from emulated_kernel.vfs.open_file import OpenFile, encode
from emulated_kernel.vfs.ports import Stream

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


def listing(records: Callable[[], Iterable[str]]) -> Records:
    """Records of a file from a callable that gives all of them."""
    return lambda index: islice(records(), index, None)


def single(show: Callable[[], str]) -> Records:
    """A file of one record, rendered once an open. Mirrors: fs/seq_file.c:single_open."""
    return lambda index: (show() for _ in range(index, 1))


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
            self._restart(position)
        self._fill(self._start + size)
        data = self._buffer[self._start : self._start + size]
        self._start += len(data)
        self._position += len(data)
        if self._start == len(self._buffer):
            self._buffer, self._start = b"", 0
        return data

    def _restart(self, position: int) -> None:
        self._buffer, self._start = b"", position
        self._index, self._position = 0, position

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


class SeqFile(File):
    """A list of records; with `records` None reading is EINVAL.

    Opening for writing succeeds, as it does for root; writing is EINVAL.
    """

    __slots__ = ("records",)

    def __init__(self, mode: int, records: Records | None) -> None:
        super().__init__(mode)
        self.records = records

    def open(self, flags: int, client: Client) -> OpenFile:
        """Nothing is rendered before the first read."""
        del client
        return _OpenSeq(self, flags, self.records)


class _OpenSeq(OpenFile):
    def __init__(self, node: File, flags: int, records: Records | None) -> None:
        super().__init__(node, flags)
        self._reader = SeqReader(records) if records is not None else None

    def _read(self, size: int, position: int) -> bytes:
        if self._reader is None:
            return super()._read(size, position)
        return self._reader.read(size, position)


class PerClientFile(SeqFile):
    """A SeqFile whose records depend on who opens it."""

    __slots__ = ("_records_for",)

    def __init__(self, mode: int, records_for: Callable[[Client], Records]) -> None:
        super().__init__(mode, None)
        self._records_for = records_for

    def open(self, flags: int, client: Client) -> OpenFile:
        """The opener's rights count, not those of who reads later."""
        return _OpenSeq(self, flags, self._records_for(client))


class CommandFile(SeqFile):
    """Records to read, and commands to write: each write(2) is executed by itself, in that write.

    A write leaves the position alone and nothing of it is kept for the next one. Opening for writing
    with O_TRUNC calls `truncate`, whose errno open(2) returns.
    """

    __slots__ = ("_execute", "_truncate")

    def __init__(
        self, mode: int, records: Records | None, execute: Execute, truncate: Callable[[], None] | None = None
    ) -> None:
        super().__init__(mode, records)
        self._execute = execute
        self._truncate = truncate

    def open(self, flags: int, client: Client) -> OpenFile:
        """Raises: what `truncate` raises."""
        del client
        opened = self._opened(flags)
        if self._truncate is not None and opened.writable and flags & os.O_TRUNC:
            self._truncate()
        return opened

    def _opened(self, flags: int) -> _OpenCommand:
        return _OpenCommand(self, flags, self.records, self._execute)


class LinesFile(CommandFile):
    """A CommandFile of lines, which survive that a front end splits a long write(2)."""

    __slots__ = ()

    def _opened(self, flags: int) -> _OpenCommand:
        return _OpenLines(self, flags, self.records, self._execute)


class GuestLinesFile(LinesFile):
    """A LinesFile whose commands the guest has a part in."""

    runs_guest = True
    __slots__ = ()


class GuestCommandFile(CommandFile):
    """A CommandFile whose commands the guest itself carries out."""

    runs_guest = True
    __slots__ = ()


class PerClientCommandFile(GuestCommandFile):
    """A GuestCommandFile whose records depend on who opens it."""

    __slots__ = ("_records_for",)

    def __init__(self, mode: int, records_for: Callable[[Client], Records], execute: Execute) -> None:
        super().__init__(mode, None, execute)
        self._records_for = records_for

    def open(self, flags: int, client: Client) -> OpenFile:
        """The opener's rights count, not those of who reads later."""
        return _OpenCommand(self, flags, self._records_for(client), self._execute)


class MarkerFile(CommandFile):
    """A CommandFile whose writes are recorded, with who made them."""

    notes_writer = True
    __slots__ = ()


class Pausable(Protocol):
    """What must not change while somebody reads it."""

    @property
    def pauses_for_readers(self) -> bool: ...

    def stop(self) -> None: ...

    def start(self) -> None: ...


class PausingFile(CommandFile):
    """Records of something that stands still while the file is open for reading, where it is asked to.

    What is written to it is ignored; O_TRUNC clears it.
    """

    __slots__ = ("_pausable",)

    def __init__(self, mode: int, records: Records, clear: Callable[[], None], pausable: Pausable) -> None:
        super().__init__(mode, records, len, clear)
        self._pausable = pausable

    def _opened(self, flags: int) -> _OpenCommand:
        return _OpenPausing(self, flags, self.records, self._pausable)


class _OpenCommand(_OpenSeq):
    def __init__(self, node: File, flags: int, records: Records | None, execute: Execute) -> None:
        super().__init__(node, flags, records)
        self._execute = execute

    def _write(self, data: bytes) -> int:
        return self._execute(data)

    def _advance(self, count: int) -> int:
        del count
        return 0


class _OpenLines(_OpenCommand):
    """Keeps the unfinished line of a part of a long write for the part that follows.

    Linux: a write(2) is never split. Deviates: where a later part fails, write(2) has taken the earlier ones.
    """

    _unfinished = b""

    def _write(self, data: bytes) -> int:
        before, self._unfinished = self._unfinished, b""
        end = len(data)
        if len(data) >= SPLIT_SIZE:
            end = data.rfind(b"\n") + 1 or len(data)
        taken = super()._write(before + data[:end]) - len(before)
        if taken < end:
            return max(taken, 0)
        self._unfinished = data[end:]
        return len(data)

    def release(self) -> None:
        if self._unfinished:
            with suppress(KernelError):
                super()._write(self._unfinished)
        super().release()


class _OpenPausing(_OpenCommand):
    def __init__(self, node: File, flags: int, records: Records | None, pausable: Pausable) -> None:
        super().__init__(node, flags, records, len)
        self._pausable = pausable
        if self.readable and pausable.pauses_for_readers:
            pausable.stop()

    def release(self) -> None:
        if self.readable:
            # Linux: starts what another reader stopped too, if this one came before the option was set.
            self._pausable.start()
        super().release()


class LastCloseFile(File):
    """Writing to it does nothing, and can't fail; what it is for happens when it is closed."""

    __slots__ = ("_on_close",)

    def __init__(self, mode: int, on_close: Callable[[], None]) -> None:
        super().__init__(mode)
        self._on_close = on_close

    def open(self, flags: int, client: Client) -> OpenFile:
        """Nothing happens yet."""
        del client
        return _OpenLastClose(self, flags, self._on_close)


class _OpenLastClose(OpenFile):
    def __init__(self, node: File, flags: int, on_close: Callable[[], None]) -> None:
        super().__init__(node, flags)
        self._on_close = on_close

    def _write(self, data: bytes) -> int:
        return len(data)

    def release(self) -> None:
        self._on_close()
        super().release()


class AttributeFile(File):
    """One value. It is rendered by a read at 0 and sliced by those that continue.

    `show` None makes reading EINVAL, `store` None writing.
    """

    __slots__ = ("_show", "_store")

    def __init__(self, mode: int, show: Callable[[], str] | None, store: Store | None = None) -> None:
        super().__init__(mode)
        self._show = show
        self._store = store

    def open(self, flags: int, client: Client) -> OpenFile:
        """Nothing is rendered before the first read."""
        del client
        return _OpenAttribute(self, flags, self._show, self._store)


class _OpenAttribute(OpenFile):
    def __init__(self, node: File, flags: int, show: Callable[[], str] | None, store: Store | None) -> None:
        super().__init__(node, flags)
        self._show = show
        self._store = store
        self._text: bytes | None = None

    def _read(self, size: int, position: int) -> bytes:
        if self._show is None:
            return super()._read(size, position)
        if position == 0 or self._text is None:
            self._text = encode(self._show())
        return self._text[position : position + size]

    def _write(self, data: bytes) -> int:
        if self._store is None:
            return super()._write(data)
        self._store(data)
        return len(data)


class OneReadFile(AttributeFile):
    """One value that a read at 0 gives; what doesn't fit into it is lost.

    Linux: events' filters are read so. Mirrors: kernel/trace/trace_events.c:event_filter_read (v6.1).
    """

    def open(self, flags: int, client: Client) -> OpenFile:
        """Nothing is rendered before the first read."""
        del client
        return _OpenOneRead(self, flags, self._show, self._store)


class _OpenOneRead(_OpenAttribute):
    def _read(self, size: int, position: int) -> bytes:
        return b"" if position else super()._read(size, position)


class PipeFile(File):
    """A consuming stream: reads block while it is empty, and have no position."""

    __slots__ = ("_connect",)

    def __init__(self, mode: int, connect: Callable[[bool], Stream]) -> None:
        """`connect` is told whether O_NONBLOCK was given."""
        super().__init__(mode)
        self._connect = connect

    def open(self, flags: int, client: Client) -> OpenFile:
        """Raises: KernelError EBUSY, where the stream has one reader at a time and there is one."""
        del client
        return _OpenPipe(self, flags, self._connect(bool(flags & os.O_NONBLOCK)))


class _OpenPipe(OpenFile):
    stream = True

    def __init__(self, node: File, flags: int, source: Stream) -> None:
        super().__init__(node, flags)
        self._source = source

    def _read(self, size: int, position: int) -> bytes:
        del position
        return self._source.read(size)

    def poll(self, notify: Callable[[], None] | None = None) -> int:
        if notify is not None:
            self._source.subscribe(notify)
        return select.POLLIN | select.POLLRDNORM if self._source.ready() else 0

    def wait(self, timeout: float) -> None:
        self._source.wait(timeout)

    def release(self) -> None:
        self._source.close()
