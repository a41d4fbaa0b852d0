"""Return handlers in guest code: the trampoline that finds them, and what a handler stands in.

The trampoline pushes its own address where the return address was taken from, and asks a program where to
go on. If that doesn't know, it saves all registers for Python, as the one for Python alone does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from emulated_kernel.arch.base import Detour, HandlerStub, Live, ReturnDispatch
from emulated_kernel.arch.code_layout import lay_out
from emulated_kernel.arch.program import HandlerCode, Program
from emulated_kernel.arch.x86.assemble import Encoder, jump_through
from emulated_kernel.arch.x86.frame import Frame
from emulated_kernel.arch.x86.handler_code import Saving, slots_of
from emulated_kernel.arch.x86.lowering import ENCODING, LEAVING, NUMBERS, Body
from emulated_kernel.arch.x86.prepare import relative_jump

_RET = b"\xc3"
_PUSH_IMMEDIATE = b"\x68"
_OWN_SIZE = 5
_NO_CONSTANTS: Mapping[str, int] = {}


def push_own(address: int) -> bytes:
    """The trampoline's address, on the stack, in place of the return address."""
    return _PUSH_IMMEDIATE + (address & 0xFFFFFFFF).to_bytes(4, "little")


def dispatch(
    program: Program,
    buffer: int,
    own: int | None,
    encoder: Encoder,
    frame: Frame,
    live: Live | None,
    stub_at: Callable[[int], HandlerStub],
) -> ReturnDispatch:
    """For the addresses from `buffer` on. Without `live` all registers are saved in front of the program.

    `own` is what is pushed, if not its address; `stub_at` makes what saves registers for Python.
    """
    address = buffer + _dispatch(program, 0, encoder, frame, live).entry if own is None else own
    found = _dispatch(program, address, encoder, frame, live)
    stub = stub_at(address)
    slow = stub.code[_OWN_SIZE:]
    finish = b"" if live is not None else frame.restore + _RET
    behind = len(found.code)
    return ReturnDispatch(
        code=found.code + slow + finish,
        entry=found.entry,
        trap=behind + stub.trap - _OWN_SIZE,
        finish=behind + len(slow) if finish else None,
    )


def _dispatch(
    program: Program, address: int, encoder: Encoder, frame: Frame, live: Live | None
) -> HandlerCode:
    own = push_own(address)
    if live is None:
        body = Body(program, encoder, None, _NO_CONSTANTS)
        slots, leave = slots_of(frame), jump_through(LEAVING)
        return lay_out(body, own + frame.save, frame.restore, slots, ENCODING, leave)
    body = Body(program, encoder, live, _NO_CONSTANTS)
    saving = Saving(body, encoder, {NUMBERS[name] for name in live.registers})
    return lay_out(
        body,
        own + saving.before,
        saving.after,
        saving.offsets,
        ENCODING,
        saving.after + jump_through(LEAVING),
    )


def handler(program: Program, encoder: Encoder, frame: Frame, live: Live | None) -> HandlerCode:
    """A return handler; without `live` it stands in the trampoline's frame."""
    if live is None:
        # The trampoline's program has used registers already.
        body = Body(program, encoder, None, _NO_CONSTANTS, overwritten=True)
        return lay_out(body, b"", b"", slots_of(frame), ENCODING)
    body = Body(program, encoder, live, _NO_CONSTANTS)
    saving = Saving(body, encoder, {NUMBERS[name] for name in live.registers})
    return lay_out(body, saving.before, saving.after + _RET, saving.offsets, ENCODING)


def placed(code: HandlerCode, buffer: int, finish: int | None) -> Detour:
    """A return handler at `buffer`; one in a frame goes on at `finish`. Raises: KernelError(ERANGE)."""
    return Detour.compiled(code, b"" if finish is None else relative_jump(buffer + len(code.code), finish))
