"""User buffers: pages of user space through which system calls take paths and data."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from emulated_kernel.errors import KernelError

BUFFER_SIZE = 256 << 10
"""Bytes a buffer: the longest FUSE write (128 KiB) with room for a path."""
MAX_BUFFERS = 30
"""As many calls can hold one at once, those that sleep in a blocking read included."""


class UserRegion(Protocol):
    """The window of user space that buffers come from."""

    def alloc(self, size: int) -> int: ...


class UserBuffers:
    """A stack of mapped buffers, made when first needed and then used again."""

    def __init__(self, region: UserRegion) -> None:
        self._region = region
        self._free: list[int] = []
        self._made = 0

    def get(self) -> int:
        """The address of a buffer of BUFFER_SIZE bytes. Raises: KernelError ENOMEM."""
        if self._free:
            return self._free.pop()
        if self._made == MAX_BUFFERS:
            raise KernelError(errno.ENOMEM, "too many calls sleep in blocking reads")
        address = self._region.alloc(BUFFER_SIZE)
        self._made += 1
        return address

    def put(self, address: int) -> None:
        self._free.append(address)

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """A buffer for the length of a block."""
        address = self.get()
        try:
            yield address
        finally:
            self.put(address)
