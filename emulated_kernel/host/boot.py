"""From a booted machine to a guest that takes requests."""

from __future__ import annotations

from time import time_ns

from emulated_kernel.host.buffers import UserBuffers
from emulated_kernel.host.cells import GuestCells, address_of
from emulated_kernel.host.executive import Executive, GuestTask
from emulated_kernel.host.guest import Guest
from emulated_kernel.host.mirror import INIT_PID, TaskMirror
from emulated_kernel.host.processes import ProcessWatch
from emulated_kernel.host.syscalls import Syscalls
from emulated_kernel.host.wall_time import RealTime, WallTime
from emulated_kernel.image.image import KernelImage
from emulated_kernel.machine.machine import Machine

_SYSCALL = "nr."
"""Prefix of system call numbers in the guest's ABI table."""
_SPLIT = "ia32_"


def boot_guest(machine: Machine, image: KernelImage, cells: GuestCells, watch: ProcessWatch) -> Guest:
    """Run the kernel on from its boot until init is in user mode, and build what serves requests."""
    symbols, memory = image.kallsyms, machine.memory
    executive = Executive(machine, cells)
    init = GuestTask(INIT_PID, memory.read_word(address_of(symbols, "child_reaper")), "init", 0, 0)
    executive.add(init)
    executive.start()
    numbers = _syscall_numbers(image)
    buffers = UserBuffers(machine.user_buffers)
    find_task = address_of(symbols, "host_find_task")
    mirror = TaskMirror(
        executive,
        cells,
        memory,
        buffers,
        watch,
        lambda pid: machine.call(find_task, pid),
        numbers,
        init,
    )
    syscalls = Syscalls(executive, memory, buffers, numbers)
    # A real clock starts at the time of the boot, a virtual one at the epoch.
    is_real = machine.config.clock == "real"
    times = RealTime() if is_real else WallTime(machine.clock.now_ns, time_ns)
    return Guest(executive, mirror, syscalls, memory, buffers, machine, symbols, times, machine.text.ledger)


def _syscall_numbers(image: KernelImage) -> dict[str, int]:
    """By the names that calls have on all machines; i386 marks those whose arguments it splits."""
    names = {name.removeprefix(_SYSCALL): nr for name, nr in image.abi.items() if name.startswith(_SYSCALL)}
    split = {name.removeprefix(_SPLIT): nr for name, nr in names.items() if name.startswith(_SPLIT)}
    return names | split
