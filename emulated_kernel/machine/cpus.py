"""The CPUs there are, by architecture, and how the machine is adapted to the library for each."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.machine import quirks_x86
from emulated_kernel.machine.cpu import CpuModel
from emulated_kernel.machine.cpu_i386 import I386Cpu
from emulated_kernel.machine.cpu_x86_64 import X86_64Cpu
from emulated_kernel.machine.quirks import Bench, SelfTest
from emulated_kernel.machine.traps import HardwareError

Adapt = Callable[[Bench, int | None], list[SelfTest]]
"""Makes the hooks fit the library, and tests it; takes what `quirks.find_cpu_state` found."""

_CPUS: dict[str, tuple[CpuModel, Adapt]] = {
    "x86_64": (X86_64Cpu(), quirks_x86.adapt),
    "i386": (I386Cpu(), quirks_x86.adapt),
}


def cpu_model(arch: str) -> CpuModel:
    """The CPU of an architecture. Raises: HardwareError where there is none."""
    if arch not in _CPUS:
        raise HardwareError(f"no machine for {arch}")
    return _CPUS[arch][0]


def adapt(bench: Bench, found: int | None) -> list[SelfTest]:
    """Adapt a machine to the library. Raises: HardwareError where a check failed: it can't be used."""
    return _CPUS[bench.cpu.name][1](bench, found)
