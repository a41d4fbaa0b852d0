"""Where handlers in guest code find what handlers in Python ask the host for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emulated_kernel.trace.ring_page import MAX_DATA_SIZE

MAX_STRING_SIZE = 4096
"""Bytes of a fetched string, its ending NUL included."""
SCRATCH_SIZE = MAX_DATA_SIZE + MAX_STRING_SIZE + 8
"""Bytes: an entry that is as large as can be, another string, and padding."""


@dataclass(frozen=True)
class HitCounter:
    """A cell that guest code counts hits in."""

    address: int
    cell: memoryview
    """Its one u64."""
    release: Callable[[], None]
    """Gives the cell back, when no guest code counts in it any more."""


@dataclass(frozen=True)
class GuestPlaces:
    """Addresses and offsets in the guest; cells are u64, reachable by an absolute address."""

    clock: int
    """Cell of the time in ns."""
    clock_step: int
    """What a reading adds to it."""
    current_task: int
    """Per-CPU offset of the task_struct's address."""
    pid: int
    """Offset in a task_struct, as is `comm`."""
    comm: int
    preempt_count: int
    """Per-CPU offset of a u32, as is `need_resched`."""
    need_resched: int
    hardirq_mask: int
    softirq_mask: int
    last_pid: int
    """Cell: the pid whose name was remembered last."""
    event_time: int
    """Cell: the time of the event that the host is asked to make room for; behind it its length."""
    scratch: int
    """Address of SCRATCH_SIZE bytes that an entry is put together in."""
    breakpoint_context: tuple[int, int]
    """common_flags and common_preempt_count of a hit by a breakpoint."""
    save_comm: Callable[[], bool]
    """Remembers the current task's name, and that in `last_pid`; true."""
    new_counter: Callable[[], HitCounter | None]
    """A counter at 0; None if there are no cells left."""


@dataclass(frozen=True)
class RecordTarget:
    """A recorder's ring buffer, as guest code writes to it."""

    control_at: int
    """Address of its control block (ring_layout.py)."""
    saves_comm: bool
    make_room: Callable[[], bool]
    """RingBuffer.make_room for the event that `event_time` tells of."""
