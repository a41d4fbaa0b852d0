"""Profiles: which of Linux's ways of probing a kernel is built with, as named presets of switches."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from emulated_kernel.errors import KernelError


class Stepper(Enum):
    """What ends the execution of a copied instruction."""

    BREAKPOINT = auto()
    """A second int3 behind the copy (Linux 5.12 and later)."""
    TRAP_FLAG = auto()
    """The processor's single-step trap."""


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


DEFAULT = "linux-6.1"

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile(DEFAULT),
            Profile("linux-6.1-nopreempt", preemption=False),
            Profile("kprobes-2010", False, Stepper.TRAP_FLAG, ftrace=False, optimizer=False),
            Profile("optprobes-2009", False, Stepper.TRAP_FLAG, ftrace=False),
        )
    }
)
"""The presets by name."""


def profile_named(name: str) -> Profile:
    """A preset. Raises: KernelError EINVAL for an unknown one."""
    try:
        return PROFILES[name]
    except KeyError:
        raise KernelError(errno.EINVAL, f"no profile {name}; there are {', '.join(PROFILES)}") from None
