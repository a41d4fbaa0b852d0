"""Relocation of AArch64 instructions into a detour, with the effect that each has at its own address.

Linux has no jump optimization on arm64. A jump replaces one instruction, so no code leads into the replaced
bytes. Addresses that an instruction computes from its own address become constants.
"""

from __future__ import annotations

from enum import Enum, auto
from errno import EINVAL
from functools import lru_cache

from emulated_kernel.arch.arm64 import insn
from emulated_kernel.arch.arm64.encoder import branch, load, set_register
from emulated_kernel.arch.arm64.insn import LINK, SIZE, SP_OR_ZERO, Handling, handling_of
from emulated_kernel.util.errors import KernelError

MAX_RELOCATED = 5 * SIZE
"""Maximum size in bytes of a relocated instruction: a constant of 64 bits, and a load or branch."""
_INVERT = 1
"""Bit that inverts the condition of b.cond."""
_INVERT_TEST = 1 << 24
"""Bit that inverts the condition of cbz and tbz."""
_ALWAYS = 14
"""The first of the two condition codes that always hold."""
_SKIP = 2 * SIZE
"""Offset in bytes of a branch that skips the next instruction: distance from the branch to its target."""


class Relocation(Enum):
    """Form of an instruction in a detour."""

    COPY = auto()
    ADDRESS = auto()
    """An adr or adrp. Its value becomes a constant."""
    LITERAL = auto()
    """A load of a general register from a literal. The address of the literal becomes a constant."""
    JUMP = auto()
    CONDITIONAL = auto()
    """A b.cond, cbz or tbz. The inverted branch skips a jump to the target."""
    CALL = auto()
    """A bl. x30 is set to the original return address, so that no stack frame has a detour's address."""
    LEAVE = auto()
    """A return or indirect jump, which is copied."""
    REFUSED = auto()


@lru_cache(1 << 14)
def relocation_of(word: int) -> Relocation:
    """Return the form that the instruction `word` has in a detour.

    The result is REFUSED for an instruction that cannot be probed, and for blr, bc.cond, and a load of a
    literal into the zero register.
    """
    if insn.LDR_LITERAL.fits(word) or insn.LDRSW_LITERAL.fits(word):
        return Relocation.REFUSED if word & 31 == SP_OR_ZERO else Relocation.LITERAL
    for kind, relocation in _SIMULATED.items():
        if kind.fits(word):
            return relocation
    return Relocation.COPY if handling_of(word) is Handling.COPIED else Relocation.REFUSED


_SIMULATED = {
    insn.ADR: Relocation.ADDRESS,
    insn.ADRP: Relocation.ADDRESS,
    insn.B: Relocation.JUMP,
    insn.BL: Relocation.CALL,
    insn.B_COND: Relocation.CONDITIONAL,
    insn.CBZ: Relocation.CONDITIONAL,
    insn.TBZ: Relocation.CONDITIONAL,
    insn.BR: Relocation.LEAVE,
    insn.RET: Relocation.LEAVE,
    insn.BC_COND: Relocation.REFUSED,
}
"""Pattern of instructions -> relocation, for instructions that read or write the instruction pointer.

Linux: a bc.cond is executed in a slot, because kprobes do not know this instruction (v6.12). A detour cannot
contain it. Only a CPU with Armv8.8 has bc.cond.
"""


def relocate(word: int, address: int, to: int) -> bytes:
    """Return code at `to` with the effect of the instruction `word` at `address`.

    Raises: KernelError EINVAL (the instruction cannot be moved), ERANGE (its target is out of reach).
    """
    kind = relocation_of(word)
    if kind is Relocation.REFUSED:
        raise KernelError(EINVAL, "an instruction that can't be moved")
    register = word & 31
    taken = insn.taken_address(word, address)
    if taken is not None:
        return set_register(register, taken)
    if kind is Relocation.LITERAL:
        return set_register(register, address + insn.literal_offset(word)) + _load(word)
    offset = insn.branch_offset(word)
    if offset is None:
        return _bytes(word)
    before = b""
    if kind is Relocation.CALL:
        before = set_register(LINK, address + SIZE)
    elif kind is Relocation.CONDITIONAL and not _is_unconditional(word):
        before = _skip(word)
    return before + branch(to + len(before), address + offset)


def _load(word: int) -> bytes:
    """Encode the literal load `word` as a load from the address that its destination register contains."""
    register = word & 31
    is_signed = insn.LDRSW_LITERAL.fits(word)
    size = 8 if word >> 30 & 1 and not is_signed else 4
    return load(register, register, 0, size, sign=is_signed)


def _is_unconditional(word: int) -> bool:
    return insn.B_COND.fits(word) and word & 15 >= _ALWAYS


def _skip(word: int) -> bytes:
    """Encode a branch over one instruction, taken if the conditional branch `word` is not taken."""
    kept = word & ~(0x3FFF << 5) if insn.TBZ.fits(word) else word & ~(0x7FFFF << 5)
    inverted = kept ^ (_INVERT if insn.B_COND.fits(word) else _INVERT_TEST)
    return _bytes(inverted | _SKIP // SIZE << 5)


def _bytes(word: int) -> bytes:
    return word.to_bytes(SIZE, "little")
