"""Configuration of an emulated machine: architecture, memory, clock, seed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from emulated_kernel.util.fast_dataclass import dataclass, field, immutable
from emulated_kernel.util.limits import Limits

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_RUN_BUDGET = 1.0
"""Default of MachineConfig.run_budget in seconds."""
HOST = "host"
"""Value of option --image that selects, in place of a path, the kernel that the host runs."""
MAX_SEED = (1 << 63) - 1
"""Largest seed of the virtual clock; the smallest is 0."""
DEFAULT_SEED = 1
IMAGE_LIMIT = 1 << 30
"""Maximum size of a kernel file in bytes. A kernel with debug information has a few hundred MiB."""


class ElfMachine(IntEnum):
    """ELF's e_machine values of the supported architectures."""

    I386 = 3
    X86_64 = 62
    AARCH64 = 183
    RISCV = 243


ARCHITECTURES: Mapping[str, ElfMachine] = {
    "x86_64": ElfMachine.X86_64,
    "i386": ElfMachine.I386,
    "riscv64": ElfMachine.RISCV,
    "riscv64i": ElfMachine.RISCV,
}
"""Name of a supported architecture -> e_machine of its images; the default architecture comes first."""

ELF_MACHINES: Mapping[str, ElfMachine] = {**ARCHITECTURES, "arm64": ElfMachine.AARCH64}
"""Name of an architecture -> e_machine in the ELF headers of its kernels.

In addition to ARCHITECTURES, the map has the architectures that only distributions' kernels have.
"""


@immutable
@dataclass(frozen=True)
class MachineConfig:
    """Options of an emulated machine; sizes in bytes, times in seconds."""

    arch: str = "x86_64"
    """The architecture: a key of ARCHITECTURES."""
    cpus: int = 1
    """Number of CPUs."""
    ram_size: int = 64 << 20
    """Size of the guest's memory in bytes."""
    image: Path | None = None
    """File of a kernel of kprobefs; None selects the architecture's prebuilt one.

    A distribution's kernel can only be mounted: `kprobefs mount --image FILE`.
    """
    clock: str = "virtual"
    """Mode of the clock: "virtual" (the same seed gives the same timestamps), "real", or "model".

    With "real", time passes as on the host; with "model", it passes with executed instructions.
    """
    pauses: bool = True
    """Whether pauses between requests count as time for delayed work of kprobes, such as the optimizer's.

    The clocks "virtual" and "model" themselves do not advance during a pause, even if the value is True. With
    the clock "real", the value has no effect, because that clock always advances.
    """
    seed: int = DEFAULT_SEED
    """Seed of the virtual clock and of the order in which CPUs run, from 0 to 2**63 - 1."""
    quantum: int = 0
    """Mean number of instructions after which another CPU runs; 0 switches only when a CPU has to wait.

    This option is for tests, and makes the guest slow. The seed determines the number for each turn of a CPU.
    """
    stale_fetch: bool = False
    """Whether a CPU may execute old instructions after text changed, until the CPU takes an interrupt.

    This option is for tests of text patching, and requires `quantum`.
    """
    run_budget: float = DEFAULT_RUN_BUDGET
    """Maximum CPU time of one run of the guest, in seconds.

    A guest that runs longer is declared to be looping.
    """
    profile: str = "linux-6.1"
    """Set of kprobes features to emulate: a key of PROFILES."""
    strategy: str | None = None
    """Optimization policy: "extended", which also optimizes where Linux refuses.

    None takes the profile's policy.
    """
    save_regs: str | None = None
    """Registers that compiled handlers save: "live", "all", or None for the profile's value.

    "live": registers that the handler changes and that the probed function may still read.
    """
    return_hook: str | None = None
    """Kind of shadow stack for return probes: "rethook", "objpool", "instances", "fgraph" or "unified".

    None takes the profile's value.
    """
    limits: Limits = field(default_factory=Limits, compare=False)
    """Resource limits of the mount. A kernel that replaces this one has the same Limits object."""
    fast_registers: bool = True
    """Whether registers are accessed in Unicorn's CPU structure, if the start-up self-test finds it.

    Otherwise Unicorn's API is used.
    """
