"""Generator of handler code: saving what a program overwrites, the program, and restoring.

Either a frame like struct pt_regs saves every register, or, where liveness is known, only what is live and
written to is pushed.
"""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.arch.base import Live
from emulated_kernel.arch.code_layout import lay_out
from emulated_kernel.arch.program import CallHost, HandlerCode, Program
from emulated_kernel.arch.x86 import assemble as asm
from emulated_kernel.arch.x86.assemble import AX, SP, Encoder
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.frame import Frame
from emulated_kernel.arch.x86.lowering import ENCODING, NUMBERS, SLOT_FLAGS, SLOT_SP, Body

_PUSHF = b"\x9c"


def save_all(program: Program, encoder: Encoder, frame: Frame, constants: Mapping[str, int]) -> HandlerCode:
    """A program within a frame; the stack pointer is at the frame, complete, at all its host calls."""
    has_host_calls = any(type(op) is CallHost for op in program)
    body = Body(program, encoder, None, constants, frame.completed(constants) if has_host_calls else b"")
    return lay_out(body, frame.save, frame.restore, slots_of(frame), ENCODING)


def slots_of(frame: Frame) -> dict[int, int]:
    """Where the saved values are, from the stack pointer within the frame; bytes."""
    offsets = {NUMBERS[name]: offset for name, offset in frame.offsets.items() if name in NUMBERS}
    offsets[SLOT_FLAGS] = frame.offsets["flags"]
    offsets[SLOT_SP] = frame.size
    return offsets


def save_live(program: Program, encoder: Encoder, live: Live, constants: Mapping[str, int]) -> HandlerCode:
    """A program that keeps what is live, and for the rest what is cheapest."""
    body = Body(program, encoder, live, constants)
    keep = {NUMBERS[name] for name in live.registers}
    saving = Saving(body, encoder, keep)
    return lay_out(body, saving.before, saving.after, saving.offsets, ENCODING)


class Saving:
    """What is pushed: first what is only read by the program, then what is restored, the status flags last.

    lahf and sahf cost a third of pushf and popf, which ends a translated block.
    """

    def __init__(self, body: Body, encoder: Encoder, live: set[int]) -> None:
        changed = {*body.used, AX} if body.saves_flags else set(body.used)
        restored = [number for number in sorted(changed) if number in live]
        reads = sorted(body.slots.difference(restored, [SLOT_SP]))
        pushed = [*reads, *restored]
        save = b"".join(_PUSHF if number == SLOT_FLAGS else encoder.push(number) for number in pushed)
        restore = b"".join(map(encoder.pop, reversed(restored)))
        if reads:
            restore += encoder.lea(SP, SP, len(reads) * encoder.word)
        below = 0
        if body.saves_flags:
            keep, give_back, below = _flags_keeping(body, encoder, live)
            save += asm.LAHF + asm.SETO_AL + keep
            restore = give_back + asm.ADD_AL_127 + asm.SAHF + restore
        self.before = save
        self.after = restore
        words = len(pushed) + below
        self.offsets = {number: (words - 1 - index) * encoder.word for index, number in enumerate(pushed)}
        """From the stack pointer within, in bytes."""
        self.offsets[SLOT_SP] = words * encoder.word


def _flags_keeping(body: Body, encoder: Encoder, live: set[int]) -> tuple[bytes, bytes, int]:
    """Where the flags in ax stay during the program: how they get there, and back, and words pushed."""
    if AX not in body.used:
        return b"", b"", 0
    for number in range(len(REGISTER_NAMES) if encoder.bits == 64 else 8):
        name = REGISTER_NAMES[number]
        if number != SP and number not in body.used and number not in live and name not in body.reads:
            return encoder.move(number, AX), encoder.move(AX, number), 0
    return encoder.push(AX), encoder.pop(AX), 1
