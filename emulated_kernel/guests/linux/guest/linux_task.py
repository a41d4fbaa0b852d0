"""LinuxTask: one task of the guest that makes the system calls of a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from emulated_kernel.util.fast_dataclass import dataclass

THREAD_SIZE = 16 << 10
"""Bytes of a kernel stack."""
TASK_INTERRUPTIBLE = 1
NEED_RESCHED = 1 << 3
"""The bit of TIF_NEED_RESCHED: the way back to user mode calls schedule()."""

Service = Callable[[], Callable[[], None]]
"""Does the host's part of a system call, and returns a function that puts the answer into the registers.

Raises: WouldBlock (the task sleeps on, and its client repeats the request). Nothing else.
"""


class Blocked(Exception):
    """The system call sleeps in the guest; `wait_for_result` may be called again."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class LinuxTask:
    """A client's task. Its registers and flags stay where the kernel keeps them."""

    address: int
    """Virtual address of its task_struct."""
    pid: int
    root: int
    """Physical address of its page tables, as the three fields below."""
    registers: int
    """Its pt_regs."""
    state: int
    """task_struct.__state."""
    flags: int
    """thread_info.flags."""
    entries: dict[int, int] = field(default_factory=dict)
    """Page -> index of the word that holds its page table entry. Valid until the task executes or ends."""
    owner: tuple[int, int] = 0, 0
    """User and group."""
    comm: str = ""
    pending: bool = False
    """Its system call has not returned."""
    result: int = 0
    """What its latest system call returned."""
    alive: bool = True
    service: Service | None = None
    """The host's part of its system call."""
    waits: bool = False
    """Its system call waits for `service`; while the guest runs for other tasks, it sleeps there."""
