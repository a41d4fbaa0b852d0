"""RunningLinux: a kernel in the machine, as our engine asks for it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.task_events import TaskEvents


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

    def __init__(self) -> None:
        self.events = TaskEvents()

    @abstractmethod
    def idle(self, microseconds: int) -> None:
        """Let time pass, for what the guest has to do by itself."""
