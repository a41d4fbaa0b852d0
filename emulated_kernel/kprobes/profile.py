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
    """Build options of a kernel that decide how probes work; each can be selected on its own."""

    name: str
    """Name of the preset."""
    preemption: bool = True
    """CONFIG_PREEMPTION. Without it, the copy of a boostable instruction ends in a jump back."""
    stepper: Stepper = Stepper.BREAKPOINT
    """How the step of a copied instruction ends."""
    ftrace: bool = True
    """CONFIG_KPROBES_ON_FTRACE. Without it, fentry sites are plain nops."""
    optimizer: bool = True
    """CONFIG_OPTPROBES: jump optimization."""
    strategies: tuple[str, ...] = ("optprobe",)
    """Names of optimizers' rules; the first that the architecture has is followed."""
    djprobe: QuiesceMethod | None = None
    """How commit_kprobes() waits before it writes the jumps. If it is None, there are no djprobes."""
    jprobes: bool = False
    """Whether register_jprobe() exists (Linux up to 4.14)."""
    fprobe_events: bool = False
    """Whether dynamic_events accepts `f` lines (Linux since 6.5)."""
    fault_handlers: bool = False
    """Whether a probe may have a fault_handler (Linux up to 5.13)."""
    return_hook: str = "rethook"
    """The shadow stack of return probes: one of RETURN_HOOKS."""
    trampoline: TrampolineForm = TrampolineForm.ASSEMBLY
    """How hooked functions reach the return handlers."""
    saving: RegisterSaving = RegisterSaving.LIVE
    """Registers that compiled handlers save. Linux: always ALL."""
    compiled: bool = True
    """Whether handlers of events become guest code. Without it, Python handles each hit."""


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
"""Name -> preset."""


def profile_named(name: str) -> Profile:
    """A preset. Raises: KernelError EINVAL (an unknown one)."""
    try:
        return PROFILES[name]
    except KeyError:
        raise KernelError(errno.EINVAL, f"no profile {name}; there are {', '.join(PROFILES)}") from None
