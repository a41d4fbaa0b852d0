"""RISC-V instruction decoder: length, fields and immediates. Compressed instructions appear expanded."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from enum import Enum, IntEnum, auto
from errno import EINVAL
from functools import lru_cache

from emulated_kernel.arch.analysis.dataflow import LEAVES, Control, Effect
from emulated_kernel.arch.riscv.compressed import expand
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.lazy_pattern import lazy_pattern

REGISTER_NAMES = (
    "zero", "ra", "sp", "gp", "tp", "t0", "t1", "t2", "s0", "s1", *(f"a{n}" for n in range(8)),
    *(f"s{n}" for n in range(2, 12)), *(f"t{n}" for n in range(3, 7)),
)  # fmt: skip
"""pt_regs names, indexed by register number."""
ZERO, RA, SP, GP, TP, T0, T1, T2, S0, S1, A0, A1 = range(12)
A7 = 17
T3 = 28
T4 = 29
T5 = 30
T6 = 31

RVI_SIZE = 4
"""Size in bytes of an ordinary instruction."""
RVC_SIZE = 2
"""Size in bytes of a compressed instruction."""


class RiscvOpcode(IntEnum):
    """Major opcodes: the low seven bits of a 32-bit instruction."""

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
    """Interpret the low `bits` bits of a value as two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


ALL_REGISTERS = 0xFFFFFFFE
"""Mask of x1 to x31; x0 is constant."""

_MASKS = tuple(1 << number & ALL_REGISTERS for number in range(32))
_RS1 = 1
_RS2 = 2
_RD = 4
_CSR_IMMEDIATE = 4
"""Bit of a system instruction's funct3: the first source is a constant instead of a register."""
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
"""Opcodes of the instructions that are emulated because they depend on their address."""


class Handling(Enum):
    """How a probed instruction is executed. Mirrors: decode-insn.h:enum probe_insn (v6.1)."""

    REJECTED = auto()
    SIMULATED = auto()
    """The instruction is emulated (INSN_GOOD_NO_SLOT)."""
    COPIED = auto()
    """A copy of the instruction runs out of line (INSN_GOOD)."""


# Plain integers, because enum lookups are slow: a kernel has a hundred thousand distinct instructions.
_BRANCH = int(RiscvOpcode.BRANCH)
_JAL = int(RiscvOpcode.JAL)
_JALR = int(RiscvOpcode.JALR)
_JUMPS = frozenset((_JAL, _JALR))
_SYSTEM = int(RiscvOpcode.SYSTEM)
_HANDLING = {
    **dict.fromkeys(map(int, EMULATED), Handling.SIMULATED),
    **dict.fromkeys((_SYSTEM, int(RiscvOpcode.MISC_MEM)), Handling.REJECTED),
}


_FACTS_BITS = {
    opcode: (0x01FFFFFF if form & _RS2 else 0x000FFFFF if form & _RS1 else 0x00000FFF)
    for opcode, form in _FORMS.items()
    if opcode not in (RiscvOpcode.BRANCH, RiscvOpcode.JAL)
}
"""Opcode -> mask of the instruction bits that determine RiscvInsnAttributes; immediates are masked out.

For missing opcodes, such as BRANCH and JAL, all bits matter.
"""


LENGTH = 7
"""Mask of the bits in RiscvInsnAttributes.kind that contain the instruction's length in bytes."""
SIMULATED = 8
"""Bit of RiscvInsnAttributes.kind: the instruction is emulated."""
REJECTED = 16
"""Bit of RiscvInsnAttributes.kind: the instruction can't be probed."""
LEADS_ELSEWHERE = 32
"""Bit of RiscvInsnAttributes.kind: a direct branch, jump or call, or an indirect jump that is no return."""
_KIND_OF = {Handling.COPIED: 0, Handling.SIMULATED: SIMULATED, Handling.REJECTED: REJECTED}


class RiscvInsnAttributes:
    """Properties of an instruction that probe checks need.

    Immediates are left out, except branch offsets.
    """

    __slots__ = ("_effect", "_word", "handling", "kind", "length", "mentioned", "opcode", "relative_target")

    def __init__(self, length: int, word: int) -> None:
        """Decode an instruction of `length` bytes.

        `word`: the instruction, or the expansion of a compressed one; 0 for a reserved encoding.
        """
        self.length = length
        """Length of the instruction in bytes."""
        self._word = word
        self.opcode = word & 0x7F
        self.handling = _HANDLING.get(self.opcode, Handling.COPIED)
        """How the instruction is executed out of line, or that it can't be probed.

        Deviates: compressed jumps and branches are simulated, as in v6.6, and c.addiw is copied. v6.1 refuses
        compressed jumps and branches. It also refuses c.addiw, which it mistakes for the c.jal of 32-bit
        RISC-V.
        Mirrors: arch/riscv/kernel/probes/decode-insn.c:riscv_probe_decode_insn (v6.6).
        """
        form = self._form
        self.mentioned: int = 0 if form is None else self._reads(form) | self._writes(form)
        """Mask of the general registers that the instruction names; 0 if its operands are unknown."""
        self.relative_target = relative_target(word)
        """Distance in bytes to the target of a branch or jal; None for other instructions."""
        leads = self.relative_target is not None or self.is_indirect_jump
        self.kind = length | _KIND_OF[self.handling] | (LEADS_ELSEWHERE if leads else 0)
        """One byte of flags for the probe checks: LENGTH, SIMULATED, REJECTED and LEADS_ELSEWHERE."""
        self._effect: Effect | None = None

    @property
    def effect(self) -> Effect:
        """The instruction's effect on registers, for data flow analysis.

        An instruction without a known form, such as a vector or floating-point one, counts as reading all
        registers and overwriting no register.
        """
        if self._effect is None:
            form = self._form
            reads = ALL_REGISTERS if form is None else self._reads(form)
            writes = 0 if form is None else self._writes(form)
            self._effect = Effect(reads, ~writes, self._control())
        return self._effect

    def _control(self) -> Control | None:
        target = self.relative_target
        if target is not None and not self.is_call:
            return Control(falls_through=self.opcode == _BRANCH, targets=(target,))
        return LEAVES if self.opcode in _JUMPS else None

    @property
    def _form(self) -> int | None:
        if self.opcode == _SYSTEM and self.funct3 & 3:
            return _RD if self.funct3 & _CSR_IMMEDIATE else _RS1 | _RD
        return _FORMS.get(self.opcode)

    def _reads(self, form: int) -> int:
        return (_MASKS[self.rs1] if form & _RS1 else 0) | (_MASKS[self.rs2] if form & _RS2 else 0)

    def _writes(self, form: int) -> int:
        return _MASKS[self.rd] if form & _RD else 0

    @property
    def is_call(self) -> bool:
        """Whether the instruction stores a return address in a register."""
        return self.opcode in _JUMPS and self.rd != ZERO

    @property
    def is_return(self) -> bool:
        return self.opcode == _JALR and self.rd == ZERO and self.rs1 == RA

    @property
    def is_indirect_jump(self) -> bool:
        """Whether the instruction jumps to an address in a register, and neither calls nor returns."""
        return self.opcode == _JALR and self.rd == ZERO and self.rs1 != RA

    @property
    def rd(self) -> int:
        return self._word >> 7 & 0x1F

    @property
    def rs1(self) -> int:
        return self._word >> 15 & 0x1F

    @property
    def rs2(self) -> int:
        return self._word >> 20 & 0x1F

    @property
    def funct3(self) -> int:
        return self._word >> 12 & 7

    @property
    def reads(self) -> int:
        """Mask of the registers that the instruction reads; see `effect`."""
        return self.effect.reads

    @property
    def writes(self) -> int:
        """Mask of the registers that the instruction overwrites completely."""
        return ~self.effect.keeps


class RiscvInsn(RiscvInsnAttributes):
    """An instruction with all of its operands. `insn_of` returns the same object for equal instructions."""

    __slots__ = ()

    @property
    def word(self) -> int:
        """The 32 bits of the instruction, or of the instruction to which a compressed one expands."""
        return self._word

    @property
    def immediate(self) -> int:
        """The immediate of jalr, loads and OP-IMM."""
        return sign_extend(self.word >> 20, 12)

    @property
    def upper_immediate(self) -> int:
        """The immediate of lui and auipc, shifted left by 12 bits and sign-extended."""
        return sign_extend(self.word & 0xFFFFF000, 32)

    @property
    def branch_offset(self) -> int:
        return _branch_offset(self.word)

    @property
    def jump_offset(self) -> int:
        """Distance in bytes from a jal to its target."""
        return _jump_offset(self.word)


def _branch_offset(word: int) -> int:
    low = (word >> 8 & 0xF) << 1 | (word >> 25 & 0x3F) << 5
    return sign_extend(low | (word >> 7 & 1) << 11 | (word >> 31) << 12, 13)


def _jump_offset(word: int) -> int:
    low = (word >> 21 & 0x3FF) << 1 | (word >> 20 & 1) << 11
    return sign_extend(low | (word >> 12 & 0xFF) << 12 | (word >> 31) << 20, 21)


class _DecodeCache(dict[int, RiscvInsnAttributes]):
    """Cache of decoded instructions: instruction (16 or 32 bits) -> attributes.

    A kernel has millions of instructions, but only a hundred thousand distinct ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_key: dict[tuple[int, int], RiscvInsnAttributes] = {}
        """(length, bits that determine the attributes) -> attributes."""

    def __missing__(self, bits: int) -> RiscvInsnAttributes:
        if len(self) == _MAX_INSNS:
            self.clear()
            self._by_key.clear()
        length, word = (RVI_SIZE, bits) if bits & 3 == 3 else (RVC_SIZE, expand(bits) or 0)
        key = length, word & _FACTS_BITS.get(word & 0x7F, 0xFFFFFFFF)
        facts = self._by_key.get(key)
        if facts is None:
            facts = RiscvInsnAttributes(*key)
            self._by_key[key] = facts
        self[bits] = facts
        return facts


_MAX_INSNS = 1 << 17
_FACTS = _DecodeCache()


@lru_cache(1 << 12)
def insn_of(bits: int) -> RiscvInsn:
    """Return the instruction whose 16 or 32 bits are `bits`."""
    if bits & 3 == 3:
        return RiscvInsn(RVI_SIZE, bits)
    return RiscvInsn(RVC_SIZE, expand(bits) or 0)


def relative_target(bits: int) -> int | None:
    """Return the distance in bytes from a branch or jal to its target; None for other instructions.

    `bits` are four bytes, of which a compressed instruction uses two. The bytes may begin in the middle of an
    instruction.
    """
    word = bits if bits & 3 == 3 else expand(bits & 0xFFFF) or 0
    opcode = word & 0x7F
    if opcode == _BRANCH:
        return _branch_offset(word)
    return _jump_offset(word) if opcode == _JAL else None


def insn_length(half: int) -> int:
    """Return an instruction's length in bytes; `half` are its first 16 bits.

    Mirrors: arch/riscv/include/asm/bug.h:GET_INSN_LENGTH (v6.1).
    """
    return RVI_SIZE if half & 3 == 3 else RVC_SIZE


def decode_insn(code: bytes, *, compressed: bool) -> RiscvInsn:
    """Decode the first instruction of `code`; `compressed`: the kernel uses RVC.

    As in Linux, every bit pattern is an instruction, even one that no processor knows.
    Raises: KernelError EINVAL (`code` ends inside the instruction, or the instruction is a compressed one
    and the kernel does not use RVC).
    """
    bits = int.from_bytes(code[:RVI_SIZE], "little")
    length = insn_length(bits)
    if len(code) < length:
        raise KernelError(EINVAL, "the code ends within an instruction")
    if length == RVC_SIZE and not compressed:
        raise KernelError(EINVAL, "compressed instruction in a kernel without RVC")
    return insn_of(bits if length == RVI_SIZE else bits & 0xFFFF)


def decode_all(code: bytes, addr: int, *, compressed: bool) -> Iterator[tuple[int, RiscvInsn]]:
    """Yield the address of each instruction and the instruction, up to the first undecodable one.

    `compressed`: the kernel uses RVC.
    """
    for at in attributes_of_all(code, addr, compressed=compressed):
        yield at, decode_insn(code[at - addr : at - addr + RVI_SIZE], compressed=compressed)


def attributes_of_all(code: bytes, addr: int, *, compressed: bool) -> dict[int, RiscvInsnAttributes]:
    """Return a map: address -> attributes of the instruction, up to the first undecodable instruction.

    `compressed`: the kernel uses RVC.
    """
    if not compressed:
        stop = _NOT_RVI.search(code[::RVI_SIZE])
        size = len(code) // RVI_SIZE if stop is None else min(stop.start(), len(code) // RVI_SIZE)
        words = struct.unpack_from(f"<{size}I", code)
        return dict(
            zip(range(addr, addr + len(code), RVI_SIZE), map(_FACTS.__getitem__, words), strict=False)
        )
    found: dict[int, RiscvInsnAttributes] = {}
    known = _FACTS
    halves = iter(struct.unpack_from(f"<{len(code) // RVC_SIZE}H", code))
    for bits in halves:
        if bits & 3 != 3:
            found[addr] = known[bits]
            addr += RVC_SIZE
            continue
        second = next(halves, None)
        if second is None:
            break
        found[addr] = known[second << 16 | bits]
        addr += RVI_SIZE
    return found


_NOT_RVI = lazy_pattern(b"[^%s]" % re.escape(bytes(range(3, 256, 4))))
"""Regular expression that matches the first byte of a 16-bit instruction."""
