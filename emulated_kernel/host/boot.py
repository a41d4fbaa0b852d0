"""From a booted machine to a guest that takes requests."""

from __future__ import annotations

import errno

from emulated_kernel.errors import KernelError
from emulated_kernel.host.builtin_kernel import BuiltinKernel
from emulated_kernel.host.executive.executive import Executive, GuestTask
from emulated_kernel.host.executive.smp import SmpExecutive
from emulated_kernel.host.executive.syscalls import Syscalls
from emulated_kernel.host.guest import Guest
from emulated_kernel.host.mirror.mirror import INIT_PID, TaskMirror
from emulated_kernel.host.mirror.processes import ProcessWatch
from emulated_kernel.lock import ControlLock
from emulated_kernel.machine.task_events import TaskEvents


def boot_guest(kernel: BuiltinKernel, watch: ProcessWatch, events: TaskEvents, lock: ControlLock) -> Guest:
    """Run the kernel on from its boot until init is in user mode, and build what serves requests.

    Raises: KernelError ENOEXEC where it doesn't get there.
    """
    machine = kernel.machine
    has_turns = machine.config.cpus > 1 or machine.config.quantum
    executive = (SmpExecutive if has_turns else Executive)(machine, kernel, events, lock)
    init = GuestTask(INIT_PID, kernel.first_task(), "init", 0, 0)
    executive.add(init)
    executive.start()
    if executive.is_dead:
        name = kernel.image.path.name
        raise KernelError(errno.ENOEXEC, f"{name} doesn't boot: it stopped before its first task ran")
    numbers = kernel.syscall_numbers
    syscalls = Syscalls(executive, machine, kernel.image, kernel, kernel.buffers, numbers)
    return Guest(kernel, executive, TaskMirror(kernel, executive, watch, init), syscalls)
