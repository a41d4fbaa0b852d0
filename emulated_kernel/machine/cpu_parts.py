"""Table of the architectures: CPU model, trap hooks, delivery of interrupts, and adaptation to Unicorn."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.interrupts.delivery import Delivery
from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.quirks.harness import Bench, SelfTest
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.config import ARCHITECTURES, ElfMachine
from emulated_kernel.util.fast_dataclass import dataclass

Adapt = Callable[[Bench, int | None], list[SelfTest]]
"""Function that adapts the trap hooks to this version of Unicorn, tests Unicorn, and returns the results.

Its arguments are the machine for the tests, and the result of find_cpu_state().

Raises: HardwareError (a check failed: Unicorn can't be used).
"""


@dataclass(frozen=True, slots=True)
class CpuParts:
    """The CPU model, trap hooks and interrupt delivery with which a machine emulates an architecture."""

    model: CpuModel
    adapt: Adapt
    hooks: type[TrapHooks]
    """Class with the callbacks that Unicorn calls at traps."""
    delivery: type[Delivery]
    """Class that delivers interrupts to the guest."""


def _x86() -> tuple[CpuParts, ...]:
    from emulated_kernel.machine.cpu.i386 import I386Cpu
    from emulated_kernel.machine.cpu.x86_64 import X86_64Cpu
    from emulated_kernel.machine.quirks.x86 import adapt

    return tuple(CpuParts(model, adapt, TrapHooks, Delivery) for model in (X86_64Cpu(), I386Cpu()))


def _riscv() -> tuple[CpuParts, ...]:
    from emulated_kernel.machine.cpu.riscv import Riscv64Cpu, Riscv64iCpu
    from emulated_kernel.machine.interrupts.riscv import RiscvDelivery, RiscvTrapHooks
    from emulated_kernel.machine.quirks.riscv import adapt

    models = (Riscv64Cpu(), Riscv64iCpu())
    return tuple(CpuParts(model, adapt, RiscvTrapHooks, RiscvDelivery) for model in models)


_FAMILIES = {ElfMachine.X86_64: _x86, ElfMachine.I386: _x86, ElfMachine.RISCV: _riscv}
"""ELF machine -> function that imports the modules of its architectures, and returns their CpuParts."""


@cache
def cpu_parts(arch: str) -> CpuParts:
    """Return the CpuParts of the architecture `arch`. Raises: HardwareError (an unknown architecture)."""
    if arch not in ARCHITECTURES:
        raise HardwareError(f"no machine for {arch}")
    return next(parts for parts in _FAMILIES[ARCHITECTURES[arch]]() if parts.model.name == arch)
