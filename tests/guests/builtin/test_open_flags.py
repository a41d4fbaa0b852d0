"""Flags of open(2) in scratch/, on each architecture."""

from __future__ import annotations

import os

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client

CLIENT = Client(0, 0, 0)
FILE = "/scratch/file"


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_a_file_that_is_not_append_only_takes_all_flags(arch: str) -> None:
    """A file of scratch/ can be opened with O_TRUNC and O_APPEND together, because the file is not
    append-only.

    Linux refuses O_TRUNC only for append-only inodes.
    """
    with Kernel(MachineConfig(arch=arch)) as kernel:
        mount = kernel.mount()
        handle = mount.create(CLIENT, FILE, 0o644, os.O_WRONLY)
        for access in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            mount.write(CLIENT, handle, b"text", 0)
            assert mount.getattr(FILE).size == 4
            mount.release(mount.open(CLIENT, FILE, access | os.O_TRUNC | os.O_APPEND))
            assert mount.getattr(FILE).size == 0
        mount.release(handle)
