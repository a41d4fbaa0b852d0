"""RunningLinux: a kernel in the machine, as our engine asks for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from emulated_kernel.linux.machine import LinuxMachine


class RunningLinux(ABC):
    """One CPU of a distribution's kernel."""

    machine: LinuxMachine
    release: str
    """Of the kernel, as uname -r says it."""
    root: int
    """Page tables that the kernel's half is in."""
    per_cpu: int
    """Address of the CPU's area."""
    current_cell: int
    """Where the address of the running task stands."""
    on_fork: list[Callable[[int, int], None]]
    """Told the pids of parent and child, whoever forks."""
    on_free: list[Callable[[int, int], None]]
    """Told the address and the pid of a task that has ended, in front of when the kernel forgets it."""
    on_name: list[Callable[[int, str], None]]
    """Told the pid and the new name of a task."""

    @abstractmethod
    def idle(self, microseconds: int) -> None:
        """Let time pass, for what the guest has to do by itself."""
