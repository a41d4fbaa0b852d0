"""Guest addresses of the clock, task and per-CPU data that compiled handlers read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emulated_kernel.arch.program.cpu_words import CpuWords
from emulated_kernel.machine.guest_clock import GuestClock
from emulated_kernel.trace.fetch.fetch_types import MAX_STRING_SIZE
from emulated_kernel.trace.ring.buffer_page import MAX_DATA_SIZE
from emulated_kernel.util.fast_dataclass import dataclass

SCRATCH_SIZE = MAX_DATA_SIZE + MAX_STRING_SIZE + 8
"""Size of each CPU's scratch memory in bytes: an entry of maximum size, another string, and padding."""


@dataclass(frozen=True)
class HitCounter:
    """A counter of hits that guest code increments; each CPU has a u64."""

    offset: int
    """Offset of the u64 from each CPU's base, in bytes."""
    words: Sequence[memoryview]
    """Memory of each CPU as u64 words; the counter of a CPU is words[cpu][index]."""
    index: int
    """Index of the counter in the words of each CPU."""
    release: Callable[[], None]
    """Function that frees the counter. Call it after the guest code that increments the counter was freed."""

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
    """The way in which a kernel indicates that the current task has to be rescheduled.

    A kernel uses a u32 in the per-CPU data, a flag of the task, or both. If it uses both, the u32 is recorded
    as PREEMPT_RESCHED in common_flags, and the task's flag as NEED_RESCHED.
    """

    not_needed: int = 0
    """Mask of a bit in a per-CPU u32; the bit is 0 while rescheduling is needed.

    The u32 is that of GuestAddresses.need_resched. If `not_needed` is 0, the u32 is a plain flag, which is
    not 0 while rescheduling is needed.
    """
    task_flag: tuple[int, int] | None = None
    """Offset of a u32 in task_struct, and mask of the u32's bit that is set while rescheduling is needed.

    The value is None if the kernel has only the u32 in the per-CPU data.
    """


@dataclass(frozen=True)
class GuestAddresses:
    """Addresses and offsets in the guest, in bytes. A per-CPU offset is relative to each CPU's base."""

    clock: int
    """Address of the guest's time in nanoseconds, a u64 that all CPUs share."""
    time: GuestClock
    """The guest's clock; its step_ns is added to the time at each reading."""
    this_cpu_off: int | None
    """Per-CPU offset of the word that holds the CPU's base; None if the base is 0."""
    cpu: CpuWords
    pid: int
    """Offset of the pid in task_struct."""
    comm: int
    """Offset of the task's name in task_struct."""
    need_resched: int | None
    """Per-CPU offset of the u32 that `resched` describes; None if the kernel uses only a flag of the task."""
    resched: NeedResched
    hardirq_mask: int
    """Bits of the preempt count that are set in a hard interrupt."""
    softirq_mask: int
    """Bits of the preempt count that are set while a softirq is served or softirqs are disabled."""
    interrupt_flag: tuple[str, int]
    """Name of a register, and mask of its bit that shows whether interrupts are enabled.

    `has_interrupt_mask` gives the meaning of the bit.
    """
    has_interrupt_mask: bool
    """Whether the bit of `interrupt_flag` is set while interrupts are masked.

    If the value is False, the bit is set while interrupts are enabled.
    """
    last_pid: int
    """Per-CPU offset of a u64: pid of the task for which guest code on this CPU last called `save_comm`.

    The value is 0xFFFFFFFF if the name must be saved in any case.
    """
    request: int
    """Per-CPU offset of the memory in which guest code asks for room in a ring buffer.

    next_page.py has the layout of such a request. RecordTarget.make_room reads the event's time and length
    from it.
    """
    scratch: int
    """Per-CPU offset of the scratch memory of SCRATCH_SIZE bytes, in which guest code assembles an entry."""
    breakpoint_context: tuple[int, int] | None
    """common_flags and common_preempt_count of a hit by a breakpoint, if Linux handles it as an NMI.

    The value is None if Linux does not. Then the record has the context of the probed code, but with
    interrupts off.
    """
    save_comm: Callable[[], bool]
    """Host call that saves the current task's name for tracefs, and stores the pid at `last_pid`.

    The result is always True, which means that guest code continues.
    """
    new_counter: Callable[[], HitCounter | None]
    """Returns a counter with value 0, or None if the per-CPU memory is used up."""
