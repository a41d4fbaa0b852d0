"""Reading and writing files of a mount, as one client."""

from __future__ import annotations

import os

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount

CLIENT = Client(4001, 0, 0)
PIECE = 1 << 17


def read(mount: Mount | Mount, path: str) -> str:
    """Return the text of a whole file."""
    handle, text = mount.open(CLIENT, path, os.O_RDONLY), b""
    while piece := mount.read(CLIENT, handle, PIECE, len(text)):
        text += piece
    mount.release(handle)
    return text.decode()


def write(mount: Mount | Mount, path: str, text: str, flags: int = 0) -> str:
    """Write with one write(2); return the name of the errno, or "" after success."""
    try:
        handle = mount.open(CLIENT, path, os.O_WRONLY | flags)
    except KernelError as error:
        return error.name
    try:
        if text:
            mount.write(CLIENT, handle, text.encode(), 0)
    except KernelError as error:
        return error.name
    finally:
        mount.release(handle)
    return ""


def release_of(mount: Mount) -> str:
    """Return the release of a mount's kernel."""
    return read(mount, "/machine/version").split()[2].removesuffix("\n")
