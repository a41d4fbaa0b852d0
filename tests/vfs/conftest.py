"""Booted kernels whose files are tested without a front end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.node_tree import NodeTree


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """Yield a kernel with two CPUs and an event kprobes/a, which is not enabled."""
    with Kernel(MachineConfig(cpus=2)) as booted:
        booted.tracing.kprobe_events.write(b"p:a vfs_read\n")
        yield booted


@pytest.fixture
def tree(kernel: Kernel) -> NodeTree:
    return kernel.filesystem()


@pytest.fixture(scope="module")
def unchanged() -> Iterator[NodeTree]:
    """Yield the file tree of a kernel that is shared by the tests of a module. The tests must not change the
    kernel.
    """
    with Kernel(MachineConfig(cpus=2)) as booted:
        booted.tracing.kprobe_events.write(b"p:a vfs_read\n")
        yield booted.filesystem()
