"""RISC-V instructions: length, fields and immediates. Compressed ones are seen as what they expand to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from errno import EINVAL

from emulated_kernel.arch.riscv.compressed import expand
from emulated_kernel.errors import KernelError

REGISTER_NAMES = (
    "zero", "ra", "sp", "gp", "tp", "t0", "t1", "t2", "s0", "s1", *(f"a{n}" for n in range(8)),
    *(f"s{n}" for n in range(2, 12)), *(f"t{n}" for n in range(3, 7)),
)  # fmt: skip
"""Register numbers to pt_regs names."""
ZERO, RA, SP, GP, TP, T0, T1, T2, S0, S1, A0, A1 = range(12)
A7, T3, T6 = 17, 28, 31

RVI_SIZE, RVC_SIZE = 4, 2
"""Bytes of an instruction."""


class RiscvOpcode(IntEnum):
    """The low seven bits of a 32-bit instruction."""

    LOAD = 0x03
    LOAD_FP = 0x07
    MISC_MEM = 0x0F
    OP_IMM = 0x13
    AUIPC = 0x17
    OP_IMM_32 = 0x1B
    STORE = 0x23
    STORE_FP = 0x27
    AMO = 0x2F
    OP = 0x33
    LUI = 0x37
    OP_32 = 0x3B
    BRANCH = 0x63
    JALR = 0x67
    JAL = 0x6F
    SYSTEM = 0x73


def sign_extend(value: int, bits: int) -> int:
    """The low bits of a value as two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


@dataclass(frozen=True, slots=True)
class RiscvInsn:
    """One instruction."""

    length: int
    """Bytes."""
    word: int
    """Its 32 bits, or those that a compressed one expands to; 0 where there is nothing to expand to."""

    @property
    def opcode(self) -> int:
        return self.word & 0x7F

    @property
    def rd(self) -> int:
        return self.word >> 7 & 0x1F

    @property
    def rs1(self) -> int:
        return self.word >> 15 & 0x1F

    @property
    def rs2(self) -> int:
        return self.word >> 20 & 0x1F

    @property
    def funct3(self) -> int:
        return self.word >> 12 & 7

    @property
    def immediate(self) -> int:
        """Of jalr, loads and OP-IMM."""
        return sign_extend(self.word >> 20, 12)

    @property
    def upper_immediate(self) -> int:
        """Of lui and auipc, as it is added."""
        return sign_extend(self.word & 0xFFFFF000, 32)

    @property
    def branch_offset(self) -> int:
        word = self.word
        low = (word >> 8 & 0xF) << 1 | (word >> 25 & 0x3F) << 5
        return sign_extend(low | (word >> 7 & 1) << 11 | (word >> 31) << 12, 13)

    @property
    def jump_offset(self) -> int:
        """Of jal."""
        word = self.word
        low = (word >> 21 & 0x3FF) << 1 | (word >> 20 & 1) << 11
        return sign_extend(low | (word >> 12 & 0xFF) << 12 | (word >> 31) << 20, 21)

    @property
    def relative_target(self) -> int | None:
        """Bytes from its address to where a branch or a jal may go; None for other instructions."""
        if self.opcode == RiscvOpcode.BRANCH:
            return self.branch_offset
        return self.jump_offset if self.opcode == RiscvOpcode.JAL else None

    @property
    def is_call(self) -> bool:
        """Whether it leaves its address behind it in a register."""
        return self.opcode in (RiscvOpcode.JAL, RiscvOpcode.JALR) and self.rd != ZERO

    @property
    def is_return(self) -> bool:
        return self.opcode == RiscvOpcode.JALR and self.rd == ZERO and self.rs1 == RA

    @property
    def is_indirect_jump(self) -> bool:
        """Whether it goes to an address in a register, and neither calls nor returns."""
        return self.opcode == RiscvOpcode.JALR and self.rd == ZERO and self.rs1 != RA


def insn_length(half: int) -> int:
    """Bytes, by the first 16 bits. Mirrors: arch/riscv/include/asm/bug.h:GET_INSN_LENGTH (v6.1)."""
    return RVI_SIZE if half & 3 == 3 else RVC_SIZE


def decode_insn(code: bytes, *, compressed: bool) -> RiscvInsn:
    """The first instruction of `code`; `compressed`: the kernel has RVC.

    Linux: whatever stands there is an instruction, also where a processor knows none.
    Raises: KernelError(EINVAL) where `code` ends within it, or it is 2 bytes long without RVC.
    """
    half = int.from_bytes(code[:RVC_SIZE], "little")
    length = insn_length(half)
    if len(code) < length:
        raise KernelError(EINVAL, "the code ends within an instruction")
    if length == RVI_SIZE:
        return RiscvInsn(length, int.from_bytes(code[:RVI_SIZE], "little"))
    if not compressed:
        raise KernelError(EINVAL, "a compressed instruction in a kernel without")
    return RiscvInsn(length, expand(half) or 0)


def decode_all(code: bytes, addr: int, *, compressed: bool) -> Iterator[tuple[int, RiscvInsn]]:
    """Address and instruction, up to the end of `code` or the first that isn't decodable."""
    at = 0
    while at < len(code):
        try:
            insn = decode_insn(code[at : at + RVI_SIZE], compressed=compressed)
        except KernelError:
            return
        yield addr + at, insn
        at += insn.length
