"""HitContext: the context in a record, which is the state of interrupts and preemption at the hit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from emulated_kernel.kprobes.hit.ctlblk import KprobeCtlblk
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.trace.ring.trace_entry import EntryFlag

SOFTIRQ_SERVED = 1 << 8
"""SOFTIRQ_OFFSET: amount that is added to preempt_count while a softirq is served.

local_bh_disable() adds twice this amount.
"""
_COUNT_MASK = 0xFF
_MAX_COUNT = 0xF
"""Maximum preempt count that common_preempt_count has room for."""


class HitContext(ABC):
    """Computes common_flags and common_preempt_count of records.

    Mirrors: include/linux/trace_events.h:tracing_gen_ctx_dec, kernel/trace/trace.c:tracing_gen_ctx_irq_test
    (v6.1).
    A breakpoint is entered as an NMI with interrupts off. In a kernel with preemption, Linux subtracts one
    from the word with flags and count, to undo the preempt_disable() of a handler. But a breakpoint's handler
    does not call preempt_disable(). If the count is 0, the subtraction borrows from the higher fields. It
    clears the flag IRQS_OFF, and sets the two counts in common_preempt_count to 15: those of
    preempt_disable() and migrate_disable().
    """

    def __init__(
        self,
        ctlblk: KprobeCtlblk,
        abi: Mapping[str, int],
        interrupt_flag: tuple[str, int],
        *,
        preemption: bool,
        has_interrupt_mask: bool = False,
        is_breakpoint_nmi: bool = True,
    ) -> None:
        """Store the masks of the preempt count, which are in `abi`, and where to find the interrupt flag.

        `abi`: name of a variable, member or mask of the guest kernel -> address, offset or value.
        `interrupt_flag`: name of a register, and the mask of one of its bits. The bit is set while interrupts
        are enabled, or while they are masked if `has_interrupt_mask` is set.
        `preemption`: whether preempt_disable() changes the preempt count. `is_breakpoint_nmi`: whether Linux
        handles a breakpoint in the kernel as an NMI; otherwise the hit has the context of the probed code,
        with interrupts off.
        """
        self._ctlblk = ctlblk
        self._flags, self._interrupts = interrupt_flag
        self._masked = self._interrupts if has_interrupt_mask else 0
        self.disabled_once = int(preemption)
        """Amount that one preempt_disable() adds to preempt_count: 0 in a kernel without preemption."""
        self._hardirq = abi["preempt.hardirq_mask"]
        self._softirq = abi["preempt.softirq_mask"]
        nmi = EntryFlag.NMI | EntryFlag.HARDIRQ
        as_nmi = (nmi, _COUNT_MASK) if preemption else (nmi | EntryFlag.IRQS_OFF, 0)
        self.breakpoint_trace_ctx = as_nmi if is_breakpoint_nmi else None
        """common_flags and common_preempt_count of a hit by a breakpoint.

        The value is None if Linux does not handle breakpoints as NMIs.
        """

    @abstractmethod
    def preempt_count(self) -> int:
        """Return the preempt count of the current CPU."""

    @abstractmethod
    def resched_flags(self) -> int:
        """Return the entry flags for a pending reschedule of the current task, or 0 if none is pending."""

    def hit_trace_ctx(self, regs: Any, more: int = 0) -> tuple[int, int]:
        """Return common_flags and common_preempt_count of a probe's hit with these registers.

        `more`: amount that Linux's handler adds to preempt_count; ignored in a kernel without preemption.
        """
        if not self._ctlblk.by_breakpoint:
            return self.trace_ctx(regs, more)
        if self.breakpoint_trace_ctx is None:
            flags, count = self.trace_ctx(regs, more)
            return flags | EntryFlag.IRQS_OFF, count
        if not more or not self.disabled_once:
            return self.breakpoint_trace_ctx
        # The count is not 0, so the subtraction has no borrow.
        flags, _ = self.breakpoint_trace_ctx
        return flags | EntryFlag.IRQS_OFF, self._shown(more - self.disabled_once)

    def _shown(self, count: int) -> int:
        """Return common_preempt_count of a record that is made with the preempt count `count`.

        Linux limits the count to 15, and then subtracts what the handler's own preempt_disable() has added.
        """
        return max(min(count, _MAX_COUNT - self.disabled_once), 0)

    def trace_ctx(self, regs: Any, more: int = 0) -> tuple[int, int]:
        """Return common_flags and common_preempt_count of the current context, outside of a breakpoint.

        `more`: amount that Linux's handler adds to preempt_count; ignored in a kernel without preemption.
        """
        count = self.preempt_count()
        is_on = (getattr(regs, self._flags) ^ self._masked) & self._interrupts
        flags = 0 if is_on else int(EntryFlag.IRQS_OFF)
        flags |= self.resched_flags()
        if count & self._hardirq:
            flags |= EntryFlag.HARDIRQ
        if count & SOFTIRQ_SERVED:
            flags |= EntryFlag.SOFTIRQ
        if count & self._softirq & ~SOFTIRQ_SERVED:
            flags |= EntryFlag.BH_OFF
        in_list = self.disabled_once if self._ctlblk.in_ops_list else 0
        return flags, self._shown((count & _COUNT_MASK) + in_list + (more if self.disabled_once else 0))


class PerCpuContext(HitContext):
    """The context in a kernel that keeps preempt_count and need_resched in per-CPU variables."""

    def __init__(
        self,
        ctlblk: KprobeCtlblk,
        memory: GuestMemory,
        abi: Mapping[str, int],
        interrupt_flag: tuple[str, int],
        areas: Sequence[int],
        *,
        preemption: bool,
    ) -> None:
        """Get views of the variables preempt_count and need_resched of each CPU.

        `interrupt_flag`: name of a register, and mask of its bit that is set while interrupts are enabled.
        `areas`: address of each CPU's per-CPU area. `abi`, `preemption`: see HitContext.
        """
        self._variables = [
            (_variable(memory, abi, area, "preempt_count"), _variable(memory, abi, area, "need_resched"))
            for area in areas
        ]
        self.switch_to(0)
        super().__init__(ctlblk, abi, interrupt_flag, preemption=preemption)

    def switch_to(self, cpu: int) -> None:
        """Use the variables of another CPU, which has become the current one."""
        self._count, self._need_resched = self._variables[cpu]

    def preempt_count(self) -> int:
        """Return the preempt count of the current CPU; see HitContext."""
        return int(self._count[0])

    def resched_flags(self) -> int:
        """Return the entry flags for a pending reschedule of the current task; see HitContext."""
        return int(EntryFlag.NEED_RESCHED | EntryFlag.PREEMPT_RESCHED) if self._need_resched[0] else 0


def _variable(memory: GuestMemory, abi: Mapping[str, int], area: int, name: str) -> memoryview:
    return memory.view(area + abi[f"percpu.{name}"], 4).cast("I")
