"""Files of commands: a write(2) executes its data, and a read(2) returns records, as in a SeqFile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import ClassVar, Protocol, TypeVar

from emulated_kernel.util.abi import HostfsWriter
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.kstrtox import ascii_lines
from emulated_kernel.vfs.core.open_file import Moves, OpenFile, Piece, Steps, finish
from emulated_kernel.vfs.core.seq_file import OpenSeq, PerClientFile, Records, SeqFile

PIECE_SIZE = 1 << 10
"""A piece of a long write of command lines ends at the first newline after this number of bytes.

Executing a piece takes some milliseconds.
"""
SPLIT_SIZE = (128 << 10) - 4096
"""Minimum size in bytes of a write that may be a part of a longer write(2).

FUSE splits writes at 128 KiB, or up to a page earlier if the data does not begin at a page boundary.
"""
Execute = Callable[[bytes], int]
"""Function that executes a write and returns the number of bytes taken.

Raises: KernelError (the errno of the write).
"""
ExecuteSteps = Callable[[bytes], Steps]
"""Function that executes a write in steps. Raises: KernelError (the errno of the write)."""
Taken = TypeVar("Taken", int, None)


def explained(
    log: Callable[[str], None], file: str, execute: Callable[[bytes], Taken]
) -> Callable[[bytes], Taken]:
    """Return a function that calls `execute`, and writes the message of a KernelError to the kernel log.

    `file` names the file in the message. The KernelError is raised again, but the writing process sees only
    the errno.
    """

    def explaining(data: bytes) -> Taken:
        try:
            return execute(data)
        except KernelError as error:
            log(f"{file}: {error.strerror}")
            raise

    return explaining


def explained_steps(log: Callable[[str], None], file: str, execute: ExecuteSteps) -> ExecuteSteps:
    """Return a function like `execute` that also logs the message of a step's KernelError in the kernel log.

    `file` names the file in the message. The KernelError is raised again.
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

    `parsed` parses a line, and returns the function that executes the line. If `parsed` raises an error, no
    line is executed. If the execution of a line fails, the lines before it have been executed. `log` writes
    the message of a KernelError to the kernel log, with the file's name `file`.
    """

    def execute(data: bytes) -> Steps:
        for number, command in enumerate([parsed(line) for line in ascii_lines(data)]):
            if number:
                yield
            command()
        return len(data)

    return explained_steps(log, file, execute)


class WrittenList(Protocol):
    """Interface of a list that a file shows. A write adds entries to the list, and O_TRUNC removes all."""

    def records_from(self, start: int) -> Iterable[str]:
        """Return the lines of the file from index `start` on. The file has one line for each entry."""

    def write(self, data: bytes) -> int:
        """Execute one write, and return the number of bytes taken.

        Raises: KernelError (the errno of write(2)).
        """

    def clear(self) -> None:
        """Remove all entries of the list. Raises: KernelError EBUSY (an entry is in use)."""


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

    Opening the file for writing with O_TRUNC calls `truncate`, unless it is None. open(2) returns the errno
    that `truncate` raises.
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

        The last piece may end within a line, if the front end may have split the write(2) there. Other
        requests may run between two pieces. Linux takes its lock for each line separately.
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
        """Create the file. `records_for` returns the records for a client that opens the file.

        `prepare` reads the host files that a write names, and returns a function that begins the write.
        """
        super().__init__(mode, records_for, Moves.NOT)
        self.prepare = prepare
