"""Files, and what open(2) makes of them, and Linux's file position, from a front end's offsets."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Node

ALWAYS_READY = select.POLLIN | select.POLLOUT | select.POLLRDNORM | select.POLLWRNORM
"""What poll(2) says of files that have no poll method. Mirrors: include/linux/poll.h:DEFAULT_POLLMASK."""


def encode(text: str) -> bytes:
    """The bytes of a file's text, in which surrogates stand for bytes that are no UTF-8."""
    return text.encode("utf-8", "surrogateescape")


class File(Node):
    """A regular file; its contents are its open files' business."""

    runs_guest: ClassVar[bool] = False
    """A write runs code in the guest: the task that writes has to sleep meanwhile."""
    notes_writer: ClassVar[bool] = False
    """A write is recorded as the current task's: that has to be the one that writes."""
    reads_host: ClassVar[bool] = False
    """A write names files of the host, which may be slow or this mount's own: OpenFile.prepare reads them."""
    replaces_kernel: ClassVar[bool] = False
    """A write boots another kernel in this one's place, whose tasks have no part in it."""
    opened_as: ClassVar[type[OpenFile]]
    """What open(2) makes of it, with the errno that the file's own open method has on Linux."""
    __slots__ = ()


class Cursor:
    """Where the file position is on Linux, worked out from the offsets that a front end passes.

    A front end adds written bytes to its offset, while many control files leave the position alone in
    write(2): a read after a write then begins at 0. An offset that doesn't continue the last operation
    is lseek(2) or pread(2), and is taken as it is.
    """

    __slots__ = ("_expected", "_position")

    def __init__(self) -> None:
        self._expected = 0
        self._position = 0

    def position(self, offset: int) -> int:
        """Position of an operation that the front end places at `offset`."""
        return self._position if offset == self._expected else offset

    def moved(self, offset: int, transferred: int, position: int) -> None:
        """The operation at `offset` transferred bytes and left the file at `position`."""
        self._expected = offset + transferred
        self._position = position


class Piece(NamedTuple):
    """Of what one write(2) was given."""

    data: bytes
    is_part: bool = False
    """What stands behind its last newline goes on in another write(2)."""


class OpenFile:
    """What open(2) returned. Subclasses give `_read` and `_write`; without them both are EINVAL."""

    stream = False
    """No position: lseek(2) and pread(2) are ESPIPE."""
    moves_on_write: ClassVar[bool] = True
    """Whether a write moves the position by what it takes."""

    def __init__(self, node: File, flags: int, client: Client) -> None:
        """`client` opens it: its rights count, not those of who reads later."""
        del client
        self.node = node
        self.flags = flags
        self._cursor = Cursor()
        self._is_part = False
        """Of what is written now."""

    def pieces(self, data: bytes) -> list[Piece]:
        """What one write(2) is taken apart into, for other requests to come between."""
        return [Piece(data)]

    @property
    def is_between_parts(self) -> bool:
        """Whether it has a part of a long write(2) that waits for the next one."""
        return False

    @property
    def readable(self) -> bool:
        """Opened with O_RDONLY or O_RDWR."""
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writable(self) -> bool:
        """Opened with O_WRONLY or O_RDWR."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    def read(self, size: int, offset: int) -> bytes:
        """At most `size` bytes from `offset`; b"" at the end.

        Raises: KernelError EBADF, EINVAL, ENODEV (the node was removed), WouldBlock.
        """
        if not self.readable:
            raise KernelError(errno.EBADF, "not open for reading")
        self.node.check_attached()
        position = self._cursor.position(offset)
        data = self._read(size, position)
        self._cursor.moved(offset, len(data), position + len(data))
        return data

    def read_page(self, size: int) -> bytes:
        """What splice(2) gets of a file whose node is_paged: `size` bytes, never fewer.

        Raises: KernelError EINVAL (there are no pages, or none of that size), EAGAIN (no page yet).
        """
        raise KernelError(errno.EINVAL, f"this file has no pages of {size} bytes")

    def prepare(self, client: Client, data: bytes) -> Callable[[], int]:
        """What a client's write of `data` will do; without the control lock, as it may read host files."""
        del client
        return lambda: self._write(data)

    def write(
        self, data: bytes, offset: int, prepared: Callable[[], int] | None = None, *, is_part: bool = False
    ) -> int:
        """Number of bytes taken; what the write does, `prepared` where given, is done when it returns.

        `is_part`: see Piece.

        Raises: KernelError EBADF, EINVAL, ENODEV (the node was removed), what the file's command raises.
        """
        if not self.writable:
            raise KernelError(errno.EBADF, "not open for writing")
        self.node.check_attached()
        position = self._cursor.position(offset)
        self._is_part = is_part
        count = self._write(data) if prepared is None else prepared()
        self._cursor.moved(offset, count, position + (count if self.moves_on_write else 0))
        return count

    def set_status_flags(self, flags: int) -> None:
        """What fcntl(F_SETFL) set since it was opened."""
        self.flags = self.flags & ~os.O_NONBLOCK | flags & os.O_NONBLOCK

    def goes_on_from(self, other: OpenFile) -> None:
        """Be where and as `other` is, which the same client has open under the same name."""
        self._cursor = other._cursor
        self.set_status_flags(other.flags)

    def poll(self, notify: Callable[[], None] | None = None) -> int:
        """Readiness as poll(2)'s mask; `notify` is called once when a file that wasn't ready becomes so."""
        del notify
        return ALWAYS_READY

    def wait(self, timeout: float) -> None:
        """Return once a read may give something, or after `timeout` seconds."""

    def release(self) -> None:
        """The last descriptor was closed."""

    def _read(self, size: int, position: int) -> bytes:
        del size, position
        raise KernelError(errno.EINVAL, "this file can't be read")

    def _write(self, data: bytes) -> int:
        del data
        raise KernelError(errno.EINVAL, "this file can't be written")
