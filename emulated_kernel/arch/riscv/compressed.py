"""RVC of RV64: expansion of each 16-bit instruction to the 32-bit instruction that it abbreviates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from emulated_kernel.arch.riscv.insn_formats import b_type, i_type, j_type, r_type, s_type, u_type

_LOAD = 0x03
_LOAD_FP = 0x07
_STORE = 0x23
_STORE_FP = 0x27
_OP_IMM = 0x13
_OP_IMM_32 = 0x1B
_OP = 0x33
_OP_32 = 0x3B
_LUI = 0x37
_BRANCH = 0x63
_JALR = 0x67
_JAL = 0x6F
_EBREAK = 0x00100073
_RA = 1
_SP = 2
_SUB = 0x20
"""Value of the field funct7 in sub, subw and srai."""
_WORD = 2
"""Value of the field funct3 in loads and stores of a word."""
_DOUBLE = 3
"""Value of the field funct3 in loads and stores of a doubleword."""


@cache
def expand(half: int) -> int | None:
    """Return the 32-bit instruction that the 16 bits of `half` abbreviate; None if reserved or illegal."""
    return _EXPANSIONS[half & 3, half >> 13](half)


def _bits(half: int, *places: tuple[int, int, int]) -> int:
    """Compose an immediate from fields of the 16-bit instruction `half`.

    `places`: for each field, its lowest bit in the instruction, its width, and its lowest bit in the
    immediate.
    """
    value = 0
    for at, width, to in places:
        value |= (half >> at & (1 << width) - 1) << to
    return value


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


def _rd(half: int) -> int:
    """Return the register in bits 7 to 11 of the 16-bit instruction `half`.

    This register is the destination, and in many instructions also the first source.
    """
    return half >> 7 & 0x1F


def _rs2(half: int) -> int:
    return half >> 2 & 0x1F


def _rd_low(half: int) -> int:
    """Return the register in bits 2 to 4 of the 16-bit instruction `half`: one of s0, s1, a0 to a5."""
    return 8 + (half >> 2 & 7)


def _rs1_low(half: int) -> int:
    """Return the register in bits 7 to 9 of the 16-bit instruction `half`: one of s0, s1, a0 to a5."""
    return 8 + (half >> 7 & 7)


def _immediate(half: int) -> int:
    """Return the signed immediate of six bits in the 16-bit instruction `half`."""
    return _signed(_shift_amount(half), 6)


def _shift_amount(half: int) -> int:
    return _bits(half, (2, 5, 0), (12, 1, 5))


def _word_offset(half: int) -> int:
    return _bits(half, (6, 1, 2), (10, 3, 3), (5, 1, 6))


def _double_offset(half: int) -> int:
    return _bits(half, (10, 3, 3), (5, 2, 6))


def _none(_half: int) -> None:
    return None


# Quadrant 0


def _addi4spn(half: int) -> int | None:
    offset = _bits(half, (6, 1, 2), (5, 1, 3), (11, 2, 4), (7, 4, 6))
    return i_type(_OP_IMM, _rd_low(half), 0, _SP, offset) if offset else None


def _load(opcode: int, funct3: int) -> Callable[[int], int]:
    offset = _word_offset if funct3 == _WORD else _double_offset
    return lambda half: i_type(opcode, _rd_low(half), funct3, _rs1_low(half), offset(half))


def _store(opcode: int, funct3: int) -> Callable[[int], int]:
    offset = _word_offset if funct3 == _WORD else _double_offset
    return lambda half: s_type(opcode, funct3, _rs1_low(half), _rd_low(half), offset(half))


# Quadrant 1


def _addi(half: int) -> int:
    return i_type(_OP_IMM, _rd(half), 0, _rd(half), _immediate(half))


def _addiw(half: int) -> int | None:
    rd = _rd(half)
    return i_type(_OP_IMM_32, rd, 0, rd, _immediate(half)) if rd else None


def _li(half: int) -> int:
    return i_type(_OP_IMM, _rd(half), 0, 0, _immediate(half))


def _lui(half: int) -> int | None:
    if _rd(half) == _SP:
        offset = _signed(_bits(half, (6, 1, 4), (2, 1, 5), (5, 1, 6), (3, 2, 7), (12, 1, 9)), 10)
        return i_type(_OP_IMM, _SP, 0, _SP, offset) if offset else None
    value = _immediate(half)
    return u_type(_LUI, _rd(half), value << 12) if value else None


def _arithmetic(half: int) -> int | None:
    rd = _rs1_low(half)
    kind = half >> 10 & 3
    if kind == 0:
        return i_type(_OP_IMM, rd, 5, rd, _shift_amount(half))
    if kind == 1:
        return i_type(_OP_IMM, rd, 5, rd, _shift_amount(half) | _SUB << 5)
    if kind == 2:
        return i_type(_OP_IMM, rd, 7, rd, _immediate(half))
    return _register_arithmetic(half, rd)


def _register_arithmetic(half: int, rd: int) -> int | None:
    op = half >> 5 & 3
    rs2 = _rd_low(half)
    if half >> 12 & 1:
        return r_type(_OP_32, rd, 0, rd, rs2, _SUB if op == 0 else 0) if op < 2 else None
    funct3 = (0, 4, 6, 7)[op]
    return r_type(_OP, rd, funct3, rd, rs2, _SUB if op == 0 else 0)


def _j(half: int) -> int:
    places = ((3, 3, 1), (11, 1, 4), (2, 1, 5), (7, 1, 6), (6, 1, 7), (9, 2, 8), (8, 1, 10), (12, 1, 11))
    return j_type(_JAL, 0, _signed(_bits(half, *places), 12))


def _branch(funct3: int) -> Callable[[int], int]:
    places = ((3, 2, 1), (10, 2, 3), (2, 1, 5), (5, 2, 6), (12, 1, 8))
    return lambda half: b_type(_BRANCH, funct3, _rs1_low(half), 0, _signed(_bits(half, *places), 9))


# Quadrant 2


def _slli(half: int) -> int:
    return i_type(_OP_IMM, _rd(half), 1, _rd(half), _shift_amount(half))


def _load_sp(opcode: int, funct3: int) -> Callable[[int], int | None]:
    places = ((4, 3, 2), (12, 1, 5), (2, 2, 6)) if funct3 == _WORD else ((5, 2, 3), (12, 1, 5), (2, 3, 6))

    def load(half: int) -> int | None:
        if opcode == _LOAD and not _rd(half):
            return None
        return i_type(opcode, _rd(half), funct3, _SP, _bits(half, *places))

    return load


def _store_sp(opcode: int, funct3: int) -> Callable[[int], int]:
    places = ((9, 4, 2), (7, 2, 6)) if funct3 == _WORD else ((10, 3, 3), (7, 3, 6))
    return lambda half: s_type(opcode, funct3, _SP, _rs2(half), _bits(half, *places))


def _jump_or_move(half: int) -> int | None:
    """Return the 32-bit form of the instruction `half`, which is a jr, mv, ebreak, jalr or add.

    Return None if the encoding is reserved.
    """
    first = _rd(half)
    second = _rs2(half)
    link = half >> 12 & 1
    if second:
        return r_type(_OP, first, 0, first if link else 0, second, 0)
    if first:
        return i_type(_JALR, _RA if link else 0, 0, first, 0)
    return _EBREAK if link else None


_EXPANSIONS: dict[tuple[int, int], Callable[[int], int | None]] = {
    (0, 0): _addi4spn,
    (0, 1): _load(_LOAD_FP, _DOUBLE),
    (0, 2): _load(_LOAD, _WORD),
    (0, 3): _load(_LOAD, _DOUBLE),
    (0, 4): _none,
    (0, 5): _store(_STORE_FP, _DOUBLE),
    (0, 6): _store(_STORE, _WORD),
    (0, 7): _store(_STORE, _DOUBLE),
    (1, 0): _addi,
    (1, 1): _addiw,
    (1, 2): _li,
    (1, 3): _lui,
    (1, 4): _arithmetic,
    (1, 5): _j,
    (1, 6): _branch(0),
    (1, 7): _branch(1),
    (2, 0): _slli,
    (2, 1): _load_sp(_LOAD_FP, _DOUBLE),
    (2, 2): _load_sp(_LOAD, _WORD),
    (2, 3): _load_sp(_LOAD, _DOUBLE),
    (2, 4): _jump_or_move,
    (2, 5): _store_sp(_STORE_FP, _DOUBLE),
    (2, 6): _store_sp(_STORE, _WORD),
    (2, 7): _store_sp(_STORE, _DOUBLE),
}
"""(low two bits, high three bits) of an instruction -> function that expands it."""
