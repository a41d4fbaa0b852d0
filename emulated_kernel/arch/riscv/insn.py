"""RISC-V instructions: length, fields and immediates. Compressed ones are seen as what they expand to."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import Enum, IntEnum, auto
from errno import EINVAL
from functools import lru_cache

from emulated_kernel.arch.analysis.dataflow import LEAVES, Control, Effect
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


ALL_REGISTERS = 0xFFFFFFFE
"""x1 to x31; x0 is constant."""

_MASKS = tuple(1 << number & ALL_REGISTERS for number in range(32))
_RS1, _RS2, _RD = 1, 2, 4
_CSR_IMMEDIATE = 4
"""Bit of a system instruction's funct3: the first source is a number."""
_FORMS: dict[int, int] = {
    RiscvOpcode.LOAD: _RS1 | _RD,
    RiscvOpcode.LOAD_FP: _RS1,
    RiscvOpcode.MISC_MEM: _RS1,
    RiscvOpcode.OP_IMM: _RS1 | _RD,
    RiscvOpcode.AUIPC: _RD,
    RiscvOpcode.OP_IMM_32: _RS1 | _RD,
    RiscvOpcode.STORE: _RS1 | _RS2,
    RiscvOpcode.STORE_FP: _RS1,
    RiscvOpcode.AMO: _RS1 | _RS2 | _RD,
    RiscvOpcode.OP: _RS1 | _RS2 | _RD,
    RiscvOpcode.LUI: _RD,
    RiscvOpcode.OP_32: _RS1 | _RS2 | _RD,
    RiscvOpcode.BRANCH: _RS1 | _RS2,
    RiscvOpcode.JALR: _RS1 | _RD,
    RiscvOpcode.JAL: _RD,
}


EMULATED = frozenset((RiscvOpcode.AUIPC, RiscvOpcode.JAL, RiscvOpcode.JALR, RiscvOpcode.BRANCH))
"""What is executed in software, as it needs its address."""


class Handling(Enum):
    """What a probe does with an instruction. Mirrors: decode-insn.h:enum probe_insn (v6.1)."""

    REJECTED = auto()
    SIMULATED = auto()
    """INSN_GOOD_NO_SLOT."""
    COPIED = auto()
    """INSN_GOOD."""


# Without the enum, which is slow to look into: a kernel has a hundred thousand instructions that differ.
_BRANCH, _JAL = int(RiscvOpcode.BRANCH), int(RiscvOpcode.JAL)
_TRANSFERS = frozenset((_BRANCH, _JAL, int(RiscvOpcode.JALR)))
_SYSTEM = int(RiscvOpcode.SYSTEM)
_HANDLING = {
    **dict.fromkeys(map(int, EMULATED), Handling.SIMULATED),
    **dict.fromkeys((_SYSTEM, int(RiscvOpcode.MISC_MEM)), Handling.REJECTED),
}


@lru_cache(1 << 12)
def _plain_effect(reads: int, writes: int) -> Effect:
    return Effect(reads, ~writes)


class RiscvInsn:
    """One instruction; what rules ask of it is found once, as equal ones are one object (`insn_of`)."""

    __slots__ = (
        "effect",
        "funct3",
        "handling",
        "is_call",
        "is_indirect_jump",
        "is_return",
        "leads_elsewhere",
        "length",
        "opcode",
        "rd",
        "reads",
        "relative_target",
        "rs1",
        "rs2",
        "word",
        "writes",
    )

    def __init__(self, length: int, word: int) -> None:
        """`word`: what a compressed one expands to; 0 where there is nothing to expand to."""
        self.length = length
        """Bytes."""
        self.word = word
        self.opcode = opcode = word & 0x7F
        self.rd = word >> 7 & 0x1F
        self.rs1 = word >> 15 & 0x1F
        self.rs2 = word >> 20 & 0x1F
        self.funct3 = word >> 12 & 7
        self.handling = _HANDLING.get(opcode, Handling.COPIED)
        """How it is run out of line.

        Deviates: v6.1 refuses the compressed jumps and branches, which v6.6 simulates; and it takes c.addiw
        for the c.jal of 32 bits, and refuses it too.
        Mirrors: arch/riscv/kernel/probes/decode-insn.c:riscv_probe_decode_insn (v6.6).
        """
        self.reads, self.writes = self._registers()
        """Masks of the registers that it reads, and of those that it overwrites as a whole.

        What isn't known, as vectors and floating point, reads all and overwrites none.
        """
        self.relative_target: int | None = None
        """Bytes from its address to where a branch or a jal may go; None for other instructions."""
        self.is_call = self.is_return = self.is_indirect_jump = False
        if opcode in _TRANSFERS:
            self.effect = Effect(self.reads, ~self.writes, self._transfer(opcode))
            """What it does to registers, for the data flow of a function."""
        else:
            self.effect = _plain_effect(self.reads, self.writes)
        self.leads_elsewhere = self.relative_target is not None or self.is_indirect_jump
        """It is a direct branch, a jump, or a direct call."""

    def _transfer(self, opcode: int) -> Control:
        if opcode == _BRANCH:
            self.relative_target = self.branch_offset
            return Control(falls_through=True, targets=(self.relative_target,))
        self.is_call = self.rd != ZERO
        """It leaves its address behind it in a register."""
        if opcode == _JAL:
            self.relative_target = self.jump_offset
            return LEAVES if self.is_call else Control(falls_through=False, targets=(self.relative_target,))
        self.is_return = self.rd == ZERO and self.rs1 == RA
        self.is_indirect_jump = self.rd == ZERO and self.rs1 != RA
        """It goes to an address in a register, and neither calls nor returns."""
        return LEAVES

    def _registers(self) -> tuple[int, int]:
        form = _FORMS.get(self.opcode)
        if self.opcode == _SYSTEM and self.funct3 & 3:
            form = _RD if self.funct3 & _CSR_IMMEDIATE else _RS1 | _RD
        if form is None:
            return ALL_REGISTERS, 0
        reads = (_MASKS[self.rs1] if form & _RS1 else 0) | (_MASKS[self.rs2] if form & _RS2 else 0)
        return reads, _MASKS[self.rd] if form & _RD else 0

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


@lru_cache(1 << 17)
def insn_of(bits: int) -> RiscvInsn:
    """By its 16 or 32 bits: a kernel has millions of instructions, but fewer that differ."""
    if bits & 3 == 3:
        return RiscvInsn(RVI_SIZE, bits)
    return RiscvInsn(RVC_SIZE, expand(bits) or 0)


def insn_length(half: int) -> int:
    """Bytes, by the first 16 bits. Mirrors: arch/riscv/include/asm/bug.h:GET_INSN_LENGTH (v6.1)."""
    return RVI_SIZE if half & 3 == 3 else RVC_SIZE


def decode_insn(code: bytes, *, compressed: bool) -> RiscvInsn:
    """The first instruction of `code`; `compressed`: the kernel has RVC.

    Linux: whatever stands there is an instruction, also where a processor knows none.
    Raises: KernelError(EINVAL) where `code` ends within it, or it is 2 bytes long without RVC.
    """
    bits = int.from_bytes(code[:RVI_SIZE], "little")
    length = insn_length(bits)
    if len(code) < length:
        raise KernelError(EINVAL, "the code ends within an instruction")
    if length == RVC_SIZE and not compressed:
        raise KernelError(EINVAL, "a compressed instruction in a kernel without")
    return insn_of(bits if length == RVI_SIZE else bits & 0xFFFF)


def decode_all(code: bytes, addr: int, *, compressed: bool) -> Iterator[tuple[int, RiscvInsn]]:
    """Address and instruction, up to the end of `code` or the first that isn't decodable."""
    halves = iter(struct.unpack_from(f"<{len(code) // RVC_SIZE}H", code))
    for bits in halves:
        if bits & 3 == 3:
            second = next(halves, None)
            if second is None:
                return
            yield addr, insn_of(bits | second << 16)
            addr += RVI_SIZE
        elif compressed:
            yield addr, insn_of(bits)
            addr += RVC_SIZE
        else:
            return
