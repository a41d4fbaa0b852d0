"""Files whose reads consume a stream and wait for data, such as trace_pipe."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Protocol

from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.open_file import File, OpenFile


class Stream(Protocol):
    """Interface of a reader that consumes its data, such as an open trace_pipe."""

    def read(self, size: int, *, nonblock: bool = False) -> bytes:
        """Return at most `size` bytes, or b"" at the end of the stream. Raises: WouldBlock (no data yet).

        `nonblock`: whether O_NONBLOCK is set for the open file now.
        """

    def ready(self) -> bool:
        """Return True if poll(2) reports the stream as readable."""

    def wait(self, timeout: float) -> None:
        """Wait until read() may return data, for at most `timeout` seconds."""

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Make the stream call `notify` once, from any thread, when it may be ready or is closed."""

    def close(self) -> None:
        """Release the reader's resources and wake all waiting readers."""


class OpenPipe(OpenFile):
    """An open PipeFile, whose reads consume the stream."""

    def __init__(self, node: PipeFile, flags: int, client: Client) -> None:
        """Open `node`, and connect to its stream.

        Raises: KernelError EBUSY (the stream has a reader and allows only one).
        """
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
