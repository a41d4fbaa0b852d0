"""KprobeCtlblk: what a CPU is doing about probes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from emulated_kernel.kprobes.kprobe import Kprobe


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
    cpu: int = 0
    _others: dict[int, tuple[Kprobe | None, HitStatus, list[tuple[Kprobe, HitStatus]], bool]] = field(
        default_factory=dict
    )

    @property
    def is_underway(self) -> bool:
        """Whether any CPU handles a hit."""
        return self.running is not None or any(state[0] is not None for state in self._others.values())

    def switch_to(self, cpu: int) -> None:
        """Another CPU is current."""
        self._others[self.cpu] = self.running, self.status, self.interrupted, self.by_breakpoint
        self.cpu = cpu
        state = self._others.get(cpu) or (None, HitStatus.STEP_DONE, [], False)
        self.running, self.status, self.interrupted, self.by_breakpoint = state
