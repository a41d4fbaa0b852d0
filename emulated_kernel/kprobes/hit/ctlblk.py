"""KprobeCtlblk: the per-CPU state of hit handling."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TypeAlias

from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.current_kprobe import CurrentKprobe
from emulated_kernel.util.fast_dataclass import dataclass, field

_State: TypeAlias = "tuple[AggrKprobe | None, list[AggrKprobe], bool, bool, int]"
"""Saved state of a CPU that is not the current one: the fields of KprobeCtlblk from `running` on."""


@dataclass
class KprobeCtlblk:
    """The current CPU's probe state: the probe whose hit is being handled, and the probes it interrupted.

    There is one object for all CPUs, so that handlers of hits can keep a reference to it. When the current
    CPU changes, switch_to() exchanges the contents of the object. If the handlers and the step of a hit are
    guest code, this object holds no state of the hit.
    Mirrors: struct kprobe_ctlblk, current_kprobe.
    """

    python: memoryview
    """View of TrapHooks.python: 1 if the guest runs within a hit and its traps go to Python, else 0."""
    current_kprobe: CurrentKprobe
    """Variable of the guest that tells compiled handlers whether the guest runs within a hit."""
    running: AggrKprobe | None = None
    """The probe whose hit Python handles on the current CPU; None if there is no such hit."""
    interrupted: list[AggrKprobe] = field(default_factory=list)
    """Probes whose hits were interrupted by the hit of `running`; the last was interrupted most recently.

    In Linux, kprobe_status is KPROBE_REENTER during a hit that has interrupted another one.
    """
    by_breakpoint: bool = False
    """Whether the hit of `running` came by a breakpoint, whose exception Linux counts as an NMI."""
    in_ops_list: bool = False
    """Whether several users (FtraceOps) of one fentry site are being called.

    Linux disables preemption during these calls.
    """
    started: int = 0
    """Value of perf_counter_ns() at the start of the hit of `running`; reset_current() needs it.

    It is set before the step and the post_handlers of a hit. Until then, it may have the value of an earlier
    hit.
    """
    cpu: int = 0
    _others: dict[int, _State] = field(default_factory=dict)

    @property
    def is_underway(self) -> bool:
        """Return True if Python is handling a hit on any CPU."""
        return self.running is not None or any(state[0] is not None for state in self._others.values())

    def set_running(self, head: AggrKprobe | None, *, by_breakpoint: bool = False) -> None:
        """Begin a hit of `head`, during which the guest runs. If `head` is None, end the current hit.

        `by_breakpoint`: whether the hit came by a breakpoint.
        Mirrors: arch/x86/kernel/kprobes/core.c:set_current_kprobe (v6.1).
        """
        self.running = head
        self.by_breakpoint = by_breakpoint
        self._set_within(head is not None)

    def enter_python(self) -> None:
        """Make all traps go to Python from now on; called before the guest runs within the current hit."""
        self._set_within(True)

    def leave_python(self) -> None:
        """No longer make all traps go to Python; called after the guest has run within the current hit."""
        self._set_within(False)

    def _set_within(self, within: bool) -> None:
        """Store whether the guest runs within a hit, for compiled handlers and the host's trap routine."""
        self.python[0] = within
        words = self.current_kprobe.words
        if words:
            words[self.cpu][0] = within

    def reset_current(self, head: AggrKprobe) -> None:
        """End the hit of `head`, and add its duration in nanoseconds to `head.cost`.

        Mirrors: include/linux/kprobes.h:reset_current_kprobe (v6.1).
        """
        self.set_running(None)
        head.cost.kept().append(perf_counter_ns() - self.started)

    def save_previous(self, head: AggrKprobe) -> None:
        """Begin a hit of `head` within the handling of another hit.

        Mirrors: arch/x86/kernel/kprobes/core.c:save_previous_kprobe (v6.1).
        """
        assert self.running is not None
        self.interrupted.append(self.running)
        self.running = head

    def restore_previous(self) -> None:
        """End a hit that occurred within another hit; the other hit continues.

        Mirrors: arch/x86/kernel/kprobes/core.c:restore_previous_kprobe (v6.1).
        """
        self.running = self.interrupted.pop()

    def forget_current(self) -> None:
        """End the current hit before its step has ended, because the step faulted or the task was killed."""
        if self.interrupted:
            self.restore_previous()
        else:
            self.set_running(None)

    def restore_to(self, depth: int) -> None:
        """End the hits that occurred during an aborted handler, which the guest ran.

        `depth`: length of `interrupted` before the handler ran.
        """
        while len(self.interrupted) > depth:
            self.restore_previous()

    def abandon(self) -> None:
        """Forget all hits of the CPU, because the guest's run was aborted, so that the hits never end."""
        self.interrupted.clear()
        self.set_running(None)
        self.in_ops_list = False

    def switch_to(self, cpu: int) -> None:
        """Save the current CPU's state, and load the state of CPU number `cpu`."""
        self._others[self.cpu] = (
            self.running,
            self.interrupted,
            self.by_breakpoint,
            self.in_ops_list,
            self.started,
        )
        self.cpu = cpu
        (
            self.running,
            self.interrupted,
            self.by_breakpoint,
            self.in_ops_list,
            self.started,
        ) = self._others.get(cpu) or (None, [], False, False, 0)
        self.python[0] = self.running is not None
