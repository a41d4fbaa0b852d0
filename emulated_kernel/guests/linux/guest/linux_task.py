"""LinuxTask: a guest task that makes the system calls of a client."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.util.fast_dataclass import dataclass, field

THREAD_SIZE = 16 << 10
"""Size of a kernel stack in bytes."""
TASK_INTERRUPTIBLE = 1
TASK_IDLE = 0x402
"""State of a task that no signal wakes, and that counts neither for the load nor as hung.

Mirrors: include/linux/sched.h (v6.1), TASK_UNINTERRUPTIBLE | TASK_NOLOAD.
"""

Service = Callable[[], Callable[[], None]]
"""Function that does the host's work in a system call, and returns another function.

The returned function puts the result of the call into the registers. A Service raises no exception except
WouldBlock. After WouldBlock, the task continues to sleep in its call, and the client repeats the request.
"""


class Blocked(Exception):
    """Raised if a system call sleeps in the guest for longer than its caller waits.

    The call has not ended; ClientScheduler.wait_for_result() can be called again to wait for its result.
    """


@dataclass(eq=False, slots=True, weakref_slot=True)
class LinuxTask:
    """A client task. This object has the addresses of the task's registers and flags in guest memory."""

    address: int
    """Virtual address of the task's task_struct."""
    pid: int
    root: int
    """Physical address of the task's page tables."""
    registers: int
    """Physical address of the task's pt_regs."""
    state: int
    """Physical address of task_struct.__state."""
    flags: int
    """Physical address of thread_info.flags."""
    entries: dict[int, int] = field(default_factory=dict)
    """Virtual address of a page -> index of its page table entry among the 8-byte words of RAM.

    The cache is valid until the task's next execve or its end.
    """
    owner: tuple[int, int] = 0, 0
    """User id and group id of the task in the guest."""
    comm: str = ""
    has_executed: bool = False
    """Whether the process has probably made an execve(2) that the guest has not repeated yet.

    The guest repeats it at the process's next request.
    """
    pending: bool = False
    """Whether a system call of the task has not returned."""
    result: int = 0
    """Return value of the task's latest system call."""
    alive: bool = True
    service: Service | None = None
    """Function that does the host's work in the task's system call (see Service); None without such work."""
    waits: bool = False
    """Whether the task's system call waits for `service`, the host's work in it.

    The task sleeps while the guest runs other tasks.
    """
