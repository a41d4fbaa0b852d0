"""Guest addresses of the data that compiled handlers need; Python's handlers ask the host for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emulated_kernel.machine.guest_clock import GuestClock
from emulated_kernel.trace.fetch.fetch_types import MAX_STRING_SIZE
from emulated_kernel.trace.ring.buffer_page import MAX_DATA_SIZE
from emulated_kernel.util.fast_dataclass import dataclass

SCRATCH_SIZE = MAX_DATA_SIZE + MAX_STRING_SIZE + 8
"""Bytes of the scratch memory: an entry of maximal size, another string, and padding."""


@dataclass(frozen=True)
class HitCounter:
    """A counter of hits that guest code increments; each CPU has a u64."""

    offset: int
    """Offset of the u64 from each CPU's base, in bytes."""
    words: Sequence[memoryview]
    """Memory of each CPU as u64 words; the counter of a CPU is words[cpu][index]."""
    index: int
    release: Callable[[], None]
    """Frees the memory, after no guest code uses the counter any more."""

    @property
    def value(self) -> int:
        """The sum of the hits of all CPUs."""
        index = self.index
        return sum(words[index] for words in self.words)

    def reset(self) -> None:
        """Set the counter to 0."""
        for words in self.words:
            words[self.index] = 0


@dataclass(frozen=True)
class NeedResched:
    """The way in which a kernel indicates that the current task has to be rescheduled."""

    not_needed: int = 0
    """Bits of the u32 `need_resched` that are set while no rescheduling is needed: none, or one bit."""
    task_flag: tuple[int, int] | None = None
    """Offset of a u32 in the task_struct, and the bit in it that indicates the same."""


@dataclass(frozen=True)
class GuestAddresses:
    """Addresses and offsets in the guest, in bytes. A per-CPU offset counts from the CPU's base."""

    clock: int
    """Address of the time in ns, a u64 that all CPUs share."""
    time: GuestClock
    """The clock, which defines how much a reading adds to the time."""
    this_cpu_off: int
    """Per-CPU offset of the CPU's base."""
    cpu_number: int
    """Per-CPU offset of the CPU's number, a u32."""
    current_task: int
    """Per-CPU offset of the pointer to the current task_struct."""
    pid: int
    """Offset in a task_struct, as is `comm`."""
    comm: int
    preempt_count: int
    """Per-CPU offset of a u32, as is `need_resched`."""
    need_resched: int
    resched: NeedResched
    hardirq_mask: int
    softirq_mask: int
    interrupt_flag: tuple[str, int]
    """Register and bit that are set while interrupts are enabled."""
    last_pid: int
    """Per-CPU offset of a u64: the pid whose name was saved last."""
    event_time: int
    """Per-CPU offset of two u64: time and length of the event for which the host has to make room."""
    scratch: int
    """Per-CPU offset of SCRATCH_SIZE bytes, in which an entry is assembled."""
    breakpoint_context: tuple[int, int]
    """common_flags and common_preempt_count of a hit by a breakpoint."""
    save_comm: Callable[[], bool]
    """Saves the name of the current task, and its pid in `last_pid`. Returns True."""
    new_counter: Callable[[], HitCounter | None]
    """Returns a counter with value 0, or None if the per-CPU memory is used up."""
