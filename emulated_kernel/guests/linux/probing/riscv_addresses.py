"""Finds the addresses that RISC-V code loads relative to the instruction pointer."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from emulated_kernel.arch.riscv.encoder import addi
from emulated_kernel.arch.riscv.insn import RiscvOpcode, sign_extend

_PAIR = Struct("<2I")


def riscv_addresses_in(text: bytes, start: int) -> Iterator[int]:
    """Yield the addresses that the code `text` may load by an auipc and an addi.

    `start`: address of the first instruction of `text`.
    """
    for at in range(0, len(text) - _PAIR.size + 1, 2):
        high, low = _PAIR.unpack_from(text, at)
        register = high >> 7 & 31
        if high & 0x7F == RiscvOpcode.AUIPC and low & 0xFFFFF == _addi(register):
            yield start + at + sign_extend(high & ~0xFFF, 32) + sign_extend(low >> 20, 12)


def _addi(register: int) -> int:
    """Return the low 20 bits of the encoding of `addi register, register, constant`: all but the constant."""
    return int.from_bytes(addi(register, register, 0), "little")
