"""linux_context: the context of a hit in a distribution's kernel.

The context is data that records show, such as the current task and the preempt count.
"""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.guests.linux.guest.linux_task import THREAD_SIZE
from emulated_kernel.guests.linux.guest.running_linux import RunningLinux
from emulated_kernel.image.linux.btf import Btf
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.kprobes.hit.ctlblk import KprobeCtlblk
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.trace.compiled.guest_addresses import NeedResched
from emulated_kernel.trace.context.trace_ctx import HitContext, PerCpuContext
from emulated_kernel.trace.ring.trace_entry import EntryFlag

_PREEMPT_NEED_RESCHED = 1 << 31
"""Bit of the preemption count; it is clear while the current task should be rescheduled.

Mirrors: arch/x86/include/asm/preempt.h:PREEMPT_NEED_RESCHED (v6.1).
"""
_SOFTIRQ = 0xFF00
_HARDIRQ = 0xF0000
_THREAD_COUNT = "task_struct.thread_info.preempt_count"
_THREAD_CPU = "task_struct.thread_info.cpu"
_FIELDS = ("pid", "comm", "stack", "thread_info.flags")


def linux_need_resched(kernel: LinuxKernel, task_flag: int) -> NeedResched:
    """Return the bits from which compiled handlers read whether the current task should be rescheduled.

    `task_flag`: see RunningLinux.need_resched.
    """
    flag = kernel.btf.offset("task_struct.thread_info.flags"), task_flag
    return NeedResched(_PREEMPT_NEED_RESCHED if _has_per_cpu_count(kernel) else 0, flag)


def _has_per_cpu_count(kernel: LinuxKernel) -> bool:
    """Return True if the preempt count is a per-CPU variable, and False if it is in thread_info."""
    return not kernel.btf.has(_THREAD_COUNT)


def linux_abi(kernel: LinuxKernel, tasks: RunningLinux) -> dict[str, int]:
    """Return the kernel's struct offsets, per-CPU offsets, sizes and masks, for the probe engine.

    The keys are the names in the ABI table of kprobefs's own kernel. If the preempt count is no per-CPU
    variable, the keys of per-CPU variables are left out. Then the offsets of the preempt count and of the
    CPU's number in task_struct are included instead.

    Raises: KernelError ENOEXEC, ENOENT, ENODATA (the kernel's structures are unknown).
    """
    offset = kernel.btf.offset
    found = (
        _per_cpu_abi(kernel, tasks)
        if _has_per_cpu_count(kernel)
        else {name: offset(name) for name in (_THREAD_COUNT, _THREAD_CPU)}
    )
    return found | {
        "preempt.hardirq_mask": _HARDIRQ,
        "preempt.softirq_mask": _SOFTIRQ,
        "thread.size": THREAD_SIZE,
        **{f"task_struct.{name}": offset(f"task_struct.{name}") for name in _FIELDS},
        **_shadow_stacks(kernel.btf, may_have_traced=tasks.may_have_traced),
    }


def _per_cpu_abi(kernel: LinuxKernel, tasks: RunningLinux) -> dict[str, int]:
    count = kernel.required_per_cpu("__preempt_count")
    number = kernel.required_per_cpu("cpu_number")
    own_offset = kernel.required_per_cpu("this_cpu_off")
    return {
        "percpu.base": tasks.per_cpu,
        "percpu.current_task": tasks.current_cell - tasks.per_cpu,
        "percpu.this_cpu_off": own_offset,
        "percpu.cpu_number": number,
        "percpu.preempt_count": count,
        "percpu.need_resched": count,
    }


def _shadow_stacks(btf: Btf, *, may_have_traced: bool) -> dict[str, int]:
    """Return name -> offset of the fields of task_struct in which shadow stacks keep pending calls.

    The names are `task_struct.rethooks` and `task_struct.ret_stack`. If one is left out, Python keeps the
    pending calls. The kernel's own field `rethooks` is used if it exists. If such a kernel also has the field
    kretprobe_instances, the kernel only clears kretprobe_instances at fork. Then `task_struct.ret_stack` has
    the offset of kretprobe_instances. A kernel without rethooks needs kretprobe_instances for its kretprobes,
    so only its own ret_stack is used.

    All fields are 0 when a task is created. The guest has no rethooks of its own, because no module that
    probes can be loaded. `may_have_traced`: see RunningLinux. If it is True, the kernel's own ret_stack may
    be other than 0, so it is left out.
    """
    # Hazard: the kernel reads these fields again long after the task has ended.
    fields = {}
    instances = "task_struct.kretprobe_instances"
    own_stack = "task_struct.ret_stack"
    if btf.has("task_struct.rethooks"):
        fields["task_struct.rethooks"] = btf.offset("task_struct.rethooks")
        if btf.has(instances):
            return fields | {own_stack: btf.offset(instances)}
    if btf.has(own_stack) and not may_have_traced:
        fields[own_stack] = btf.offset(own_stack)
    return fields


def linux_context(
    ctlblk: KprobeCtlblk,
    machine: ProbedMachine,
    abi: Mapping[str, int],
    arch: Arch,
    *,
    preemption: bool,
    need_resched: int,
) -> HitContext:
    """Return the context of hits in a distribution's kernel. `need_resched`: see RunningLinux.

    `preemption`: whether the kernel was built with CONFIG_PREEMPTION.
    """
    kind = FoldedContext if machine.running_task is None else ThreadContext
    return kind(ctlblk, machine, abi, arch, preemption=preemption, need_resched=need_resched)


class FoldedContext(PerCpuContext):
    """Context of hits in an x86 kernel, which keeps the need to reschedule in two flags.

    One flag is a bit in the preempt count; this bit is 0 if there is a need. The other flag is
    TIF_NEED_RESCHED of the task.
    """

    def __init__(
        self,
        ctlblk: KprobeCtlblk,
        machine: ProbedMachine,
        abi: Mapping[str, int],
        arch: Arch,
        *,
        preemption: bool,
        need_resched: int,
    ) -> None:
        """Find the variables from which the context is read; the parameters are those of linux_context()."""
        self._task_flag = need_resched
        self._memory = machine.memory
        self._damage = machine.damage
        self._current = machine.per_cpu_bases[0] + abi["percpu.current_task"]
        self._task_flags = abi["task_struct.thread_info.flags"]
        super().__init__(
            ctlblk, machine.memory, abi, arch.interrupt_flag, machine.per_cpu_bases, preemption=preemption
        )

    def resched_flags(self) -> int:
        flags = 0 if self._need_resched[0] & _PREEMPT_NEED_RESCHED else int(EntryFlag.PREEMPT_RESCHED)
        with self._damage.left_out("current task"):
            task = self._memory.read_word(self._current)
            if self._memory.read_u32(task + self._task_flags) & self._task_flag:
                flags |= EntryFlag.NEED_RESCHED
        return flags


class ThreadContext(HitContext):
    """Context of hits in a kernel that keeps the preempt count in the running task's thread_info.

    Mirrors: include/asm-generic/preempt.h:preempt_count, test_preempt_need_resched (v6.12).
    """

    def __init__(
        self,
        ctlblk: KprobeCtlblk,
        machine: ProbedMachine,
        abi: Mapping[str, int],
        arch: Arch,
        *,
        preemption: bool,
        need_resched: int,
    ) -> None:
        """Find the variables from which the context is read; the parameters are those of linux_context()."""
        assert machine.running_task is not None
        self._task = machine.running_task
        self._read = machine.memory.read_u32
        self._damage = machine.damage
        self._count_at = abi[_THREAD_COUNT]
        self._flags_at = abi["task_struct.thread_info.flags"]
        self._need = need_resched
        super().__init__(
            ctlblk,
            abi,
            arch.interrupt_flag,
            preemption=preemption,
            has_interrupt_mask=arch.has_interrupt_mask,
            is_breakpoint_nmi=arch.is_breakpoint_nmi,
        )

    def preempt_count(self) -> int:
        """Return the running task's preempt count; see HitContext."""
        return self._word(self._count_at)

    def resched_flags(self) -> int:
        needed = self._word(self._flags_at) & self._need
        return int(EntryFlag.NEED_RESCHED | EntryFlag.PREEMPT_RESCHED) if needed else 0

    def _word(self, offset: int) -> int:
        """Return the u32 at `offset` in the running task's task_struct.

        Return 0 if the guest has damaged the pointer to the task_struct.
        """
        with self._damage.left_out("current task"):
            return self._read(self._task() + offset)
        return 0
