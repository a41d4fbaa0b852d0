"""Two tasks with one open control file: a task that sleeps in a read does not block the other task."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client

PARENT, CHILD = Client(500, 0, 0), Client(501, 0, 0)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """Yield a kernel with a probe, so that requests run through the guest."""
    with Kernel() as kernel:
        kernel.register_kprobe(Kprobe(symbol_name="int_sqrt"))
        yield kernel


def test_a_sleeping_reader_keeps_no_other_from_the_file(kernel: Kernel) -> None:
    mount = kernel.mount()
    pipe = mount.open(PARENT, "/tracing/trace_pipe", os.O_RDONLY)
    for reader in (PARENT, CHILD):
        with pytest.raises(WouldBlock):
            mount.read(reader, pipe, 100, 0)
    marker = mount.open(CHILD, "/tracing/trace_marker", os.O_WRONLY)
    mount.write(CHILD, marker, b"here", 0)
    assert b"here" in mount.read(PARENT, pipe, 1000, 0)
    with pytest.raises(KernelError) as caught:
        mount.read(CHILD, 99, 100, 0)
    assert caught.value.errno == errno.EBADF
    mount.release(pipe)
