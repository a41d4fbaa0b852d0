"""Numbers that the guest kernel (image/src/include/host_abi.h) and the Python side share."""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

GuestAddr = NewType("GuestAddr", int)
"""A guest virtual address."""

PAGE_SIZE = 4096
HZ = 250


class Hypercall(IntEnum):
    """Why the guest stopped by itself (x86: `hlt` with the number in eax)."""

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


class HostfsOp(IntEnum):
    """First argument of Hypercall.HOSTFS."""

    OPEN = 0
    READ = 1
    WRITE = 2
    MKDIR = 3
    RMDIR = 4


class Vector(IntEnum):
    """Exceptions and interrupts delivered into the guest; below 32 the x86 exception numbers."""

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


PARK = (1 << 64) - 1
"""Answer to Hypercall.USER: no system call now, sleep until woken."""
ERESTARTSYS = 512
"""Answer to Hypercall.HOSTFS: would block; the task sleeps until woken and asks again."""
