"""What records say of the context of a distribution's kernel, and where its structures have that."""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.guests.linux.guest.linux_task import NEED_RESCHED, THREAD_SIZE
from emulated_kernel.guests.linux.guest.running_linux import RunningLinux
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.kprobes.hit.ctlblk import KprobeCtlblk
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.trace.compiled.guest_addresses import NeedResched
from emulated_kernel.trace.context.trace_ctx import HitContext
from emulated_kernel.trace.ring.trace_entry import EntryFlag
from emulated_kernel.util.errors import KernelError

_SHADOW_STACKS = {"rethooks": "rethooks", "ret_stack": "kretprobe_instances"}
"""By the names of our own image's fields, those of its task_struct that shadow stacks hang on."""
_WORD = 8
_PREEMPT_NEED_RESCHED = 1 << 31
"""PREEMPT_NEED_RESCHED, which is clear while the task is asked to give the CPU up."""
_SOFTIRQ = 0xFF00
_HARDIRQ = 0xF0000
_FIELDS = ("pid", "comm", "stack", "thread_info.flags")


def linux_need_resched(kernel: LinuxKernel) -> NeedResched:
    """How guest code learns whether the current task is asked to give the CPU up."""
    return NeedResched(
        _PREEMPT_NEED_RESCHED, (kernel.btf.offset("task_struct.thread_info.flags"), NEED_RESCHED)
    )


def linux_abi(kernel: LinuxKernel, tasks: RunningLinux) -> dict[str, int]:
    """By the names of our own image's table. Raises: KernelError ENOEXEC, ENOENT, ENODATA."""
    offset = kernel.btf.offset
    names = "__preempt_count", "cpu_number", "this_cpu_off"
    count, number, own_offset = map(kernel.per_cpu, names)
    if count is None or number is None or own_offset is None:
        raise unusable("its symbols lack __preempt_count, cpu_number or this_cpu_off")
    return {
        "percpu.base": tasks.per_cpu,
        "percpu.current_task": tasks.current_cell - tasks.per_cpu,
        "percpu.this_cpu_off": own_offset,
        "percpu.cpu_number": number,
        "percpu.preempt_count": count,
        "percpu.need_resched": count,
        "preempt.hardirq_mask": _HARDIRQ,
        "preempt.softirq_mask": _SOFTIRQ,
        "thread.size": THREAD_SIZE,
        **{f"task_struct.{name}": offset(f"task_struct.{name}") for name in _FIELDS},
        **_shadow_stacks(kernel),
    }


def _shadow_stacks(kernel: LinuxKernel) -> dict[str, int]:
    """Where a task has its pending calls: the field that the kernel's own rethooks would use, if it has them,
    and the one beside it, of which nothing has been done since but that it is cleared at fork.

    Both are empty when a task is made; for rethooks the kernel looks again when the task is long dead. It has
    none of its own meanwhile: nobody can load a module that probes. Without both, side by side, Python keeps
    all calls.
    """
    try:
        found = {
            f"task_struct.{ours}": kernel.btf.offset(f"task_struct.{theirs}")
            for ours, theirs in _SHADOW_STACKS.items()
        }
    except KernelError:
        return {}
    # A kernel with randomized structures has them anywhere.
    return found if max(found.values()) - min(found.values()) == _WORD else {}


class LinuxContext(HitContext):
    """Whether the task is asked to give the CPU up stands in two places."""

    def __init__(
        self,
        ctlblk: KprobeCtlblk,
        machine: ProbedMachine,
        abi: Mapping[str, int],
        arch: Arch,
        *,
        preemption: bool,
    ) -> None:
        self._memory = machine.memory
        self._current = machine.per_cpu_bases[0] + abi["percpu.current_task"]
        self._task_flags = abi["task_struct.thread_info.flags"]
        super().__init__(
            ctlblk, machine.memory, abi, arch.interrupt_flag, machine.per_cpu_bases, preemption=preemption
        )

    def resched_flags(self) -> int:
        task = self._memory.read_word(self._current)
        flags = 0 if self._need_resched[0] & _PREEMPT_NEED_RESCHED else int(EntryFlag.PREEMPT_RESCHED)
        if self._memory.read_u32(task + self._task_flags) & NEED_RESCHED:
            flags |= EntryFlag.NEED_RESCHED
        return flags
