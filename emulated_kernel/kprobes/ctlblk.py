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
    """A CPU's probe state: which probe is being handled, and which one it interrupted.

    Mirrors: struct kprobe_ctlblk.
    """

    running: Kprobe | None = None
    status: HitStatus = HitStatus.STEP_DONE
    interrupted: list[tuple[Kprobe, HitStatus]] = field(default_factory=list)
    by_breakpoint: bool = False
    """The latest hit came by a breakpoint, whose entry Linux counts as an NMI."""
