"""Adding to 8 bytes of memory in one step where a word has 4: a loop around cmpxchg8b, with its registers."""

from __future__ import annotations

from emulated_kernel.arch.x86 import assemble as asm
from emulated_kernel.arch.x86.assemble import ABSOLUTE, AX, BX, CX, DX, Encoder

_JNE_SHORT = b"\x75"


def add_and_fetch_8(encoder: Encoder, address: int, value: int, low: int, high: int) -> bytes:
    """high:low = the 8 bytes at an absolute address + value, stored there; other registers are left alone."""
    kept = [register for register in (AX, DX, BX, CX) if register not in (low, high)]
    load = encoder.load(AX, ABSOLUTE, address, 4) + encoder.load(DX, ABSOLUTE, address + 4, 4)
    turn = (
        encoder.move(BX, AX)
        + encoder.move(CX, DX)
        + encoder.arithmetic_immediate(asm.ADD, BX, value)
        + encoder.arithmetic_immediate(asm.ADC, CX, 0)
        + encoder.compare_exchange_8(ABSOLUTE, address)
    )
    turn += _JNE_SHORT + (-len(turn) - 2).to_bytes(1, "little", signed=True)
    save = b"".join(map(encoder.push, kept))
    restore = b"".join(map(encoder.pop, reversed(kept)))
    return save + load + turn + _from_sum(encoder, low, high) + restore


def _from_sum(encoder: Encoder, low: int, high: int) -> bytes:
    """high:low = cx:bx, whichever registers they are."""
    if high != BX:
        return encoder.move(high, CX) + encoder.move(low, BX)
    if low == CX:
        return encoder.exchange(BX, CX)
    return encoder.move(low, BX) + encoder.move(high, CX)
