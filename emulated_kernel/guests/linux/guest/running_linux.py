"""RunningLinux: interface by which the probe engine uses a distribution's kernel in the machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.task_events import TaskEvents


class RunningLinux(ABC):
    """Interface of a distribution's kernel that runs on one CPU."""

    machine: LinuxMachine
    release: str
    """Release of the kernel, as `uname -r` prints it."""
    root: int
    """Physical address of page tables that map the kernel's half of the address space."""
    per_cpu: int
    """Virtual address of the CPU's per-CPU area."""
    need_resched: int
    """Mask of the bit TIF_NEED_RESCHED in thread_info.flags.

    If the bit is set, a return to user mode calls schedule().
    """
    syscall_trace: int = 0
    """Mask of the bit TIF_SYSCALL_TRACEPOINT in thread_info.flags; 0 if unknown or if there is none."""
    current_cell: int
    """Virtual address of the variable that contains the address of the running task's task_struct.

    0 if a register of the CPU, and no variable, contains the task_struct's address.
    """
    may_have_traced: bool = False
    """Whether the kernel's own function graph tracer may have run. If False, no task's ret_stack is set."""
    running: Callable[[], int]
    """Function that returns the address of the task_struct of the task that the CPU runs."""

    def __init__(self) -> None:
        self.events = TaskEvents()

    @abstractmethod
    def idle(self, microseconds: int) -> None:
        """Advance guest time by `microseconds`, and run the guest's own work that is due, such as timers."""
