"""Where handlers in guest code find what handlers in Python ask the host for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emulated_kernel.machine.guest_clock import GuestClock
from emulated_kernel.trace.fetch.fetch_types import MAX_STRING_SIZE
from emulated_kernel.trace.ring.buffer_page import MAX_DATA_SIZE
from emulated_kernel.util.fast_dataclass import dataclass

SCRATCH_SIZE = MAX_DATA_SIZE + MAX_STRING_SIZE + 8
"""Bytes: an entry that is as large as can be, another string, and padding."""


@dataclass(frozen=True)
class HitCounter:
    """Hits that guest code counts: a u64 of each CPU."""

    offset: int
    """Of the u64, from each CPU's base; bytes."""
    words: Sequence[memoryview]
    """Each CPU's memory as u64: its counter is words[cpu][index]."""
    index: int
    release: Callable[[], None]
    """Gives the memory back, when no guest code counts in them any more."""

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
class NeedResched:
    """How a kernel says that the current task is asked to give the CPU up."""

    not_needed: int = 0
    """What the u32 `need_resched` has of it while it isn't: nothing, or one bit."""
    task_flag: tuple[int, int] | None = None
    """Offset in a task_struct of a u32, and the bit there that says so too."""


@dataclass(frozen=True)
class GuestAddresses:
    """Addresses and offsets in the guest, in bytes; a per-CPU offset counts from the CPU's base."""

    clock: int
    """Address of the time in ns, a u64 of all CPUs."""
    time: GuestClock
    """It says what a reading adds to that."""
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
    resched: NeedResched
    hardirq_mask: int
    softirq_mask: int
    interrupt_flag: tuple[str, int]
    """Register and bit that say whether interrupts are on."""
    last_pid: int
    """Per-CPU offset of a u64: the pid whose name was saved last."""
    event_time: int
    """Per-CPU offset of two u64: time and length of the event that the host has to reserve."""
    scratch: int
    """Per-CPU offset of SCRATCH_SIZE bytes that an entry is put together in."""
    breakpoint_context: tuple[int, int]
    """common_flags and common_preempt_count of a hit by a breakpoint."""
    save_comm: Callable[[], bool]
    """Saves the current task's name, and its pid in `last_pid`; true."""
    new_counter: Callable[[], HitCounter | None]
    """A counter at 0; None if the per-CPU memory is used up."""
