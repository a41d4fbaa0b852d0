"""RunningLinux: a distribution's kernel in the machine, with the interface that the probe engine uses."""

from __future__ import annotations

from abc import ABC, abstractmethod

from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.task_events import TaskEvents


class RunningLinux(ABC):
    """A distribution's kernel as it runs on one CPU."""

    machine: LinuxMachine
    release: str
    """Release of the kernel, as `uname -r` prints it."""
    root: int
    """Physical address of page tables that map the kernel's half."""
    per_cpu: int
    """Address of the per-CPU area."""
    current_cell: int
    """Address of the variable that has the running task's address."""

    def __init__(self) -> None:
        self.events = TaskEvents()

    @abstractmethod
    def idle(self, microseconds: int) -> None:
        """Let time pass, so that the guest can do its own work."""
