"""Which integer registers an instruction reads and overwrites, as bit masks.

Capstone's tables have no such data for RISC-V; the regular formats make a small table do.
"""

from __future__ import annotations

from emulated_kernel.arch.riscv.insn import Insn, Opcode

ALL_REGISTERS = 0xFFFFFFFE
"""x1 to x31: x0 is no register that anybody could lose."""

_RS1, _RS2, _RD = 1, 2, 4
_CSR_IMMEDIATE = 4
"""Bit of a system instruction's funct3: the first source is a number."""
_FORMS = {
    Opcode.LOAD: _RS1 | _RD,
    Opcode.LOAD_FP: _RS1,
    Opcode.MISC_MEM: _RS1,
    Opcode.OP_IMM: _RS1 | _RD,
    Opcode.AUIPC: _RD,
    Opcode.OP_IMM_32: _RS1 | _RD,
    Opcode.STORE: _RS1 | _RS2,
    Opcode.STORE_FP: _RS1,
    Opcode.AMO: _RS1 | _RS2 | _RD,
    Opcode.OP: _RS1 | _RS2 | _RD,
    Opcode.LUI: _RD,
    Opcode.OP_32: _RS1 | _RS2 | _RD,
    Opcode.BRANCH: _RS1 | _RS2,
    Opcode.JALR: _RS1 | _RD,
    Opcode.JAL: _RD,
}


def effect(insn: Insn) -> tuple[int, int]:
    """Masks of the registers that it reads, and of those that it overwrites as a whole.

    What isn't known, as vectors and floating point, reads all and overwrites none.
    """
    if insn.opcode == Opcode.SYSTEM:
        return _system_effect(insn)
    form = _FORMS.get(Opcode(insn.opcode)) if insn.opcode in _OPCODES else None
    if form is None:
        return ALL_REGISTERS, 0
    reads = (1 << insn.rs1 if form & _RS1 else 0) | (1 << insn.rs2 if form & _RS2 else 0)
    return reads & ALL_REGISTERS, (1 << insn.rd if form & _RD else 0) & ALL_REGISTERS


def mentioned(insn: Insn) -> int:
    """Mask of all registers that it has to do with; a call with all that calls may touch isn't meant."""
    reads, writes = effect(insn)
    return reads | writes


_OPCODES = frozenset(Opcode)


def _system_effect(insn: Insn) -> tuple[int, int]:
    """csr instructions; the others may do anything."""
    if not insn.funct3 & 3:
        return ALL_REGISTERS, 0
    reads = 0 if insn.funct3 & _CSR_IMMEDIATE else 1 << insn.rs1
    return reads & ALL_REGISTERS, 1 << insn.rd & ALL_REGISTERS
