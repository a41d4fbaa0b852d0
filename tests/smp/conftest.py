"""Booted kernels with several CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig

FIRST_PID = 500


class Boot(Protocol):
    def __call__(self, cpus: int = 2, arch: str = "x86_64", **options: Any) -> Kernel: ...


@pytest.fixture
def boot() -> Iterator[Boot]:
    """Yield a function that boots kernels; close the kernels when the test ends."""
    booted: list[Kernel] = []

    def make(cpus: int = 2, arch: str = "x86_64", **options: Any) -> Kernel:
        kernel = Kernel(MachineConfig(cpus=cpus, arch=arch, run_budget=0.5, **options))
        booted.append(kernel)
        return kernel

    yield make
    for kernel in booted:
        kernel.close()


def clients(kernel: Kernel, count: int) -> list[GuestTask]:
    """Return tasks of the guest for `count` host processes."""
    return [kernel.guest.processes.task_of(FIRST_PID + number, 0, 0) for number in range(count)]
