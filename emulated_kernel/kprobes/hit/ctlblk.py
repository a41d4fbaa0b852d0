"""KprobeCtlblk: what a CPU is doing about probes."""

from __future__ import annotations

from collections import deque
from dataclasses import field
from enum import Enum, auto
from time import perf_counter_ns

from emulated_kernel.kprobes.kprobe import COSTS_KEPT, Kprobe
from emulated_kernel.util.fast_dataclass import dataclass


class HitStatus(Enum):
    """Mirrors: include/asm-generic/kprobes.h KPROBE_HIT_*, KPROBE_REENTER."""

    ACTIVE = auto()
    SINGLE_STEP = auto()
    REENTER = auto()
    STEP_DONE = auto()


@dataclass
class KprobeCtlblk:
    """The current CPU's probe state: which probe is being handled, and which one it interrupted.

    One object for all CPUs, which the handlers of hits can hold on to; `switch_to` exchanges what is in it.
    Mirrors: struct kprobe_ctlblk, current_kprobe.
    """

    running: Kprobe | None = None
    status: HitStatus = HitStatus.STEP_DONE
    interrupted: list[tuple[Kprobe, HitStatus]] = field(default_factory=list)
    by_breakpoint: bool = False
    """The latest hit came by a breakpoint, whose entry Linux counts as an NMI."""
    in_ops_list: bool = False
    """Several users of one fentry site are being called, which Linux does with preemption disabled."""
    cpu: int = 0
    _others: dict[int, tuple[Kprobe | None, HitStatus, list[tuple[Kprobe, HitStatus]], bool, bool]] = field(
        default_factory=dict
    )

    @property
    def is_underway(self) -> bool:
        """Whether any CPU handles a hit."""
        return self.running is not None or any(state[0] is not None for state in self._others.values())

    def set_current(self, kprobe: Kprobe, by_breakpoint: bool, status: HitStatus) -> None:
        """A hit begins. Mirrors: set_current_kprobe (v6.1)."""
        kprobe.cost.started = perf_counter_ns()
        self.running = kprobe
        self.status = status
        self.by_breakpoint = by_breakpoint

    def reset_current(self, kprobe: Kprobe) -> None:
        """The probe's hit is over, if it hasn't been abandoned. Mirrors: reset_current_kprobe (v6.1)."""
        self.running = None
        cost = kprobe.cost
        if cost.latest is None:
            cost.latest = deque(maxlen=COSTS_KEPT)
        cost.latest.append(perf_counter_ns() - cost.started)

    def save_previous(self, kprobe: Kprobe) -> None:
        """A probe is hit within the handling of another hit. Mirrors: save_previous_kprobe (v6.1)."""
        assert self.running is not None
        self.interrupted.append((self.running, self.status))
        self.running = kprobe
        self.status = HitStatus.REENTER

    def restore_previous(self) -> None:
        """The hit within the other one is over. Mirrors: restore_previous_kprobe (v6.1)."""
        self.running, self.status = self.interrupted.pop()

    def forget_current(self) -> None:
        """Leave the current hit without its step's end: it faulted, or its task was killed."""
        if self.status is HitStatus.REENTER:
            self.restore_previous()
        else:
            self.running = None

    def abandon(self) -> None:
        """The guest's run was given up: hits that it interrupted will not be resumed."""
        self.interrupted.clear()
        self.running = None
        self.in_ops_list = False

    def switch_to(self, cpu: int) -> None:
        """Another CPU is current."""
        left = self.running, self.status, self.interrupted, self.by_breakpoint, self.in_ops_list
        self._others[self.cpu] = left
        self.cpu = cpu
        state = self._others.get(cpu) or (None, HitStatus.STEP_DONE, [], False, False)
        self.running, self.status, self.interrupted, self.by_breakpoint, self.in_ops_list = state
