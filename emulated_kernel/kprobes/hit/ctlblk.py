"""KprobeCtlblk: the per-CPU state of hit handling."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from time import perf_counter_ns
from typing import TypeAlias

from emulated_kernel.kprobes.aggr_kprobe import COSTS_KEPT, AggrKprobe
from emulated_kernel.util.fast_dataclass import dataclass, field


class HitStatus(Enum):
    """State of a hit. Mirrors: include/asm-generic/kprobes.h KPROBE_HIT_*, KPROBE_REENTER."""

    ACTIVE = auto()
    SINGLE_STEP = auto()
    REENTER = auto()
    STEP_DONE = auto()


_State: TypeAlias = "tuple[AggrKprobe | None, HitStatus, list[tuple[AggrKprobe, HitStatus]], bool, bool, int]"
"""Saved state of a CPU that is not the current one: the fields `running` to `started` of KprobeCtlblk."""


@dataclass
class KprobeCtlblk:
    """The current CPU's probe state: the probe whose hit is being handled, and the probes it interrupted.

    Handlers of hits can keep a reference to the object. It serves all CPUs, and `switch_to` exchanges its
    contents.
    A hit whose handlers and step are guest code has no state here.
    Mirrors: struct kprobe_ctlblk, current_kprobe.
    """

    python: memoryview
    """TrapHooks.python, which follows `running`."""
    running: AggrKprobe | None = None
    """The probe whose hit Python handles on the current CPU; change it by `set_running`."""
    status: HitStatus = HitStatus.STEP_DONE
    interrupted: list[tuple[AggrKprobe, HitStatus]] = field(default_factory=list)
    by_breakpoint: bool = False
    """Whether the latest hit came by a breakpoint, whose exception Linux counts as an NMI."""
    in_ops_list: bool = False
    """Whether several users of one fentry site are being called. Linux: disables preemption meanwhile."""
    started: int = 0
    """Time at which the latest hit started, in nanoseconds."""
    cpu: int = 0
    _others: dict[int, _State] = field(default_factory=dict)

    @property
    def is_underway(self) -> bool:
        """Return True if Python is handling a hit of any CPU."""
        return self.running is not None or any(state[0] is not None for state in self._others.values())

    def set_running(self, head: AggrKprobe | None) -> None:
        """Set `running`, and send all traps to Python while `running` is not None."""
        self.running = head
        self.python[0] = head is not None

    def set_current(self, head: AggrKprobe, by_breakpoint: bool, status: HitStatus) -> None:
        """Begin a hit. Mirrors: set_current_kprobe (v6.1)."""
        self.started = perf_counter_ns()
        # The statements of set_running() without the call, for speed: each hit in Python runs them.
        self.running = head
        self.python[0] = 1
        self.status = status
        self.by_breakpoint = by_breakpoint

    def reset_current(self, head: AggrKprobe) -> None:
        """End the probe's hit, unless it was abandoned. Mirrors: reset_current_kprobe (v6.1)."""
        self.running = None
        self.python[0] = 0
        cost = head.cost
        if cost.latest is None:
            cost.latest = deque(maxlen=COSTS_KEPT)
        cost.latest.append(perf_counter_ns() - self.started)

    def save_previous(self, head: AggrKprobe) -> None:
        """Begin a hit of `head` within the handling of another hit. Mirrors: save_previous_kprobe (v6.1)."""
        assert self.running is not None
        self.interrupted.append((self.running, self.status))
        self.running = head
        self.status = HitStatus.REENTER

    def restore_previous(self) -> None:
        """End a hit within another hit, and resume the latter. Mirrors: restore_previous_kprobe (v6.1)."""
        head, self.status = self.interrupted.pop()
        self.set_running(head)

    def forget_current(self) -> None:
        """End the current hit before its step has ended, because it faulted or its task was killed."""
        if self.status is HitStatus.REENTER:
            self.restore_previous()
        else:
            self.set_running(None)

    def abandon(self) -> None:
        """Forget all hits of the CPU, because the guest's run was given up and the hits never end."""
        self.interrupted.clear()
        self.set_running(None)
        self.in_ops_list = False

    def switch_to(self, cpu: int) -> None:
        """Save the current CPU's state, and load the state of CPU number `cpu`."""
        self._others[self.cpu] = (
            self.running,
            self.status,
            self.interrupted,
            self.by_breakpoint,
            self.in_ops_list,
            self.started,
        )
        self.cpu = cpu
        (
            running,
            self.status,
            self.interrupted,
            self.by_breakpoint,
            self.in_ops_list,
            self.started,
        ) = self._others.get(cpu) or (None, HitStatus.STEP_DONE, [], False, False, 0)
        self.set_running(running)
