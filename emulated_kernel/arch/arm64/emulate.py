"""Emulates the AArch64 instructions whose effect depends on their address.

Mirrors: arch/arm64/kernel/probes/simulate-insn.c (v6.12). Deviates: the emulation follows the processor. In
v6.12, blr writes the link before it reads its target, which is wrong if both are the same register.
"""

from __future__ import annotations

from typing import Any

from emulated_kernel.arch.arch_hooks import ByteMemory, Emulation
from emulated_kernel.arch.arm64 import insn
from emulated_kernel.arch.arm64.insn import REGISTER_NAMES, SIZE, SP_OR_ZERO
from emulated_kernel.util.fast_dataclass import dataclass

_MASK = (1 << 64) - 1
_N = 1 << 31
_Z = 1 << 30
_C = 1 << 29
_V = 1 << 28


@dataclass(frozen=True, slots=True)
class Arm64Emulation(Emulation):
    """Emulation of the AArch64 instruction `word` at `address`."""

    address: int
    word: int

    def run(self, regs: Any, memory: ByteMemory) -> None:
        word = self.word
        if insn.LDR_LITERAL.fits(word) or insn.LDRSW_LITERAL.fits(word):
            _set(regs, word & 31, self._literal(memory))
            regs.ip = self.next_ip
            return
        taken = insn.taken_address(word, self.address)
        if taken is not None:
            _set(regs, word & 31, taken)
            regs.ip = self.next_ip
            return
        target = self._target(regs)
        if insn.BL.fits(word) or insn.BLR.fits(word):
            _set(regs, insn.LINK, self.next_ip)
        regs.ip = target

    def _literal(self, memory: ByteMemory) -> int:
        word = self.word
        is_signed = insn.LDRSW_LITERAL.fits(word)
        size = 8 if word >> 30 & 1 and not is_signed else 4
        data = memory.read(self.address + insn.literal_offset(word) & _MASK, size)
        return int.from_bytes(data, "little", signed=is_signed)

    def _target(self, regs: Any) -> int:
        """Return the address at which execution continues after the branch, call or return.

        If a conditional branch is not taken, return the address of the next instruction.
        """
        word = self.word
        offset = insn.branch_offset(word)
        if offset is None:
            return _get(regs, word >> 5 & 31)
        if insn.B_COND.fits(word):
            is_taken = holds(word & 15, regs.flags)
        elif insn.CBZ.fits(word):
            value = _get(regs, word & 31)
            is_zero = not (value if word >> 31 else value & 0xFFFFFFFF)
            is_taken = is_zero != bool(word >> 24 & 1)
        elif insn.TBZ.fits(word):
            bit = _get(regs, word & 31) >> (word >> 26 & 32 | word >> 19 & 31) & 1
            is_taken = bit == word >> 24 & 1
        else:
            is_taken = True
        return self.address + offset & _MASK if is_taken else self.next_ip


def holds(condition: int, flags: int) -> bool:
    """Return True if the condition code `condition` (0 to 15) holds.

    `flags`: the processor state, whose bits 31 to 28 are the flags N, Z, C and V.
    """
    n, z, c, v = (bool(flags & bit) for bit in (_N, _Z, _C, _V))
    kind = condition >> 1
    found = (z, c, n, v, c and not z, n == v, n == v and not z, True)[kind]
    # The lowest bit inverts each condition, except the condition that always holds.
    return found != (bool(condition & 1) and kind != 7)


def _get(regs: Any, number: int) -> int:
    return 0 if number == SP_OR_ZERO else int(getattr(regs, REGISTER_NAMES[number]))


def _set(regs: Any, number: int, value: int) -> None:
    if number != SP_OR_ZERO:
        setattr(regs, REGISTER_NAMES[number], value & _MASK)


def emulation_of(word: int, address: int) -> Arm64Emulation:
    """Return the emulation of the instruction `word` at `address`; handling_of(word) must be SIMULATED."""
    return Arm64Emulation(address + SIZE, address, word)
