"""Profiles: named presets of build options. A profile selects the kernel whose probing is emulated."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, immutable, replace

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Stepper(Enum):
    """Mechanism that ends the execution of a copied instruction."""

    BREAKPOINT = auto()
    """A second int3 after the copy (Linux 5.13 and later)."""
    TRAP_FLAG = auto()
    """The processor's single-step trap."""


class RegisterSaving(Enum):
    """Registers that a compiled handler saves."""

    LIVE = "live"
    """The registers that the handler changes and that the probed function may still read."""
    ALL = "all"
    """All registers, as struct pt_regs."""


class QuiesceMethod(Enum):
    """Method by which a djprobe commit makes sure that no task is in a region that a jump will replace.

    Source: "Djprobe", section 2.2.
    """

    SYNCHRONIZE_SCHED = auto()
    """Each CPU passes through the scheduler; this is sufficient in a kernel without preemption."""
    FREEZE_PROCESSES = auto()
    """Each task goes to the refrigerator, and is thawed after the commit."""


class TrampolineForm(Enum):
    """Form of the trampoline to which hooked functions return, and which calls the return handlers."""

    ASSEMBLY = auto()
    """Code that saves a struct pt_regs for the handlers, and restores it."""
    BREAKPOINT = auto()
    """Only a breakpoint; the handlers get the CPU's live registers."""


@immutable
@dataclass(frozen=True)
class Profile:
    """Build options of a kernel that decide how probes work; each can be selected independently."""

    name: str
    """Name of the preset."""
    preemption: bool = True
    """CONFIG_PREEMPTION. A kernel without it boosts probes: a jump back follows the copied instruction."""
    stepper: Stepper = Stepper.BREAKPOINT
    """Mechanism that ends the step of a copied instruction."""
    ftrace: bool = True
    """CONFIG_FUNCTION_TRACER and CONFIG_KPROBES_ON_FTRACE. Without them, fentry sites are plain nops."""
    optimizer: bool = True
    """CONFIG_OPTPROBES: jump optimization."""
    strategies: tuple[str, ...] = ("optprobe",)
    """Names of optimization policies; the first name that the architecture knows selects the policy."""
    djprobe: QuiesceMethod | None = None
    """Method by which commit_kprobes() waits before it writes jumps; None if the kernel has no djprobes."""
    jprobes: bool = False
    """Whether register_jprobe() exists (Linux up to 4.14)."""
    interface: str = "linux-6.1"
    """Name of the version of tracefs: a key of INTERFACES."""
    probe_rules: str = "linux-6.1"
    """Name of the rules that decide where probes and jumps may be: a key of PROBE_RULES."""
    fault_handlers: bool = False
    """Whether a probe may have a fault_handler (Linux up to 5.13)."""
    return_hook: str = "rethook"
    """Name of the shadow stack of return probes: one of RETURN_HOOKS."""
    trampoline: TrampolineForm = TrampolineForm.ASSEMBLY
    """Form of the return trampoline, through which hooked functions reach the return handlers."""
    saving: RegisterSaving = RegisterSaving.LIVE
    """Registers that compiled handlers save. Linux always saves all registers (ALL)."""
    compiled: bool = True
    """Whether handlers of events are compiled to guest code. Otherwise Python handles each hit."""

    @property
    def title(self) -> str:
        """Name of the preset, followed by the strategy if it differs from the preset's."""
        strategy, *_ = self.strategies
        return f"{self.name}, strategy {strategy}" if strategy in STRATEGIES else self.name


DEFAULT = "linux-6.1"
RISCV_PROFILE = "riscv-optprobes-2023"
"""Name of the preset for RISC-V kernels without ftrace sites."""
RISCV_FTRACE_PROFILE = f"{RISCV_PROFILE}-ftrace"
"""Name of the RISC-V preset that also has ftrace sites; no jump replaces the nop of a site."""
KERNEL_INTERFACE = "kernel"
"""Value of Profile.interface for a version of tracefs that is detected from the kernel itself."""
OUT_OF_TREE = ("optprobe", "optprobe-riscv")
"""Names of the optimization policies of an out-of-tree patch: "Add OPTPROBES feature on RISCV", v6, 2023."""
_RISCV: dict[str, Any] = {
    "strategies": OUT_OF_TREE,
    "saving": RegisterSaving.ALL,
    "return_hook": "instances",
}
RISCV_PROFILES = RISCV_PROFILE, RISCV_FTRACE_PROFILE
"""Names of the presets for RISC-V kernels of any version."""
STRATEGIES = ("extended",)
"""Names of the optimization policies that can replace a profile's policy.

The policy `extended` also writes jumps that Linux refuses.
"""
_OLD: dict[str, Any] = {
    "stepper": Stepper.TRAP_FLAG,
    "ftrace": False,
    "jprobes": True,
    "fault_handlers": True,
    "return_hook": "instances",
}


def arm64_profile(version: str, probe_rules: str) -> Profile:
    """Return the profile for an arm64 kernel of the Linux version `version`, such as "6.12".

    `probe_rules`: key of PROBE_RULES; it selects the rules that decide where probes may be. The version of
    tracefs is detected from the kernel. Linux has no jump optimization for arm64. The jumps follow rules of
    kprobefs. The return trampoline of hooked functions begins with a breakpoint, as in v6.12.
    """
    return Profile(
        f"linux-{version}",
        strategies=("optprobe-arm64",),
        interface=KERNEL_INTERFACE,
        probe_rules=probe_rules,
        return_hook="instances",
        trampoline=TrampolineForm.BREAKPOINT,
    )


def _of_version(
    version: str,
    preemption: bool = True,
    stepper: Stepper = Stepper.BREAKPOINT,
    return_hook: str = "objpool",
    *,
    fault_handlers: bool = False,
) -> Profile:
    """Return the profile of Linux `version`, with the build options of Debian's kernels for x86_64.

    The other parameters are fields of the profile in which versions differ.
    """
    name = f"linux-{version}"
    return Profile(
        name,
        preemption,
        stepper,
        interface=name,
        probe_rules=name,
        fault_handlers=fault_handlers,
        return_hook=return_hook,
    )


RETURN_HOOKS = ("rethook", "objpool", "instances", "fgraph", "unified")
"""Names of shadow stacks, which return_hooks.py maps to classes.

"rethook", "objpool" and "instances" are the shadow stacks of Linux 6.1, 6.7 and 5.10, respectively. "fgraph"
is that of the function graph. With "unified", all hooks share the function graph's shadow stack.
"""

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile(DEFAULT),
            Profile("linux-6.1-nopreempt", preemption=False),
            Profile("linux-6.1-fprobe", interface="linux-6.1-fprobe"),
            _of_version("5.10", False, Stepper.TRAP_FLAG, "instances", fault_handlers=True),
            _of_version("6.12"),
            _of_version("7.2"),
            Profile("kprobes-2010", False, optimizer=False, trampoline=TrampolineForm.BREAKPOINT, **_OLD),
            Profile("optprobes-2009", False, **_OLD),
            Profile(RISCV_PROFILE, ftrace=False, **_RISCV),
            Profile(RISCV_FTRACE_PROFILE, **_RISCV),
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
"""Name of a preset -> the preset."""


def with_strategy(profile: Profile, strategy: str | None) -> Profile:
    """Return `profile` with the optimization policy `strategy`, or unchanged if `strategy` is None.

    Raises: KernelError EINVAL (no such strategy, or the profile's kernel has no optimizer).
    """
    if strategy is None:
        return profile
    if strategy not in STRATEGIES:
        told = f"no strategy {strategy!r}; there is {', '.join(STRATEGIES)}"
        raise KernelError(errno.EINVAL, told)
    if not profile.optimizer or profile.djprobe is not None:
        told = f"strategy {strategy}: profile {profile.name} has no optimizer; choose {DEFAULT}"
        raise KernelError(errno.EINVAL, told)
    return replace(profile, strategies=(strategy,))


def profile_named(name: str) -> Profile:
    """Return the preset called `name`. Raises: KernelError EINVAL (unknown name)."""
    try:
        return PROFILES[name]
    except KeyError:
        raise KernelError(errno.EINVAL, f"no profile {name!r}; there are {', '.join(PROFILES)}") from None


def check_architecture(name: str, arch: str) -> None:
    """Check that kprobefs's own kernel for `arch` can have the profile `name`.

    Only a kernel for RISC-V can have the profiles for RISC-V. Raises: KernelError EINVAL.
    """
    if name in RISCV_PROFILES and not arch.startswith("riscv"):
        raise KernelError(errno.EINVAL, f"profile {name} is for RISC-V; add --arch riscv64")
