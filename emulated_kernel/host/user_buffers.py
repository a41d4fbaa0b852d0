"""UserBuffers: pages of user space that system calls of the host's have their paths and data in."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.errors import KernelError
from emulated_kernel.machine.memory.guest_memory import GuestPool

BUFFER_SIZE = 256 << 10
"""Bytes a buffer: the longest FUSE write (128 KiB) with room for a path."""
MAX_BUFFERS = 30
"""As many calls can hold one at once; one that sleeps in a read of a file of ours holds none."""


class UserBuffers:
    """Pages of user space for paths and data: a stack of buffers, made when first needed, then used again."""

    def __init__(self, region: GuestPool) -> None:
        self._region = region
        self._free: list[int] = []
        self._made = 0

    def get(self) -> int:
        """The address of a buffer of BUFFER_SIZE bytes. Raises: KernelError ENOMEM."""
        if self._free:
            return self._free.pop()
        if self._made == MAX_BUFFERS:
            raise KernelError(errno.ENOMEM, "too many system calls are under way")
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
