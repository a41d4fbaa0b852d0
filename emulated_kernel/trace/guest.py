"""Where handlers in guest code find what handlers in Python ask the host for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emulated_kernel.trace.ring_page import MAX_DATA_SIZE

MAX_STRING_SIZE = 4096
"""Bytes of a fetched string, its ending NUL included."""
SCRATCH_SIZE = MAX_DATA_SIZE + MAX_STRING_SIZE + 8
"""Bytes: an entry that is as large as can be, another string, and padding."""


@dataclass(frozen=True)
class HitCounter:
    """A cell of each CPU that guest code counts hits in."""

    offset: int
    """Of the cell, from each CPU's base."""
    words: Sequence[memoryview]
    """Memory of each CPU as u64, in which it has the number `index`."""
    index: int
    release: Callable[[], None]
    """Gives the cells back, when no guest code counts in them any more."""

    @property
    def value(self) -> int:
        """Hits on all CPUs."""
        index = self.index
        return sum(words[index] for words in self.words)

    def reset(self) -> None:
        """Count from 0 again."""
        for words in self.words:
            words[self.index] = 0


@dataclass(frozen=True)
class GuestPlaces:
    """Addresses and offsets in the guest. Cells are u64, one of each CPU, at an offset from its base."""

    clock: int
    """Address of the time in ns, a u64 of all CPUs."""
    clock_step: Callable[[], int]
    """What a reading adds to it now."""
    this_cpu_off: int
    """Per-CPU offset of the CPU's base."""
    cpu_number: int
    """Per-CPU offset of the CPU's number, a u32."""
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
    interrupt_flag: tuple[str, int]
    """Register and bit that say whether interrupts are on."""
    last_pid: int
    """Cell: the pid whose name was remembered last."""
    event_time: int
    """Cell: the time of the event that the host is asked to make room for; behind it its length."""
    scratch: int
    """Offset of SCRATCH_SIZE bytes that an entry is put together in."""
    breakpoint_context: tuple[int, int]
    """common_flags and common_preempt_count of a hit by a breakpoint."""
    save_comm: Callable[[], bool]
    """Remembers the current task's name, and that in `last_pid`; true."""
    new_counter: Callable[[], HitCounter | None]
    """A counter at 0; None if there are no cells left."""


@dataclass(frozen=True)
class RecordTarget:
    """A recorder's ring buffers, one of each CPU, as guest code writes to them."""

    control_at: int
    """Offset of the control blocks (ring_layout.py)."""
    saves_comm: bool
    make_room: Callable[[], bool]
    """RingBuffer.make_room of the CPU's buffer for the event that `event_time` tells of."""
