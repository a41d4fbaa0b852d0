"""Emulation of the RISC-V instructions that depend on their address.

Mirrors: arch/riscv/kernel/probes/simulate-insn.c (v6.1). Deviates: the emulation follows the processor.
v6.1's jalr writes the link before it reads the base, which is wrong if both are the same register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emulated_kernel.arch.arch_hooks import ByteMemory, Emulation
from emulated_kernel.arch.riscv.insn import REGISTER_NAMES, ZERO, RiscvInsn, RiscvOpcode, sign_extend
from emulated_kernel.util.fast_dataclass import dataclass

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RiscvEmulation(Emulation):
    """Emulation of one RISC-V instruction whose effect depends on its address."""

    address: int
    insn: RiscvInsn

    def run(self, regs: Any, memory: ByteMemory) -> None:  # noqa: ARG002 - no instruction accesses memory
        _TABLE[RiscvOpcode(self.insn.opcode)](self, regs)


def _get(regs: Any, register: int) -> int:
    return int(getattr(regs, REGISTER_NAMES[register])) if register != ZERO else 0


def _set(regs: Any, register: int, value: int) -> None:
    if register != ZERO:
        setattr(regs, REGISTER_NAMES[register], value & _MASK)


def _auipc(emulation: RiscvEmulation, regs: Any) -> None:
    _set(regs, emulation.insn.rd, emulation.address + emulation.insn.upper_immediate)
    regs.ip = emulation.next_ip


def _jal(emulation: RiscvEmulation, regs: Any) -> None:
    _set(regs, emulation.insn.rd, emulation.next_ip)
    regs.ip = emulation.address + emulation.insn.jump_offset & _MASK


def _jalr(emulation: RiscvEmulation, regs: Any) -> None:
    insn = emulation.insn
    target = _get(regs, insn.rs1) + insn.immediate & _MASK & ~1
    _set(regs, insn.rd, emulation.next_ip)
    regs.ip = target


def _branch(emulation: RiscvEmulation, regs: Any) -> None:
    insn = emulation.insn
    taken = _holds(insn.funct3, _get(regs, insn.rs1), _get(regs, insn.rs2))
    regs.ip = emulation.address + insn.branch_offset & _MASK if taken else emulation.next_ip


def _holds(funct3: int, left: int, right: int) -> bool:
    """Return True if the condition of a branch holds for the operands `left` and `right`.

    `funct3` selects the condition of beq, blt or bltu. If its lowest bit is set, the condition is inverted.
    """
    if funct3 < 2:
        found = left == right
    elif funct3 & 2:
        found = left < right
    else:
        found = sign_extend(left, 64) < sign_extend(right, 64)
    return found != bool(funct3 & 1)


_TABLE: dict[RiscvOpcode, Callable[[RiscvEmulation, Any], None]] = {
    RiscvOpcode.AUIPC: _auipc,
    RiscvOpcode.JAL: _jal,
    RiscvOpcode.JALR: _jalr,
    RiscvOpcode.BRANCH: _branch,
}
