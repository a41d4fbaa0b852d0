"""At a function's entry, $argN is the N-th argument that the caller passed, on each architecture."""

from __future__ import annotations

import os

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client
from tests.vfs.files import read, write

CLIENT = Client(801, 0, 0)


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64", "riscv64i"])
def test_arguments_of_a_read(arch: str) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel:
        tree, mount = kernel.filesystem(), kernel.mount()
        handle = mount.create(CLIENT, "/scratch/file", 0o644, os.O_RDWR)
        mount.write(CLIENT, handle, bytes(100), 0)
        with kernel.lock:
            write(tree, "/kprobe_events", "p:read vfs_read count=$arg3:u32 position=+0($arg4):u64\n")
            write(tree, "/tracing/events/kprobes/read/enable", "1")
        asked = [(7, 0), (50, 7), (1, 99), (20, 13)]
        for size, position in asked:
            assert len(mount.read(CLIENT, handle, size, position)) == size
        with kernel.lock:
            lines = [line for line in read(tree, "/tracing/trace").splitlines() if "vfs_read" in line]
        assert [line.split(") ")[1] for line in lines] == [
            f"count={size} position={position}" for size, position in asked
        ]
