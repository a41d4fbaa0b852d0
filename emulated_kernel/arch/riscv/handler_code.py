"""Generator of handler code: saving what a program overwrites, the program, and restoring.

Either a struct pt_regs saves every register, or, where liveness is known, only what is live and written to
is kept on the stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from emulated_kernel.arch.analysis.region import Live
from emulated_kernel.arch.program.code_layout import lay_out
from emulated_kernel.arch.program.ops import HandlerCode, Program
from emulated_kernel.arch.riscv import frame
from emulated_kernel.arch.riscv.assemble import load, move_stack_pointer, set_register, store
from emulated_kernel.arch.riscv.frame import WORD
from emulated_kernel.arch.riscv.insn import REGISTER_NAMES, SP, T0
from emulated_kernel.arch.riscv.lowering import (
    NUMBERS,
    BranchOutOfReachError,
    RiscvLowering,
    encoding,
    in_register,
    in_slot,
)

_STACK_ALIGN = 16


@dataclass(frozen=True, slots=True)
class Target:
    """What all handlers of an architecture are made with."""

    breakpoint: bytes
    constants: Mapping[str, int]
    """Registers that are the same at every hit, ip among them."""


def handler_code(program: Program, target: Target, live: Live | None) -> HandlerCode:
    """Code that keeps what is live, or without that knowledge everything."""
    try:
        return _handler_code(program, target, live, far=False)
    except BranchOutOfReachError:
        return _handler_code(program, target, live, far=True)


def _handler_code(program: Program, target: Target, live: Live | None, *, far: bool) -> HandlerCode:
    if live is None:
        return _save_all(program, target, far=far)
    body = RiscvLowering(program, live, target.constants, target.breakpoint, far=far)
    before, after, slots = _save_live(body, live)
    return lay_out(body, before, after, slots, encoding(len(target.breakpoint)))


def _save_all(program: Program, target: Target, *, far: bool) -> HandlerCode:
    """A program within a frame; the stack pointer is at the frame, complete, at all its host calls."""
    completed = _complete_around(target.constants["ip"])
    body = RiscvLowering(program, None, target.constants, target.breakpoint, before_host=completed, far=far)
    slots = {number: in_slot(WORD * number) for number in body.slots}
    slots[SP] = in_register(SP, frame.SIZE)
    after = frame.load_general() + move_stack_pointer(frame.SIZE)
    return lay_out(body, frame.save_general(), after, slots, encoding(len(target.breakpoint)))


def _complete_around(ip: int) -> bytes:
    """The rest of the frame, with no register changed that a program uses: t0 isn't one of them."""
    return frame.complete(set_register(T0, ip))


def _save_live(body: RiscvLowering, live: Live) -> tuple[bytes, bytes, dict[int, int]]:
    """What stands before and behind the program, and where it finds registers as they were."""
    used = body.used
    restored = [number for number in sorted(used) if REGISTER_NAMES[number] in live.registers]
    reads = sorted((body.slots & used).difference(restored))
    saved = [*restored, *reads]
    size = -(-WORD * len(saved) // _STACK_ALIGN) * _STACK_ALIGN
    places = {number: WORD * index for index, number in enumerate(saved)}
    before = move_stack_pointer(-size) + b"".join(
        store(SP, at, number, WORD) for number, at in places.items()
    )
    after = b"".join(load(number, SP, places[number], WORD) for number in restored) + move_stack_pointer(size)
    slots = {number: in_register(number) for number in NUMBERS.values()}
    slots |= {number: in_slot(at) for number, at in places.items()}
    slots[SP] = in_register(SP, size)
    return before, after, slots
