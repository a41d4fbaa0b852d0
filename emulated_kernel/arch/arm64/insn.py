"""Instructions of AArch64, classified by how kprobes execute them: copied, simulated, or rejected.

Mirrors: arch/arm64/kernel/probes/decode-insn.c, arch/arm64/include/asm/insn.h (v6.12).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import Enum, auto
from functools import lru_cache
from typing import Final

from emulated_kernel.util.fast_named_tuple import NamedTuple

SIZE: Final = 4
"""Size of an instruction in bytes."""
REGISTER_NAMES: Final = tuple(f"x{number}" for number in range(31))
SP_OR_ZERO: Final = 31
"""Register number that means the stack pointer or the zero register, depending on the instruction."""
LINK: Final = 30


class Pattern(NamedTuple):
    """A set of instructions: all instructions that equal `value` in the bits of `mask`."""

    mask: int
    value: int

    def fits(self, word: int) -> bool:
        """Return True if the instruction `word` matches the pattern."""
        return word & self.mask == self.value


B = Pattern(0xFC000000, 0x14000000)
BL = Pattern(0xFC000000, 0x94000000)
B_COND = Pattern(0xFF000010, 0x54000000)
BC_COND = Pattern(0xFF000010, 0x54000010)
"""Pattern of bc.cond: a b.cond with a hint for the branch predictor."""
CBZ = Pattern(0x7E000000, 0x34000000)
"""Pattern of cbz and cbnz: branches if a register is zero, or not zero."""
TBZ = Pattern(0x7E000000, 0x36000000)
"""Pattern of tbz and tbnz: branches if one bit of a register is zero, or not zero."""
BR = Pattern(0xFFFFFC1F, 0xD61F0000)
BLR = Pattern(0xFFFFFC1F, 0xD63F0000)
RET = Pattern(0xFFFFFC1F, 0xD65F0000)
BR_AUTH = Pattern(0xFEFFF800, 0xD61F0800)
BLR_AUTH = Pattern(0xFEFFF800, 0xD63F0800)
RET_AUTH = Pattern(0xFFFFFBFF, 0xD65F0BFF)
ERET = Pattern(0xFFFFFFFF, 0xD69F03E0)
ERET_AUTH = Pattern(0xFFFFFBFF, 0xD69F0BFF)
EXCEPTION = Pattern(0xFF000000, 0xD4000000)
"""Pattern of the instructions that cause an exception: svc, hvc, smc, brk and hlt."""
MSR_IMMEDIATE = Pattern(0xFFF8F01F, 0xD500401F)
MSR = Pattern(0xFFF00000, 0xD5100000)
MRS = Pattern(0xFFF00000, 0xD5300000)
HINT = Pattern(0xFFFFF01F, 0xD503201F)
BTI = Pattern(0xFFFFFF3F, 0xD503241F)
PACI_SP = Pattern(0xFFFFFFBF, 0xD503233F)
"""Pattern of paciasp and pacibsp, which are landing pads of calls, as `bti c` is."""
ADR = Pattern(0x9F000000, 0x10000000)
ADRP = Pattern(0x9F000000, 0x90000000)
LDR_LITERAL = Pattern(0xBF000000, 0x18000000)
LDRSW_LITERAL = Pattern(0xFF000000, 0x98000000)
PREFETCH_LITERAL = Pattern(0xFF000000, 0xD8000000)
SIMD_LITERAL = Pattern(0x3F000000, 0x1C000000)
EXCLUSIVE = Pattern(0x3F800000, 0x08000000)
LOAD_EXCLUSIVE = Pattern(0x3F400000, 0x08400000)
STORE_EXCLUSIVE = Pattern(0x3F400000, 0x08000000)
_BRANCH_OR_SYSTEM = Pattern(0x1C000000, 0x14000000)
_BRANCHES = (B, BL, CBZ, TBZ, RET, RET_AUTH, BR, BR_AUTH, BLR, BLR_AUTH, B_COND)
_NOT_STEPPED = (*_BRANCHES, MSR_IMMEDIATE, MSR, EXCEPTION, ERET, ERET_AUTH)
_LITERALS = (LDR_LITERAL, LDRSW_LITERAL, PREFETCH_LITERAL, SIMD_LITERAL, ADR, ADRP)
_SIMULATED = (B_COND, CBZ, TBZ, ADR, ADRP, B, BL, BR, BLR, RET, LDR_LITERAL, LDRSW_LITERAL)
_DAIF = 0xDA11
"""Encoding of the system register DAIF, the exception masks, in bits 5 to 20 of an mrs instruction."""
_STEPPED_HINTS = frozenset((0x00, 0x07, 0x08, 0x0A, 0x18, 0x19, 0x1A, 0x1B, 0x20, 0x22, 0x24, 0x26))
"""Numbers of the hint instructions that can be executed in an insn slot.

The hints are nop, xpaclri, the paci* instructions and bti.
"""


class Handling(Enum):
    """How a probed instruction is executed."""

    COPIED = auto()
    """A copy of the instruction is executed in an insn slot."""
    SIMULATED = auto()
    REJECTED = auto()
    """The instruction cannot be probed."""


@lru_cache(1 << 14)
def handling_of(word: int) -> Handling:
    """Return how the instruction `word` is executed if it is probed.

    Deviates: loads of SIMD registers from literals are rejected. Linux copies them, although the address is
    relative to the instruction: the copy loads from another address.
    Mirrors: arch/arm64/kernel/probes/decode-insn.c:aarch64_insn_is_steppable, arm_probe_decode_insn (v6.12).
    """
    if _is_stepped(word):
        return Handling.COPIED
    return Handling.SIMULATED if any(kind.fits(word) for kind in _SIMULATED) else Handling.REJECTED


def _is_stepped(word: int) -> bool:
    if _BRANCH_OR_SYSTEM.fits(word):
        if any(kind.fits(word) for kind in _NOT_STEPPED):
            return False
        if MRS.fits(word):
            return word >> 5 & 0xFFFF != _DAIF
        return not HINT.fits(word) or word >> 5 & 0x7F in _STEPPED_HINTS
    return not EXCLUSIVE.fits(word) and not any(kind.fits(word) for kind in _LITERALS)


def words_of(code: bytes) -> Iterator[int]:
    """Yield the instructions in `code` as 32-bit numbers; leave out an incomplete instruction at the end."""
    return (word for (word,) in struct.iter_unpack("<I", code[: len(code) & -SIZE]))


def signed(value: int, bits: int) -> int:
    """Return the lower `bits` bits of `value`, read as a signed number (two's complement)."""
    sign = 1 << bits - 1
    return (value & (1 << bits) - 1 ^ sign) - sign


def branch_offset(word: int) -> int | None:
    """Return the distance in bytes from a direct branch or call to its target.

    Return None if the instruction `word` is no direct branch or call.
    """
    if B.fits(word) or BL.fits(word):
        return signed(word, 26) * SIZE
    if B_COND.fits(word) or CBZ.fits(word):
        return signed(word >> 5, 19) * SIZE
    return signed(word >> 5, 14) * SIZE if TBZ.fits(word) else None


def called_register(word: int) -> int | None:
    """Return the number of the register with the address that a blr calls; None for other instructions.

    Return None also for the register that is always 0.
    """
    register = word >> 5 & 31
    return register if BLR.fits(word) and register != SP_OR_ZERO else None


def literal_offset(word: int) -> int:
    """Return the distance in bytes from `word`, a load of a literal, to the literal."""
    return signed(word >> 5, 19) * SIZE


def taken_address(word: int, address: int) -> int | None:
    """Return the address that an adr or adrp at `address` writes to its register.

    Return None if the instruction `word` is no adr or adrp.
    """
    value = signed(word >> 5, 19) << 2 | word >> 29 & 3
    if ADR.fits(word):
        return address + value
    return (address & -4096) + (value << 12) if ADRP.fits(word) else None
