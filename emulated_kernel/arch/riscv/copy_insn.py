"""Preparation of a probed RISC-V instruction: a copy for the insn slot, or an emulation."""

from __future__ import annotations

from errno import EINVAL

from emulated_kernel.arch.arch_hooks import ArchSpecificInsn
from emulated_kernel.arch.riscv.emulate import RiscvEmulation
from emulated_kernel.arch.riscv.insn import Handling, decode_insn
from emulated_kernel.util.errors import KernelError


def prepare(code: bytes, addr: int, breakpoint_: bytes, *, compressed: bool) -> ArchSpecificInsn:
    """Prepare the instruction at `addr` for out-of-line execution.

    `code`: starts with the instruction. `compressed`: the kernel uses RVC. `breakpoint_`: breakpoint
    instruction to put after the copy.
    Raises: KernelError EINVAL (system instructions and fences).
    Mirrors: arch/riscv/kernel/probes/kprobes.c:arch_prepare_kprobe, arch_prepare_ss_slot (v6.1).
    """
    insn = decode_insn(code, compressed=compressed)
    found = insn.handling
    if found is Handling.REJECTED:
        raise KernelError(EINVAL, "system instruction or fence")
    emulation = RiscvEmulation(addr + insn.length, addr, insn) if found is Handling.SIMULATED else None
    return ArchSpecificInsn(
        length=insn.length,
        slot_bytes=code[: insn.length] + breakpoint_,
        boostable=False,
        emulate=emulation,
    )
