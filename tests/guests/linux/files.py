"""Access to a mount of a distribution's kernel as by a process."""

from __future__ import annotations

import os

import pytest

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount


class Files:
    """The files of a mount, as the process `client` accesses them."""

    def __init__(self, mount: Mount, client: Client) -> None:
        self.mount = mount
        self.client = client

    def write(self, path: str, text: str, flags: int = os.O_WRONLY) -> None:
        handle = self.mount.open(self.client, path, flags)
        try:
            assert self.mount.write(self.client, handle, text.encode(), 0) == len(text)
        finally:
            self.mount.release(handle)

    def read(self, path: str) -> str:
        handle = self.mount.open(self.client, path, os.O_RDONLY)
        text = b""
        try:
            while piece := self.mount.read(self.client, handle, 1 << 17, len(text)):
                text += piece
        finally:
            self.mount.release(handle)
        return text.decode()

    def call(self, line: str) -> str:
        """Write `line` to machine/call, which calls a function of the kernel, and return the text of the file
        afterwards.

        If the call fails, the name of the errno precedes the text.
        """
        try:
            self.write("/machine/call", f"{line}\n")
        except KernelError as error:
            return f"{error.name} {self.read('/machine/call')}"
        return self.read("/machine/call")

    def errno(self, path: str, text: str) -> int:
        with pytest.raises(KernelError) as refused:
            self.write(path, text, os.O_WRONLY | os.O_APPEND)
        return refused.value.errno or 0
