"""File and OpenFile, and Cursor, which computes Linux's file position from a front end's offsets."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import Enum, auto
from typing import ClassVar

from emulated_kernel.util.abi import HostfsWriter
from emulated_kernel.util.errors import KernelError, YieldLock
from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Node

ALWAYS_READY = select.POLLIN | select.POLLOUT | select.POLLRDNORM | select.POLLWRNORM
"""Result of poll(2) for files without a poll method. Mirrors: include/linux/poll.h:DEFAULT_POLLMASK."""


def encode(text: str) -> bytes:
    """Return the bytes of a file's text. Surrogates in the text represent bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


class Moves(Enum):
    """Distance by which a write(2) moves the file position, at which the next read begins.

    Linux: the write method of each file decides the distance.
    """

    NOT = auto()
    BY_ONE = auto()
    """The position moves by 1, however many bytes the write takes.

    Mirrors: kernel/trace/trace.c:rb_simple_write, buffer_percent_write (v6.1).
    """
    BY_BYTES = auto()
    """The position moves by the number of bytes that the write takes."""

    def after(self, count: int) -> int:
        """Return the number of bytes by which the file position moves if a write takes `count` bytes."""
        if self is Moves.BY_BYTES:
            return count
        return 1 if self is Moves.BY_ONE else 0


class File(Node):
    """A regular file. Its open files, which are OpenFile objects, implement reading and writing."""

    runs_guest: ClassVar[bool] = False
    """Whether a write to the file runs guest code, during which the writing task must sleep."""
    notes_writer: ClassVar[bool] = False
    """Whether a write records the current task, which must therefore be the writing task."""
    writer: ClassVar[HostfsWriter] = HostfsWriter.GENERAL
    """Function of the guest's kernel that write(2) calls for the file, as a member of HostfsWriter."""
    reads_host: ClassVar[bool] = False
    """Whether a write names host files, which OpenFile.prepare() reads without the control lock.

    The host files may be slow, or may be files of this mount.
    """
    replaces_kernel: ClassVar[bool] = False
    """Whether a write replaces this kernel by a new one. The write is not made by a guest task."""
    is_unseen: ClassVar[bool] = False
    """Whether read(2) of the file hits no probe, because the guest does not repeat the call."""
    opened_as: ClassVar[type[OpenFile]]
    """Class of the OpenFile objects. Its constructor raises the errors of Linux's open(2) for the file."""
    has_position: ClassVar[bool] = True
    """Whether lseek(2) works.

    As in Linux, the call fails if the file's file_operations have no llseek, or have no_llseek as their
    llseek.
    """
    __slots__ = ("moves",)

    def __init__(self, mode: int, moves: Moves = Moves.BY_BYTES) -> None:
        super().__init__(mode)
        self.moves = moves
        """Distance by which a write(2) moves the file position."""


class Cursor:
    """Computes the file position of Linux, from the offsets that a front end passes.

    A front end adds the number of written bytes to its offset. In many control files, a write(2) moves the
    position by another distance (see Moves). An offset that does not continue the last operation comes from
    lseek(2) or pread(2), and is the position.
    """

    __slots__ = ("_expected", "_position")

    def __init__(self) -> None:
        self._expected = 0
        self._position = 0

    @property
    def next_offset(self) -> int:
        """Offset that a front end passes for an operation that continues the last one."""
        return self._expected

    def position(self, offset: int) -> int:
        """Return the file position of an operation for which the front end passes `offset`."""
        return self._position if offset == self._expected else offset

    def moved(self, offset: int, transferred: int, position: int) -> None:
        """Record an operation at `offset` that set the file position to `position`.

        `transferred`: number of bytes that the operation has read or written.
        """
        self._expected = offset + transferred
        self._position = position


Steps = Generator[None, None, int]
"""Generator that does a write in steps, and returns the number of bytes taken.

When it yields, other requests may run.
"""


def finish(steps: Steps) -> int:
    """Do all steps of a write without a pause, and return the number of bytes taken."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            taken: int = end.value
            return taken


def one_step(action: Callable[[], int]) -> Steps:
    """Return the steps of a write that has only one step: call `action`, and return its result."""
    return action()
    yield


class Piece(NamedTuple):
    """A part of the data of one write(2)."""

    data: bytes
    is_part: bool = False
    """Whether the piece ends in the middle of a line, which the next write(2) continues."""


class OpenFile:
    """An open file. Subclasses override `_read` and `_write`, which raise EINVAL by default."""

    def __init__(self, node: File, flags: int, client: Client) -> None:
        """Open the file for `client`, whose rights all later reads use."""
        del client
        self.node = node
        self.flags = flags
        self._cursor = Cursor()
        self._is_part = False
        """Whether the data that is written now ends in the middle of a line; see Piece.is_part."""
        self._write_at = 0
        """File position at which the current write begins."""

    def pieces(self, data: bytes) -> list[Piece]:
        """Split the data of one write(2) into pieces, which are written one after the other.

        Other requests may run between two pieces.
        """
        return [Piece(data)]

    @property
    def is_between_parts(self) -> bool:
        """Whether the file keeps written data that a later write or the close will execute."""
        return False

    @property
    def acts_on_close(self) -> bool:
        """Whether release() has an effect that other files show.

        By default, the value is True if a subclass overrides release().
        """
        return type(self).release is not OpenFile.release

    @property
    def readable(self) -> bool:
        """Whether the file was opened with O_RDONLY or O_RDWR."""
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writable(self) -> bool:
        """Whether the file was opened with O_WRONLY or O_RDWR."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    def read(self, size: int, offset: int) -> bytes:
        """Do all steps of a read: return at most `size` bytes from `offset` on, or b"" at the file's end.

        Raises: KernelError EBADF (not open for reading), EINVAL (the file cannot be read), ENODEV (the node
        was removed), WouldBlock (no data yet).
        """
        while True:
            with suppress(YieldLock):
                return self.read_step(size, offset)

    def read_step(self, size: int, offset: int) -> bytes:
        """Do the next step of a read. The last step returns the bytes that read() would return.

        Raises: YieldLock (call again to continue), and as read().
        """
        if not self.readable:
            raise KernelError(errno.EBADF, "not open for reading")
        self.node.check_attached()
        position = self._cursor.position(offset)
        data = self._read(size, position)
        self._cursor.moved(offset, len(data), position + len(data))
        return data

    def read_page(self, size: int) -> bytes:
        """Return the next page of `size` bytes for splice(2), if `is_paged` of the node is set.

        Raises: KernelError EINVAL (the file has no pages, or pages of another size), EAGAIN (no page yet).
        """
        raise KernelError(errno.EINVAL, f"this file has no pages of {size} bytes")

    def prepare(self, client: Client, data: bytes) -> Callable[[], Steps]:
        """Read the host files that a client's write of `data` names; return a function that begins the write.

        Hazard: the caller must not hold the control lock, because host files may be slow.
        """
        del client
        return lambda: self._write_steps(data)

    def write(self, data: bytes, offset: int) -> int:
        """Do all steps of a write without a pause, and return the number of bytes taken.

        Raises: as begin_write().
        """
        return finish(self.begin_write(data, offset))

    def begin_write(
        self, data: bytes, offset: int, prepared: Callable[[], Steps] | None = None, *, is_part: bool = False
    ) -> Steps:
        """Do a write of `data` in steps, and return the number of bytes taken.

        `prepared` is the result of prepare(), if it was called. `is_part`: whether `data` ends in the middle
        of a line, which the next write continues.

        Raises: KernelError EBADF (not open for writing), EINVAL (the file cannot be written), ENODEV (the
        node was removed), or the error of the file's command.
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
        """Set or clear O_NONBLOCK as in `flags`, which fcntl(F_SETFL) has set. Ignore all other flags."""
        self.flags = self.flags & ~os.O_NONBLOCK | flags & os.O_NONBLOCK

    @property
    def next_offset(self) -> int:
        """Offset that a front end passes for an operation that continues the last one."""
        return self._cursor.next_offset

    @property
    def position(self) -> int:
        """File position that Linux has after the last operation."""
        return self._cursor.position(self._cursor.next_offset)

    def goes_on_from(self, other: OpenFile) -> None:
        """Take over the file position and O_NONBLOCK of `other`.

        A reboot has replaced the kernel. `other` is the open file of the same client and path in the old
        kernel.
        """
        self._cursor = other._cursor
        self.set_status_flags(other.flags)

    def poll(self, notify: Callable[[], None] | None = None) -> int:
        """Return the mask of poll events that the file is ready for.

        If the file is not ready and `notify` is not None, call `notify` once when the file becomes ready.
        """
        del notify
        return ALWAYS_READY

    def wait(self, timeout: float) -> None:
        """Wait until a read may return data, for at most `timeout` seconds."""

    def release(self) -> None:
        """Release the open file after its last descriptor was closed."""

    def _read(self, size: int, position: int) -> bytes:
        del size, position
        raise KernelError(errno.EINVAL, "this file can't be read")

    def _write_steps(self, data: bytes) -> Steps:
        """Return the steps of a write. By default there is one step, a call of _write()."""
        return self._write(data)
        yield

    def _write(self, data: bytes) -> int:
        del data
        raise KernelError(errno.EINVAL, "this file can't be written")
