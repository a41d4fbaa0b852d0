"""Generator of handler code: saving what a program overwrites, the program, and restoring.

Either a struct pt_regs saves every register, or, where liveness is known, only what is live and written to
is kept on the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from emulated_kernel.arch.analysis.region import Live
from emulated_kernel.arch.base import Detour, ReturnCode, ReturnDispatch
from emulated_kernel.arch.program.code_layout import Encoding
from emulated_kernel.arch.program.lowering import lay_out
from emulated_kernel.arch.program.ops import HandlerCode, Program
from emulated_kernel.arch.riscv import frame
from emulated_kernel.arch.riscv.assemble import (
    jal,
    jump_register,
    load,
    move_stack_pointer,
    set_register,
    set_to_address,
    store,
)
from emulated_kernel.arch.riscv.detour import RETURN_FROM_FRAME, RETURN_ROOM
from emulated_kernel.arch.riscv.frame import WORD
from emulated_kernel.arch.riscv.insn import RA, REGISTER_NAMES, SP, T0, ZERO
from emulated_kernel.arch.riscv.lowering import (
    LEAVING,
    NUMBERS,
    BranchOutOfReachError,
    RiscvLowering,
    encoding,
    in_register,
    in_slot,
)
from emulated_kernel.dataclass import dataclass

_STACK_ALIGN = 16


@dataclass(frozen=True, slots=True)
class Target:
    """What all handlers of an architecture are made with."""

    breakpoint: bytes
    constants: Mapping[str, int]
    """Registers that are the same at every hit, ip among them."""


def handler_code(program: Program, target: Target, live: Live | None) -> HandlerCode:
    """Code that keeps what is live, or without that knowledge everything."""
    return _reaching(_handler_code, program, target, live)


def _reaching(make: Callable[..., HandlerCode], *args: Any, **options: Any) -> HandlerCode:
    """With short branches, if they reach."""
    try:
        return make(*args, **options, far=False)
    except BranchOutOfReachError:
        return make(*args, **options, far=True)


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


def _save_live(body: RiscvLowering, live: Live, above: int = 0) -> tuple[bytes, bytes, dict[int, int]]:
    """What stands before and behind the program, and where it finds registers as they were.

    `above`: bytes on the stack that the probed code doesn't know of.
    """
    used = body.used
    # A handler that an fentry site calls returns by t0; other ops than assembly leave it alone.
    kept = live.registers | {REGISTER_NAMES[T0]}
    restored = [number for number in sorted(used) if REGISTER_NAMES[number] in kept]
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
    slots[SP] = in_register(SP, size + above)
    return before, after, slots


_RETURN_WORD = RETURN_ROOM - frame.SIZE
"""Bytes above the frame of a return: the word that is returned to, at the bottom."""
_ENTER = move_stack_pointer(-_RETURN_WORD) + store(SP, 0, RA, WORD)
"""ra is the trampoline's address: who looks at the stack meanwhile sees a function that was called."""
_ENTER_FRAME = frame.save_general(RETURN_ROOM, but=RA) + store(SP, frame.SIZE, RA, WORD)
_RETURN = load(RA, SP, 0, WORD) + move_stack_pointer(_RETURN_WORD) + jump_register(RA)
_NO_CONSTANTS: Mapping[str, int] = {}


class RiscvReturnCode(ReturnCode):
    """Trampolines that are entered by ra, and handlers that return by it."""

    live = Live(frozenset(("a0", "a1", *(f"s{n}" for n in range(12)))), flags=False)

    def __init__(self, breakpoint_: bytes) -> None:
        self._breakpoint = breakpoint_

    def dispatch(
        self, program: Program, buffer: int, own: int | None = None, *, saves_all: bool
    ) -> ReturnDispatch:
        found = _reaching(self._dispatch, program, saves_all=saves_all)
        address = buffer + found.entry if own is None else own
        # The handler in Python finds ra as it was, in the frame.
        code = found.code if saves_all else found.code + load(RA, SP, 0, WORD) + frame.save_general()
        code += frame.complete(set_to_address(T0, buffer + len(code), address), RETURN_ROOM)
        finish = len(code) + len(self._breakpoint)
        return ReturnDispatch(
            code=code + self._breakpoint + RETURN_FROM_FRAME,
            entry=found.entry,
            trap=len(code),
            finish=finish if saves_all else None,
        )

    def _dispatch(self, program: Program, *, saves_all: bool, far: bool) -> HandlerCode:
        leave = jump_register(LEAVING)
        if saves_all:
            body = self._body(program, None, far=far)
            # Not by storing ra: of all that is on the stack the word to return to is the one that changes.
            own = set_to_address(T0, len(_ENTER_FRAME), 0) + store(SP, WORD * RA, T0, WORD)
            return lay_out(body, _ENTER_FRAME + own, b"", _frame_slots(body), self._encoding, leave)
        body = self._body(program, self.live, far=far)
        before, after, slots = _save_live(body, self.live, _RETURN_WORD)
        return lay_out(body, _ENTER + before, after, slots, self._encoding, after + leave)

    def handler(self, program: Program, *, saves_all: bool) -> HandlerCode:
        return _reaching(self._handler, program, saves_all=saves_all)

    def _handler(self, program: Program, *, saves_all: bool, far: bool) -> HandlerCode:
        if saves_all:
            body = self._body(program, None, far=far)
            return lay_out(body, b"", b"", _frame_slots(body), self._encoding)
        body = self._body(program, self.live, far=far)
        before, after, slots = _save_live(body, self.live, _RETURN_WORD)
        return lay_out(body, before, after + _RETURN, slots, self._encoding)

    def placed(self, handler: HandlerCode, buffer: int, finish: int | None) -> Detour:
        behind = b"" if finish is None else jal(ZERO, buffer + len(handler.code), finish)
        return Detour.compiled(handler, behind)

    def _body(self, program: Program, live: Live | None, *, far: bool) -> RiscvLowering:
        return RiscvLowering(program, live, _NO_CONSTANTS, self._breakpoint, far=far)

    @property
    def _encoding(self) -> Encoding:
        return encoding(len(self._breakpoint))


def _frame_slots(body: RiscvLowering) -> dict[int, int]:
    """Where a frame of a return has registers as they were."""
    return {number: in_slot(WORD * number) for number in body.slots} | {SP: in_register(SP, RETURN_ROOM)}
