"""can_boost: which instructions may run out of line with only a jump back behind them."""

from __future__ import annotations

from emulated_kernel.arch.x86.insn import ADDRESS_SIZE_PREFIX, Insn, opcodes

_CS_PREFIX = 0x2E

# A row for each high digit of the second opcode byte; bit 0x8000 is low digit 0.
_TWO_BYTE_ROWS = (
    0x32C0, 0x0001, 0xF000, 0x4000, 0xFFFF, 0x0000, 0xFFF3, 0x0F03,
    0x0000, 0xFFFF, 0xDCDD, 0xFF1F, 0xC0FF, 0x74DD, 0x64DD, 0x74EE,
)  # fmt: skip

_NOT_BOOSTABLE = opcodes("62 70-7f 9a c0-c1 cc-ce d0-d3 d6 d8-df e0-e3 e8-e9 eb f0-f4 f6-f7 fe")
_GROUP_5, _JMP_INDIRECT = 0xFF, 4


def can_boost(insn: Insn, *, may_fault: bool = False) -> bool:
    """Whether `insn` neither changes control nor needs its address; `may_fault`: it is in __ex_table.

    Mirrors: arch/x86/kernel/kprobes/core.c:can_boost (v6.1)
    """
    if may_fault or len(insn.opcode) > 2:
        return False
    if len(insn.opcode) == 2:
        return bool(_TWO_BYTE_ROWS[insn.opcode[1] >> 4] & 0x8000 >> (insn.opcode[1] & 15))
    if _CS_PREFIX in insn.prefixes or ADDRESS_SIZE_PREFIX in insn.prefixes:
        return False
    opcode = insn.opcode[0]
    if opcode == _GROUP_5:
        return insn.reg == _JMP_INDIRECT
    return opcode not in _NOT_BOOSTABLE
