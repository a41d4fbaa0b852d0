"""Numbers that the guest kernel (image/src/include/host_abi.h) and the Python side share."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NewType

GuestAddr = NewType("GuestAddr", int)
"""A guest virtual address."""

PAGE_SIZE = 4096
HZ = 250


class Prot(IntFlag):
    """Access to a segment or a page: ELF's p_flags, and whether user mode has it too."""

    EXEC = 1
    WRITE = 2
    READ = 4
    USER = 8


class Hypercall(IntEnum):
    """Why the guest stopped by itself: x86 by `hlt` with the number in eax, riscv64 by `wfi` with it in a7.

    Arguments: rdi rsi rdx r10 on x86_64, ebx ecx edx esi on i386, a0 to a3. The answer goes where the number
    was; that of USER is a system call's number, with its arguments where Linux's user space has them: rdi rsi
    rdx r10 r8 r9, or ebx ecx edx esi edi ebp, or a0 to a5.
    """

    IDLE = 0
    """Nothing is runnable on this CPU."""
    RETURN = 1
    """A function called by the host returned; its result is in the first argument register."""
    USER = 2
    """The current task is in user mode and takes its next system call; first argument: last result."""
    HOSTFS = 3
    """A file of ours is operated on; arguments: op, host file id, user buffer, count."""
    PANIC = 4
    """The kernel gave up; first argument: the message."""
    BOOTED = 5
    """start_kernel finished; resuming enters the idle loop."""
    MODULE = 6
    """The module loader needs its host; arguments: op, 0, and two that the op gives a meaning."""
    CPU_UP = 7
    """Another CPU is to be started; arguments: its number, entry, stack pointer, per-CPU area."""
    YIELD = 8
    """This CPU waits for another one; resuming goes on waiting."""
    KPROBES = 9
    """The kernel registers a probe of its own; arguments: op, 0, address of the probe's structure."""


class HostfsOp(IntEnum):
    """First argument of Hypercall.HOSTFS."""

    OPEN = 0
    READ = 1
    WRITE = 2
    MKDIR = 3
    RMDIR = 4


class ModuleOp(IntEnum):
    """First argument of Hypercall.MODULE."""

    ALLOC = 0
    """Size in bytes, whether it is for text: an address or -ENOMEM."""
    PLACE = 1
    """Address of text that was allocated, address of what is to stand there."""
    FREE = 2
    """An address that was allocated."""
    NOTIFY = 3
    """ModuleState, address of its struct module: 0, or -errno to refuse it while it is coming."""


class KprobeOp(IntEnum):
    """First argument of Hypercall.KPROBES, which answers with 0 or -errno."""

    REGISTER = 0
    REGISTER_RETURN = 1
    REGISTER_JPROBE = 2
    UNREGISTER = 3
    ENABLE = 4
    DISABLE = 5


class ModuleState(IntEnum):
    """Mirrors: include/linux/module.h:enum module_state (v6.1)."""

    LIVE = 0
    COMING = 1
    GOING = 2
    UNFORMED = 3


class Vector(IntEnum):
    """Exceptions and interrupts delivered into the guest; below 32 with x86's numbers on all machines."""

    DIVIDE_ERROR = 0
    DEBUG = 1
    BREAKPOINT = 3
    INVALID_OPCODE = 6
    GENERAL_PROTECTION = 13
    PAGE_FAULT = 14
    TIMER = 32
    WAKE = 33
    """wake_up_process() on the task in the mailbox."""
    WATCHDOG = 34
    """The run budget is used up: the current task is looping."""
    RESCHEDULE = 35
    """From another CPU: this one has something more important to run."""
    CALL_FUNCTION = 36
    """From another CPU: this one is to call what is in its queue."""
    SYNC_CORE = 37
    """Text was patched: execute a serialising instruction."""


PARK = (1 << 64) - 1
"""Answer to Hypercall.USER: no system call now, sleep until woken. A register takes as much as it holds."""
ERESTARTSYS = 512
"""Answer to Hypercall.HOSTFS: would block; the task sleeps until woken and asks again."""
