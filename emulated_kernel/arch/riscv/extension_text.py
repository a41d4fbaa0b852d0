"""Texts of RISC-V instructions that capstone lacks.

These are instructions of Zba, Zbb, Zbc, Zbkb and Zbs (bits), Zicbom and Zicboz (blocks of the cache), and
Zawrs (waiting). Linux uses most of them in alternatives.
"""

from __future__ import annotations

from emulated_kernel.arch.riscv.insn import REGISTER_NAMES, RiscvOpcode
from emulated_kernel.arch.riscv.insn_formats import i_type, r_type

_OP = RiscvOpcode.OP
_OP_32 = RiscvOpcode.OP_32
_OP_IMM = RiscvOpcode.OP_IMM
_OP_IMM_32 = RiscvOpcode.OP_IMM_32
_MAX_DECIMAL = 9
"""Largest number that capstone prints in decimal."""

_R_MASK = 0xFE00707F
"""Mask of the bits that identify an instruction with two source registers."""
_TWO_SOURCES = {
    r_type(opcode, 0, funct3, 0, 0, funct7): name
    for name, opcode, funct7, funct3 in (
        ("sh1add", _OP, 0x10, 2), ("sh2add", _OP, 0x10, 4), ("sh3add", _OP, 0x10, 6),
        ("add.uw", _OP_32, 0x04, 0),
        ("sh1add.uw", _OP_32, 0x10, 2), ("sh2add.uw", _OP_32, 0x10, 4), ("sh3add.uw", _OP_32, 0x10, 6),
        ("andn", _OP, 0x20, 7), ("orn", _OP, 0x20, 6), ("xnor", _OP, 0x20, 4),
        ("min", _OP, 0x05, 4), ("minu", _OP, 0x05, 5), ("max", _OP, 0x05, 6), ("maxu", _OP, 0x05, 7),
        ("rol", _OP, 0x30, 1), ("ror", _OP, 0x30, 5), ("rolw", _OP_32, 0x30, 1), ("rorw", _OP_32, 0x30, 5),
        ("bclr", _OP, 0x24, 1), ("bext", _OP, 0x24, 5), ("binv", _OP, 0x34, 1), ("bset", _OP, 0x14, 1),
        ("clmul", _OP, 0x05, 1), ("clmulr", _OP, 0x05, 2), ("clmulh", _OP, 0x05, 3),
        ("pack", _OP, 0x04, 4), ("packh", _OP, 0x04, 7), ("packw", _OP_32, 0x04, 4),
    )
}  # fmt: skip

_UNARY_MASK = 0xFFF0707F
"""Mask of the bits that identify an instruction with one source register and no other operand."""
_ONE_SOURCE = {
    i_type(opcode, 0, funct3, 0, immediate): name
    for name, opcode, immediate, funct3 in (
        ("clz", _OP_IMM, 0x600, 1), ("ctz", _OP_IMM, 0x601, 1), ("cpop", _OP_IMM, 0x602, 1),
        ("clzw", _OP_IMM_32, 0x600, 1), ("ctzw", _OP_IMM_32, 0x601, 1), ("cpopw", _OP_IMM_32, 0x602, 1),
        ("sext.b", _OP_IMM, 0x604, 1), ("sext.h", _OP_IMM, 0x605, 1), ("zext.h", _OP_32, 0x080, 4),
        ("orc.b", _OP_IMM, 0x287, 5), ("rev8", _OP_IMM, 0x6B8, 5), ("brev8", _OP_IMM, 0x687, 5),
    )
}  # fmt: skip

_SHIFT_MASK = 0xFC00707F
"""Mask of the bits that identify an instruction with a source register and a shift amount or bit index."""
_BIT_NUMBER = {
    i_type(opcode, 0, funct3, 0, immediate): name
    for name, opcode, immediate, funct3 in (
        ("rori", _OP_IMM, 0x600, 5), ("roriw", _OP_IMM_32, 0x600, 5), ("slli.uw", _OP_IMM_32, 0x080, 1),
        ("bclri", _OP_IMM, 0x480, 1), ("bexti", _OP_IMM, 0x480, 5),
        ("binvi", _OP_IMM, 0x680, 1), ("bseti", _OP_IMM, 0x280, 1),
    )
}  # fmt: skip

_BLOCK_MASK = 0xFFF07FFF
"""Mask of the bits that identify an instruction whose only operand is an address in a register."""
_BLOCKS = {
    i_type(RiscvOpcode.MISC_MEM, 0, 2, 0, immediate): name
    for name, immediate in (("cbo.inval", 0), ("cbo.clean", 1), ("cbo.flush", 2), ("cbo.zero", 4))
}
_WHOLE = {
    i_type(RiscvOpcode.SYSTEM, 0, 0, 0, 0x00D): "wrs.nto",
    i_type(RiscvOpcode.SYSTEM, 0, 0, 0, 0x01D): "wrs.sto",
}


def extension_text(word: int) -> str | None:
    """Return the text of a 32-bit instruction in capstone's syntax; None if this module's tables lack it."""
    rd, rs1, rs2 = (REGISTER_NAMES[word >> shift & 31] for shift in (7, 15, 20))
    if name := _ONE_SOURCE.get(word & _UNARY_MASK):
        return f"{name} {rd}, {rs1}"
    if name := _TWO_SOURCES.get(word & _R_MASK):
        return f"{name} {rd}, {rs1}, {rs2}"
    if name := _BIT_NUMBER.get(word & _SHIFT_MASK):
        bit = word >> 20 & 0x3F
        # Only 64-bit operands have bits from 32 on.
        if name == "roriw" and bit > 31:
            return None
        return f"{name} {rd}, {rs1}, {bit if bit <= _MAX_DECIMAL else f'{bit:#x}'}"
    if name := _BLOCKS.get(word & _BLOCK_MASK):
        return f"{name} ({rs1})"
    return _WHOLE.get(word)
