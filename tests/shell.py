"""A client process that writes and reads the files of a kernel's mount."""

from __future__ import annotations

import os

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.vfs.core.client import Client

CLIENT = Client(500, 0, 0)
GREETING = "/scratch/greeting"


class Shell:
    """One client of one kernel.

    The constructor makes requests in scratch/, so that the guest has a task for the client afterwards.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._mount = kernel.mount()
        self._mount.release(self._mount.create(CLIENT, GREETING, 0o644, os.O_WRONLY))
        self.write(GREETING, "hello")
        self.read(GREETING)

    def write(self, path: str, text: str, flags: int = 0) -> None:
        """Write to a file as `echo TEXT >> PATH` does; with O_TRUNC, as `echo TEXT > PATH` does."""
        handle = self._mount.open(CLIENT, path, os.O_WRONLY | flags)
        self._mount.write(CLIENT, handle, text.encode(), 0)
        self._mount.release(handle)

    def read(self, path: str) -> str:
        """Return the first 64 KiB of a file, by one read."""
        handle = self._mount.open(CLIENT, path, os.O_RDONLY)
        text = self._mount.read(CLIENT, handle, 1 << 16, 0)
        self._mount.release(handle)
        return text.decode()
