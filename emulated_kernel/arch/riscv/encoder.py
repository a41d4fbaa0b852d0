"""Encoder for the RISC-V instructions of which handlers and detours are made: RV64I, mul and atomics.

Registers are numbers (0 zero, 1 ra, 2 sp, ...).
"""

from __future__ import annotations

from enum import IntEnum
from errno import ERANGE
from functools import cache, lru_cache

from emulated_kernel.arch.riscv.insn import SP, ZERO, RiscvOpcode, sign_extend
from emulated_kernel.arch.riscv.insn_formats import b_type, i_type, j_type, r_type, s_type, u_type
from emulated_kernel.util.errors import KernelError

EBREAK = bytes.fromhex("73001000")
C_EBREAK = bytes.fromhex("0290")
NOP = bytes.fromhex("13000000")
C_NOP = bytes.fromhex("0100")

LONG_JUMP_SIZE = 8
"""Size in bytes of a jump by auipc and jalr, which reaches 2 GiB."""
JUMP_SIZE = 4
"""Size in bytes of jal, which reaches 1 MiB."""

_JUMP_RANGE = 1 << 20
_LONG_LIMIT = (1 << 31) - (1 << 11)
_LOAD_UNSIGNED = 4
"""Bit of funct3 that makes a load zero-extend."""
_SIZE_BITS = {1: 0, 2: 1, 4: 2, 8: 3}
_SUB = 0x20
_SRA = 0x20
_MUL = 0x01
_LR = 0b00010 << 2
"""Value of the field funct7 in lr, without ordering."""
_SC = 0b00011 << 2
"""Value of the field funct7 in sc, without ordering."""
_SIGNED_12 = range(-0x800, 0x800)


class BranchFunct3(IntEnum):
    """Values of the field funct3 of branch instructions."""

    EQ = 0
    NE = 1
    LT = 4
    GE = 5
    LTU = 6
    GEU = 7


class ArithmeticFunct3(IntEnum):
    """Field funct3 of OP and OP-IMM instructions, and one bit of the field funct7.

    Bit 4 of a value is bit 5 of funct7, which SUB and SRA set. OP-IMM has no SUB.
    """

    ADD = 0x00
    SLL = 0x01
    XOR = 0x04
    SRL = 0x05
    OR = 0x06
    AND = 0x07
    SUB = 0x10
    SRA = 0x15


def _bytes(word: int) -> bytes:
    return word.to_bytes(4, "little")


def fits_12(value: int) -> bool:
    """Return True if the 12-bit immediate of most instructions can hold `value`."""
    return value in _SIGNED_12


# Registers


@cache
def arithmetic(op: ArithmeticFunct3, rd: int, rs1: int, rs2: int) -> bytes:
    """Encode an instruction that sets rd to rs1 op rs2; shifts use the low 6 bits of rs2."""
    return _bytes(r_type(RiscvOpcode.OP, rd, op & 7, rs1, rs2, (op >> 4) * _SUB))


def multiply(rd: int, rs1: int, rs2: int) -> bytes:
    """Encode an instruction that sets rd to the low word of rs1 * rs2."""
    return _bytes(r_type(RiscvOpcode.OP, rd, 0, rs1, rs2, _MUL))


@lru_cache(4096)
def arithmetic_immediate(op: ArithmeticFunct3, rd: int, rs1: int, value: int) -> bytes:
    """Encode an instruction that sets rd to rs1 op value.

    The value has 12 signed bits, or is a shift count from 0 to 63.
    """
    return _bytes(i_type(RiscvOpcode.OP_IMM, rd, op & 7, rs1, value | (op >> 4) * _SRA << 5))


def addi(rd: int, rs1: int, value: int) -> bytes:
    """Encode an instruction that sets rd to rs1 + a signed 12-bit value."""
    return arithmetic_immediate(ArithmeticFunct3.ADD, rd, rs1, value)


def move(rd: int, rs: int) -> bytes:
    """Encode an instruction that sets rd to rs; return b"" if both are the same register."""
    return addi(rd, rs, 0) if rd != rs else b""


def set_to_address(rd: int, source: int, target: int) -> bytes:
    """Encode 8 bytes of code that set rd to the address `target`.

    `source`: address of the code, which must be within 2 GiB of the target; see check_reach().
    """
    high, low = halves(target - source)
    return auipc(rd, high) + addi(rd, rd, low)


def lui(rd: int, value: int) -> bytes:
    """Encode a lui that sets rd to a 32-bit value without its lower 12 bits, sign-extended."""
    return _bytes(u_type(RiscvOpcode.LUI, rd, value))


def auipc(rd: int, value: int) -> bytes:
    """Encode an auipc that sets rd to its own address + a 32-bit value without its lower 12 bits."""
    return _bytes(u_type(RiscvOpcode.AUIPC, rd, value))


def halves(value: int) -> tuple[int, int]:
    """Split a 32-bit number into the part that lui takes and the signed 12-bit immediate to add to it."""
    low = sign_extend(value, 12)
    return value - low & 0xFFFFFFFF, low


@lru_cache(4096)
def set_register(rd: int, value: int) -> bytes:
    """Encode instructions that set rd to a 64-bit number and change no other register."""
    value = sign_extend(value, 64)
    if fits_12(value):
        return addi(rd, ZERO, value)
    if -(1 << 31) <= value < 1 << 31:
        high, low = halves(value)
        # Use addiw: above 0x7ffff7ff the sum has to wrap at 32 bits.
        rest = _bytes(i_type(RiscvOpcode.OP_IMM_32, rd, 0, rd, low)) if low else b""
        return lui(rd, high) + rest
    low = sign_extend(value, 12)
    upper = value - low >> 12
    shift = 12 + (upper & -upper).bit_length() - 1
    head = set_register(rd, sign_extend(value - low >> shift, 64 - shift))
    return (
        head + arithmetic_immediate(ArithmeticFunct3.SLL, rd, rd, shift) + (addi(rd, rd, low) if low else b"")
    )


# Memory


@lru_cache(4096)
def load(rd: int, base: int, offset: int, size: int, *, sign: bool = False) -> bytes:
    """Encode an instruction that sets rd to `size` bytes at base + a 12-bit offset, extended to a word.

    The value is sign-extended if `sign` is set, otherwise zero-extended.
    """
    unsigned = 0 if sign or size == 8 else _LOAD_UNSIGNED
    return _bytes(i_type(RiscvOpcode.LOAD, rd, _SIZE_BITS[size] | unsigned, base, offset))


@lru_cache(4096)
def store(base: int, offset: int, src: int, size: int) -> bytes:
    """Encode a store of the low `size` bytes of src at base + a 12-bit offset."""
    return _bytes(s_type(RiscvOpcode.STORE, _SIZE_BITS[size], base, src, offset))


def atomic_add(rd: int, base: int, src: int) -> bytes:
    """Encode amoadd.d: add src to the doubleword at base, and load its old value into rd."""
    return _bytes(r_type(RiscvOpcode.AMO, rd, _SIZE_BITS[8], base, src, 0))


def load_reserved(rd: int, base: int) -> bytes:
    """Encode lr.d: load the doubleword at base into rd, and reserve it for the next sc.d."""
    return _bytes(r_type(RiscvOpcode.AMO, rd, _SIZE_BITS[8], base, ZERO, _LR))


def store_conditional(rd: int, base: int, src: int) -> bytes:
    """Encode sc.d: store src at base and set rd to 0.

    If memory has changed since the lr.d, only set rd to a value other than 0.
    """
    return _bytes(r_type(RiscvOpcode.AMO, rd, _SIZE_BITS[8], base, src, _SC))


def move_stack_pointer(size: int) -> bytes:
    """Encode an addition of `size` to sp."""
    return addi(SP, SP, size) if size else b""


# Control


def branch(condition: BranchFunct3, left: int, right: int, offset: int) -> bytes:
    """Encode a branch to the instruction's own address + `offset`, taken if `condition` holds.

    The condition compares the registers `left` and `right`. The offset is at most 4 KiB in either
    direction.
    """
    return _bytes(b_type(RiscvOpcode.BRANCH, condition, left, right, offset))


def jal(rd: int, source: int, target: int) -> bytes:
    """Encode a jump from `source` to `target` that stores the return address in rd.

    Raises: KernelError ERANGE (farther than 1 MiB).
    """
    distance = target - source
    if not -_JUMP_RANGE <= distance < _JUMP_RANGE:
        raise KernelError(ERANGE, f"jump from {source:#x} to {target:#x} is longer than 1 MiB")
    return _bytes(j_type(RiscvOpcode.JAL, rd, distance))


def jalr(rd: int, base: int, offset: int) -> bytes:
    """Encode a jump to base + a 12-bit offset that stores the return address in rd."""
    return _bytes(i_type(RiscvOpcode.JALR, rd, 0, base, offset))


def jump_register(register: int) -> bytes:
    """Encode a jump to the address in a register."""
    return jalr(ZERO, register, 0)


def long_jump(link: int, scratch: int, source: int, target: int) -> bytes:
    """Encode a jump from `source` to `target` by auipc and jalr through `scratch`.

    `link`: register that receives the return address. Raises: KernelError ERANGE (farther than 2 GiB).
    Mirrors: opt.c:in_auipc_jalr_range (optprobes v6, 2023).
    """
    check_reach(source, target)
    high, low = halves(target - source)
    return auipc(scratch, high) + jalr(link, scratch, low)


def check_reach(source: int, target: int) -> None:
    """Check that an auipc and a 12-bit immediate lead from `source` to `target`.

    Raises: KernelError ERANGE (farther than 2 GiB).
    """
    if not -(1 << 31) - (1 << 11) <= target - source < _LONG_LIMIT:
        raise KernelError(ERANGE, f"{target:#x} is farther than 2 GiB from {source:#x}")
