"""Constants shared by the guest kernel (image/src/include/host_abi.h) and the host's Python code."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NewType

GuestAddr = NewType("GuestAddr", int)
"""A guest virtual address."""

PAGE_SIZE = 4096
"""Size of a page of the guest in bytes."""
HZ = 250
"""Number of jiffies per second."""


class Prot(IntFlag):
    """Access rights of a segment or page, as the bits of ELF's p_flags; USER allows access in user mode."""

    EXEC = 1
    WRITE = 2
    READ = 4
    USER = 8


class Hypercall(IntEnum):
    """Requests that the guest makes to the host by the instruction `hlt`, on riscv64 by `wfi`.

    The number of the request is in eax, on riscv64 in a7. The arguments are in rdi rsi rdx r10 on x86_64,
    in ebx ecx edx esi on i386, and in a0 to a3 on riscv64. The host returns its answer in the register that
    held the number.
    The answer to USER is the number of a system call. The arguments of this system call are in Linux's
    registers: rdi rsi rdx r10 r8 r9, ebx ecx edx esi edi ebp, or a0 to a5.
    """

    IDLE = 0
    """This CPU has no runnable task."""
    RETURN = 1
    """A function called by the host has returned. The first argument is the function's result."""
    USER = 2
    """The current task is in user mode and needs its next system call.

    Argument: result of the task's last system call.
    """
    HOSTFS = 3
    """A task uses a file that the host implements; arguments: HostfsOp, host file id, user buffer, count.

    OPEN has the flags of open(2), and MKDIR has the mode, in place of the user buffer.
    """
    PANIC = 4
    """The kernel panicked; first argument: address of the message."""
    BOOTED = 5
    """start_kernel() has finished; when the host resumes this CPU, it enters the idle loop."""
    MODULE = 6
    """The module loader needs a service of the host; arguments: ModuleOp, 0, two arguments of the service."""
    CPU_UP = 7
    """Start another CPU; arguments: CPU number, entry point, stack pointer, per-CPU area.

    The answer is 0, or -EINVAL if there is no such CPU or it is already online.
    """
    YIELD = 8
    """This CPU busy-waits for another CPU, so another CPU has to run; later, this CPU continues to wait."""
    KPROBES = 9
    """Guest code uses the kprobes API; arguments: KprobeOp, 0, address of the struct kprobe or kretprobe."""


class HostfsWriter(IntEnum):
    """Answer to HostfsOp.OPEN: selects the guest kernel's function that write(2) calls for the file."""

    GENERAL = 0
    TRACING_MARK = 1
    TRACING_MARK_RAW = 2


class HostfsOp(IntEnum):
    """Operation on a file of the host: the first argument of Hypercall.HOSTFS.

    READ and WRITE answer with the number of bytes, OPEN with a HostfsWriter, and the others with 0. If an
    operation fails, the answer is -errno.
    """

    OPEN = 0
    READ = 1
    WRITE = 2
    MKDIR = 3
    RMDIR = 4


class ModuleOp(IntEnum):
    """Service for the module loader: the first argument of Hypercall.MODULE."""

    ALLOC = 0
    """Allocate memory; arguments: size in bytes, 1 for text or 0 for data; answer: an address or -ENOMEM."""
    PLACE = 1
    """Copy code into text that ALLOC returned; arguments: address of the text, address of the code.

    The size of the code is the allocated size. The answer is 0 or -errno.
    """
    FREE = 2
    """Free memory; argument: an address that ALLOC returned; answer: 0 or -EINVAL (not allocated)."""
    NOTIFY = 3
    """Report a new module state; arguments: ModuleState, address of the struct module.

    The answer is 0, or -errno to refuse a module that is COMING.
    """


class KprobeOp(IntEnum):
    """Call of the kprobes API: the first argument of Hypercall.KPROBES; the answer is 0 or -errno."""

    REGISTER = 0
    REGISTER_RETURN = 1
    REGISTER_JPROBE = 2
    UNREGISTER = 3
    ENABLE = 4
    DISABLE = 5


class ModuleState(IntEnum):
    """State of a module. Mirrors: include/linux/module.h:enum module_state (v6.1)."""

    LIVE = 0
    COMING = 1
    GOING = 2
    UNFORMED = 3


class Vector(IntEnum):
    """Exceptions and interrupts of the guest; exceptions (below 32) have x86's numbers on all machines."""

    DIVIDE_ERROR = 0
    DEBUG = 1
    BREAKPOINT = 3
    INVALID_OPCODE = 6
    GENERAL_PROTECTION = 13
    PAGE_FAULT = 14
    TIMER = 32
    WAKE = 33
    """Call wake_up_process() on the task that the host has put into the CPU's mailbox."""
    WATCHDOG = 34
    """The run lasted longer than MachineConfig.run_budget: the current task is looping."""
    RESCHEDULE = 35
    """IPI: the target CPU must run a task with a higher priority."""
    CALL_FUNCTION = 36
    """IPI: the target CPU must call the functions in its call_single_queue."""
    SYNC_CORE = 37
    """IPI after text was patched: the target CPU must execute a serialising instruction."""


PARK = (1 << 64) - 1
"""Answer to Hypercall.USER if the task has no system call to make yet: the task sleeps until it is woken.

32-bit registers hold the low half of the value.
"""
ERESTARTSYS = 512
"""Errno in the answer to Hypercall.HOSTFS if the operation would block.

The task sleeps until it is woken, and then makes the request again.
"""
