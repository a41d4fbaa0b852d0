"""Profiles: which of Linux's ways of probing a kernel is built with, as named presets of switches."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, immutable


class Stepper(Enum):
    """What ends the execution of a copied instruction."""

    BREAKPOINT = auto()
    """A second int3 behind the copy (Linux 5.12 and later)."""
    TRAP_FLAG = auto()
    """The processor's single-step trap."""


class RegisterSaving(Enum):
    """Which registers a compiled handler saves."""

    LIVE = "live"
    """Those that it changes and that the probed function may still read."""
    ALL = "all"
    """All of them, as struct pt_regs."""


class QuiesceMethod(Enum):
    """How a commit makes sure that no task is within a detoured region ("Djprobe", section 2.2)."""

    SYNCHRONIZE_SCHED = auto()
    """Each CPU goes through the scheduler: enough where the kernel isn't preempted."""
    FREEZE_PROCESSES = auto()
    """Each task goes to the refrigerator, and is thawed after the commit."""


class TrampolineForm(Enum):
    """How return handlers are reached from where hooked functions return to."""

    ASSEMBLY = auto()
    """Code saves a struct pt_regs for them, and restores it."""
    BREAKPOINT = auto()
    """A breakpoint alone; all registers are live."""


@immutable
@dataclass(frozen=True)
class Profile:
    """Build options that decide how a probe is reached; each can be chosen by itself."""

    name: str
    preemption: bool = True
    """CONFIG_PREEMPTION: without it boostable instructions run with a jump back behind their copies."""
    stepper: Stepper = Stepper.BREAKPOINT
    ftrace: bool = True
    """CONFIG_KPROBES_ON_FTRACE: probes on fentry sites are called; without it the sites are plain nops."""
    optimizer: bool = True
    """CONFIG_OPTPROBES: jump optimization."""
    strategies: tuple[str, ...] = ("optprobe",)
    """Whose rules it follows: the first of Arch.strategies that the architecture has."""
    djprobe: QuiesceMethod | None = None
    """How commit_kprobes() waits, which writes the jumps; without it no probe has a `length`."""
    jprobes: bool = False
    """register_jprobe(), up to Linux 4.14."""
    fprobe_events: bool = False
    """dynamic_events takes `f` lines, as from Linux 6.5 on."""
    fault_handlers: bool = False
    """A probe may have a fault_handler, up to Linux 5.13."""
    return_hook: str = "rethook"
    """The shadow stack: one of RETURN_HOOKS."""
    trampoline: TrampolineForm = TrampolineForm.ASSEMBLY
    saving: RegisterSaving = RegisterSaving.LIVE
    """Linux knows no other than ALL."""
    compiled: bool = True
    """Handlers of events become guest code. Without it each hit is handled by Python."""


DEFAULT = "linux-6.1"
OUT_OF_TREE = ("optprobe", "optprobe-riscv")
"""With a patch that Linux never took: "Add OPTPROBES feature on RISCV", v6, 2023."""
_OLD: dict[str, Any] = {
    "stepper": Stepper.TRAP_FLAG,
    "ftrace": False,
    "jprobes": True,
    "fault_handlers": True,
    "return_hook": "instances",
}

RETURN_HOOKS = ("rethook", "objpool", "instances", "fgraph", "unified")
"""Shadow stacks: Linux 6.1's, 6.7's, 5.10's, the function graph's, and that one for everybody; hooks.py has
the class of each."""

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile(DEFAULT),
            Profile("linux-6.1-nopreempt", preemption=False),
            Profile("linux-6.1-fprobe", fprobe_events=True),
            Profile("kprobes-2010", False, optimizer=False, trampoline=TrampolineForm.BREAKPOINT, **_OLD),
            Profile("optprobes-2009", False, **_OLD),
            Profile(
                "riscv-optprobes-2023",
                ftrace=False,
                strategies=OUT_OF_TREE,
                saving=RegisterSaving.ALL,
                return_hook="instances",
            ),
            Profile(
                "djprobe-2007",
                False,
                strategies=("djprobe",),
                djprobe=QuiesceMethod.SYNCHRONIZE_SCHED,
                **_OLD,
            ),
            Profile(
                "djprobe-2007-preempt",
                True,
                strategies=("djprobe",),
                djprobe=QuiesceMethod.FREEZE_PROCESSES,
                **_OLD,
            ),
        )
    }
)
"""The presets by name."""


def profile_named(name: str) -> Profile:
    """A preset. Raises: KernelError EINVAL (an unknown one)."""
    try:
        return PROFILES[name]
    except KeyError:
        raise KernelError(errno.EINVAL, f"no profile {name}; there are {', '.join(PROFILES)}") from None
