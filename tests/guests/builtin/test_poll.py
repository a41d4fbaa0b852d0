"""The guest's ppoll system call, which poll(2) is on some architectures."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError

POLLIN, POLLOUT = 1, 4
PID = 500


@pytest.fixture(params=["x86_64", "i386", "riscv64"])
def kernel(request: Any) -> Iterator[Kernel]:
    kernel = Kernel(MachineConfig(arch=request.param))
    yield kernel
    kernel.close()


def test_ppoll(kernel: Kernel) -> None:
    """ppoll reports ready descriptors, waits for the timeout if no descriptor is ready, and refuses invalid
    timeouts.
    """
    task, memory = kernel.guest.processes.task_of(PID, 0, 0), kernel.machine.memory
    with kernel.guest.buffers.borrowed() as buffer:
        timeout, fds = buffer + 64, buffer + 128

        def ppoll(*wanted: tuple[int, int], seconds: int = 0, nanoseconds: int = 0) -> list[int]:
            memory.write(timeout, struct.pack("<qq", seconds, nanoseconds))
            memory.write(fds, b"".join(struct.pack("<ihh", *pair, 0) for pair in wanted))
            count = kernel.guest.syscalls.call(task, "ppoll", fds, len(wanted), timeout, 0, 0)
            found = [struct.unpack("<ihh", memory.read(fds + 8 * n, 8))[2] for n in range(len(wanted))]
            assert count == sum(map(bool, found))
            return found

        kernel.guest.syscalls.call(task, "pipe2", buffer, 0)
        reader, writer = struct.unpack("<ii", memory.read(buffer, 8))
        assert ppoll((reader, POLLIN), (writer, POLLOUT)) == [0, POLLOUT]
        before = kernel.machine.clock.now_ns()
        assert ppoll((reader, POLLIN), nanoseconds=20_000_000) == [0]
        assert kernel.machine.clock.now_ns() - before >= 20_000_000
        kernel.guest.syscalls.call(task, "write", writer, buffer, 1)
        assert ppoll((reader, POLLIN), seconds=5) == [POLLIN]
        for seconds, nanoseconds in ((-1, 0), (0, -1), (0, 10**9)):
            with pytest.raises(KernelError) as raised:
                ppoll((reader, POLLIN), seconds=seconds, nanoseconds=nanoseconds)
            assert raised.value.errno == errno.EINVAL
