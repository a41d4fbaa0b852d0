"""Files and open files, and the file position that Linux would have, derived from a front end's offsets."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import Enum, auto
from typing import ClassVar, NamedTuple

from emulated_kernel.util.abi import HostfsWriter
from emulated_kernel.util.errors import KernelError, YieldLock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Node

ALWAYS_READY = select.POLLIN | select.POLLOUT | select.POLLRDNORM | select.POLLWRNORM
"""Result of poll(2) for files without a poll method. Mirrors: include/linux/poll.h:DEFAULT_POLLMASK."""


def encode(text: str) -> bytes:
    """Return the bytes of a file's text, in which surrogates represent bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


class Moves(Enum):
    """How far a write(2) moves the file position. A read after the write begins there.

    Linux: each write method decides this by itself.
    """

    NOT = auto()
    BY_ONE = auto()
    """Mirrors: kernel/trace/trace.c:rb_simple_write, buffer_percent_write (v6.1)."""
    BY_BYTES = auto()
    """The position moves by the bytes that the write takes."""

    def after(self, count: int) -> int:
        """Return the distance for a write that took `count` bytes."""
        return {Moves.NOT: 0, Moves.BY_ONE: 1, Moves.BY_BYTES: count}[self]


class File(Node):
    """A regular file. Its open files implement reading and writing."""

    runs_guest: ClassVar[bool] = False
    """True if a write runs code in the guest. The writing task must sleep meanwhile."""
    notes_writer: ClassVar[bool] = False
    """True if a write is recorded with the current task. The current task must then be the writer."""
    writer: ClassVar[HostfsWriter] = HostfsWriter.GENERAL
    """Function of the guest's kernel that a write calls."""
    reads_host: ClassVar[bool] = False
    """True if a write names host files. OpenFile.prepare() reads these without the control lock.

    They may be slow, or be files of this mount.
    """
    replaces_kernel: ClassVar[bool] = False
    """True if a write replaces this kernel by a new one. No guest task makes such a write."""
    opened_as: ClassVar[type[OpenFile]]
    """Class of its open files. The constructor raises the errno of the file's open method on Linux."""
    __slots__ = ("moves",)

    def __init__(self, mode: int, moves: Moves = Moves.BY_BYTES) -> None:
        super().__init__(mode)
        self.moves = moves
        """Distance by which a write(2) moves the position."""


class Cursor:
    """The file position that Linux would have, derived from the offsets that a front end passes.

    A front end adds written bytes to its offset, but in many control files a write(2) moves the position
    otherwise (see Moves). If an offset does not continue the last operation, it comes from lseek(2) or
    pread(2), and is used unchanged.
    """

    __slots__ = ("_expected", "_position")

    def __init__(self) -> None:
        self._expected = 0
        self._position = 0

    @property
    def next_offset(self) -> int:
        """Offset of an operation that continues the last one."""
        return self._expected

    def position(self, offset: int) -> int:
        """Return the position of an operation for which the front end passes `offset`."""
        return self._position if offset == self._expected else offset

    def moved(self, offset: int, transferred: int, position: int) -> None:
        """Record that the operation at `offset` transferred bytes and left the file at `position`."""
        self._expected = offset + transferred
        self._position = position


Steps = Generator[None, None, int]
"""The steps of a write: other requests may run when it yields. It returns the bytes taken."""


def finish(steps: Steps) -> int:
    """Do all steps of a write without a pause, and return the bytes taken."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            taken: int = end.value
            return taken


def one_step(action: Callable[[], int]) -> Steps:
    """Return the steps of a write that does everything at once. `action` returns the bytes taken."""
    return action()
    yield


class Piece(NamedTuple):
    """A part of the data of one write(2)."""

    data: bytes
    is_part: bool = False
    """True if the line after its last newline continues in the next write(2)."""


class OpenFile:
    """An open file. Subclasses override `_read` and `_write`, which raise EINVAL by default."""

    stream = False
    """True if the file has no position. lseek(2) and pread(2) then return ESPIPE."""

    def __init__(self, node: File, flags: int, client: Client) -> None:
        """Open the file for `client`. Later reads use the rights of this client, not those of the reader."""
        del client
        self.node = node
        self.flags = flags
        self._cursor = Cursor()
        self._is_part = False
        """`Piece.is_part` of the current write."""
        self._write_at = 0
        """Position of the current write."""

    def pieces(self, data: bytes) -> list[Piece]:
        """Return the parts into which one write(2) is split. Other requests may run between them."""
        return [Piece(data)]

    @property
    def is_between_parts(self) -> bool:
        """True if the file holds data of writes that a later write, or the close, will execute."""
        return False

    @property
    def acts_on_close(self) -> bool:
        """True if other files show an effect of release()."""
        return False

    @property
    def readable(self) -> bool:
        """True if it was opened with O_RDONLY or O_RDWR."""
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writable(self) -> bool:
        """True if it was opened with O_WRONLY or O_RDWR."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    def read(self, size: int, offset: int) -> bytes:
        """Return at most `size` bytes from `offset`, or b"" at the end, without a pause.

        Raises: KernelError EBADF, EINVAL, ENODEV (the node was removed), WouldBlock.
        """
        while True:
            with suppress(YieldLock):
                return self.read_step(size, offset)

    def read_step(self, size: int, offset: int) -> bytes:
        """Do a part of a read, as read() does.

        Raises: YieldLock (there is more to do, and the same call continues), as read().
        """
        if not self.readable:
            raise KernelError(errno.EBADF, "not open for reading")
        self.node.check_attached()
        position = self._cursor.position(offset)
        data = self._read(size, position)
        self._cursor.moved(offset, len(data), position + len(data))
        return data

    def read_page(self, size: int) -> bytes:
        """Return the next page of `size` bytes for splice(2), if the file's node has `is_paged`.

        Raises: KernelError EINVAL (there are no pages, or none of that size), EAGAIN (no page yet).
        """
        raise KernelError(errno.EINVAL, f"this file has no pages of {size} bytes")

    def prepare(self, client: Client, data: bytes) -> Callable[[], Steps]:
        """Return a function that begins a client's write of `data`.

        The caller does not hold the control lock, because this may read host files.
        """
        del client
        return lambda: self._write_steps(data)

    def write(self, data: bytes, offset: int) -> int:
        """Do the whole write and return the number of bytes taken. Raises: as begin_write()."""
        return finish(self.begin_write(data, offset))

    def begin_write(
        self, data: bytes, offset: int, prepared: Callable[[], Steps] | None = None, *, is_part: bool = False
    ) -> Steps:
        """Return the steps of the write, or those of `prepared` if given. `is_part`: see Piece.

        The steps raise KernelError EBADF, EINVAL, ENODEV (the node was removed), errors of the command.
        """
        if not self.writable:
            raise KernelError(errno.EBADF, "not open for writing")
        self.node.check_attached()
        position = self._cursor.position(offset)
        self._is_part = is_part
        self._write_at = position
        count = yield from (self._write_steps(data) if prepared is None else prepared())
        self._cursor.moved(offset, count, position + self.node.moves.after(count))
        return count

    def set_status_flags(self, flags: int) -> None:
        """Take over O_NONBLOCK from `flags`, which fcntl(F_SETFL) has set."""
        self.flags = self.flags & ~os.O_NONBLOCK | flags & os.O_NONBLOCK

    @property
    def next_offset(self) -> int:
        """Offset with which a front end continues after the last operation."""
        return self._cursor.next_offset

    def goes_on_from(self, other: OpenFile) -> None:
        """Share the position of `other` and copy its O_NONBLOCK.

        The same client has opened `other` under the same name.
        """
        self._cursor = other._cursor
        self.set_status_flags(other.flags)

    def poll(self, notify: Callable[[], None] | None = None) -> int:
        """Return the readiness as a mask of poll events.

        If the file is not ready, call `notify` once when it becomes ready.
        """
        del notify
        return ALWAYS_READY

    def wait(self, timeout: float) -> None:
        """Wait until a read may return data, or for `timeout` seconds."""

    def release(self) -> None:
        """Clean up after the last descriptor was closed."""

    def _read(self, size: int, position: int) -> bytes:
        del size, position
        raise KernelError(errno.EINVAL, "this file can't be read")

    def _write_steps(self, data: bytes) -> Steps:
        """Return the steps of a write. By default it has one step."""
        return one_step(lambda: self._write(data))

    def _write(self, data: bytes) -> int:
        del data
        raise KernelError(errno.EINVAL, "this file can't be written")
