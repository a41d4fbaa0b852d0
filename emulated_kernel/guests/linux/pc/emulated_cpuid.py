"""Results of the instruction cpuid on the emulator's own CPU models."""

from __future__ import annotations

import mmap
from functools import lru_cache

from emulated_kernel.machine.cpu.x86_64 import X86_64Cpu
from emulated_kernel.machine.unicorn_engine import Engine

_EXTENDED = 0x80000000
"""First extended leaf of cpuid. The eax of its result is the number of the last extended leaf.

Likewise, the eax of leaf 0 is the number of the last basic leaf.
"""
_CODE = 0x1000
_CPUID_AND_HALT = b"\x0f\xa2\xf4"
_MOST = 1 << 10
"""Maximum number of cached results of cpuid; a kernel asks for about two hundred."""


@lru_cache(_MOST)
def emulated_cpuid(model: int, leaf: int, subleaf: int) -> tuple[int, int, int, int]:
    """Return (eax, ebx, ecx, edx) after cpuid on Unicorn's CPU model `model`; zeros for an unknown leaf.

    For a leaf after the last one, the emulator itself would return the values of another leaf, as Intel's
    CPUs do.
    Raises: HardwareError (Unicorn fails).
    """
    first = leaf & _EXTENDED
    if leaf != first and leaf > emulated_cpuid(model, first, 0)[0]:
        return 0, 0, 0, 0
    engine = _engine(model)
    registers = X86_64Cpu.registers
    engine.reg_write(registers["ax"], leaf)
    engine.reg_write(registers["cx"], subleaf)
    engine.start(_CODE)
    ax, bx, cx, dx = (engine.reg_read(registers[name]) & 0xFFFFFFFF for name in ("ax", "bx", "cx", "dx"))
    return ax, bx, cx, dx


@lru_cache(1)
def _engine(model: int) -> Engine:
    engine = Engine(*X86_64Cpu.engine_mode, model)
    ram = mmap.mmap(-1, mmap.PAGESIZE)
    ram[: len(_CPUID_AND_HALT)] = _CPUID_AND_HALT
    engine.map_ram(_CODE, ram)
    return engine
