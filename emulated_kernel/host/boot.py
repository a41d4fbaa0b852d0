"""From a booted machine to a guest that takes requests."""

from __future__ import annotations

import errno
from time import time_ns

from emulated_kernel.errors import KernelError
from emulated_kernel.host.buffers import UserBuffers
from emulated_kernel.host.cells import GuestCells, address_of
from emulated_kernel.host.executive import Executive, GuestTask
from emulated_kernel.host.guest import Guest
from emulated_kernel.host.mirror import INIT_PID, TaskMirror
from emulated_kernel.host.processes import ProcessWatch
from emulated_kernel.host.smp import SmpExecutive
from emulated_kernel.host.syscalls import Syscalls
from emulated_kernel.host.wall_time import WallTime
from emulated_kernel.image.image import KernelImage
from emulated_kernel.image.prototypes import load_argument_counts
from emulated_kernel.machine.machine import Machine

_SYSCALL = "nr."
"""Prefix of system call numbers in the guest's ABI table."""
_SPLIT = "ia32_"


def boot_guest(machine: Machine, image: KernelImage, cells: GuestCells, watch: ProcessWatch) -> Guest:
    """Run the kernel on from its boot until init is in user mode, and build what serves requests."""
    symbols, memory = image.kallsyms, machine.memory
    cpus, quantum = machine.config.cpus, machine.config.quantum
    in_turns = cpus > 1 or quantum
    executive = SmpExecutive(machine, cells, cpus, quantum) if in_turns else Executive(machine, cells)
    if isinstance(executive, SmpExecutive):
        machine.text.interrupt_cpus = executive.sync_core
    init = GuestTask(INIT_PID, memory.read_word(address_of(symbols, "child_reaper")), "init", 0, 0)
    executive.add(init)
    executive.start()
    if executive.is_dead:
        raise KernelError(
            errno.ENOEXEC, f"{image.path.name} doesn't boot: it stopped before its first task ran"
        )
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
    boot_ns, now_ns = machine.boot_ns, machine.clock.now_ns
    times = WallTime(lambda: boot_ns + now_ns(), time_ns)
    return Guest(
        executive,
        mirror,
        syscalls,
        memory,
        buffers,
        machine,
        symbols,
        times,
        machine.text.ledger,
        load_argument_counts(image.path),
    )


def _syscall_numbers(image: KernelImage) -> dict[str, int]:
    """By the names that calls have on all machines; i386 marks those whose arguments it splits."""
    names = {name.removeprefix(_SYSCALL): nr for name, nr in image.abi.items() if name.startswith(_SYSCALL)}
    split = {name.removeprefix(_SPLIT): nr for name, nr in names.items() if name.startswith(_SPLIT)}
    return names | split
