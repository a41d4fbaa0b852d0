"""What a machine is built from: architecture, memory, clock, seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import IntEnum
from pathlib import Path

from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import Limits

DEFAULT_RUN_BUDGET = 1.0
"""Seconds."""
HOST = "host"
"""Instead of an image: the distribution's kernel that runs here."""
MOST_SEED = (1 << 63) - 1
"""Seeds are from 0 to that, wherever they come from."""
IMAGE_LIMIT = 1 << 30
"""Bytes of a kernel's file. One with debug information has a few hundred MiB."""


class ElfMachine(IntEnum):
    """e_machine of the architectures that images exist for."""

    I386 = 3
    X86_64 = 62
    RISCV = 243


ARCHITECTURES: Mapping[str, ElfMachine] = {
    "x86_64": ElfMachine.X86_64,
    "i386": ElfMachine.I386,
    "riscv64": ElfMachine.RISCV,
    "riscv64i": ElfMachine.RISCV,
}
"""All there are, the default first, with what their images are of: who picks or lists one asks here."""


@dataclass(frozen=True)
class MachineConfig:
    """The emulated computer's build options; sizes in bytes, times in seconds."""

    arch: str = "x86_64"
    cpus: int = 1
    ram_size: int = 64 << 20
    image: Path | None = None
    """The kernel to run; None takes the prebuilt one of the architecture."""
    clock: str = "virtual"
    """"virtual" (same seed, same timestamps) or "real"."""
    pauses: bool = True
    """Virtual clock: real time that passes between two requests moves the guest's timers on."""
    seed: int = 1
    quantum: int = 0
    """Instructions after which another CPU runs, on average, where the seed says; 0: where one has to wait.

    Each instruction then costs a tenth of a microsecond: for tests.
    """
    stale_fetch: bool = False
    """With a quantum: a CPU whose turn ends goes on with bytes that it may have fetched before text changed,
    until it takes an interrupt. For tests of how text is patched."""
    run_budget: float = DEFAULT_RUN_BUDGET
    """Wall time that one uninterrupted guest run may take before it counts as looping."""
    profile: str = "linux-6.1"
    """Which kernel's ways of probing it has: a name in kprobes.profile.PROFILES."""
    save_regs: str | None = None
    """Registers that compiled handlers save: "live" or "all"; None: as in the profile."""
    return_hook: str | None = None
    """The shadow stack of return probes: one of kprobes.profile.RETURN_HOOKS; None: the profile's."""
    limits: Limits = field(default_factory=Limits, compare=False)
    """What users of its files may take; shared with a kernel that takes its place."""
    fast_registers: bool = True
    """Use the live CPU state where the start-up self-test finds it; False forces the API."""
