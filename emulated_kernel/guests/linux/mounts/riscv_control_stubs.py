"""The code in a RISC-V guest that traps to the host in calls on control files; see ControlStubs.

The code of a file operation saves the return address on the stack before it traps to the host.
"""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.arch.riscv.encoder import (
    C_EBREAK,
    ArithmeticFunct3,
    addi,
    arithmetic,
    jump_register,
    load,
    long_jump,
    move,
    move_stack_pointer,
    set_register,
    store,
)
from emulated_kernel.arch.riscv.insn import A0, A1, RA, S1, SP, T0, T1, ZERO
from emulated_kernel.guests.linux.mounts.control_stubs import ControlStubs

_A2 = A0 + 2
_WORD = 8
_FRAME = 16
_ENTER = move_stack_pointer(-_FRAME) + store(SP, _WORD, RA, _WORD)
_LEAVE = load(RA, SP, _WORD, _WORD) + move_stack_pointer(_FRAME)
_RETURN = _LEAVE + jump_register(RA)
_FMODE_STREAM = 1 << 21
"""Flag of a file without a position. Mirrors: include/linux/fs.h:FMODE_STREAM (v6.12)."""
_SIZE = 0x280
_PARTS = (
    "lookup", "open", "read", "write", "is_stream", "opened", "copy", "sleep", "woken", "returns",
)  # fmt: skip
_ROOM = 0x40
"""Size in bytes of the space for each of the parts of the code, which _PARTS names."""
_AT = {name: number * _ROOM for number, name in enumerate(_PARTS)}
_LOOKS_UP = move_stack_pointer(-_FRAME) + store(SP, _WORD, RA, _WORD) + store(SP, 0, S1, _WORD) + move(S1, A1)
_CALL_SIZE = 8
_LOOKED_UP = len(_LOOKS_UP) + _CALL_SIZE
_INSTANTIATE = _LOOKED_UP + len(C_EBREAK)
_LOOKUP_ENDS = _INSTANTIATE + _CALL_SIZE + len(addi(A0, ZERO, 0))


def _riscv_code(at: int, symbols: Mapping[str, int]) -> bytes:
    """Return the machine code of all _PARTS, for a start at the address `at`; see ControlStubs.made.

    Each part is at its offset in _AT.
    """

    def call(place: int, name: str) -> bytes:
        return long_jump(RA, RA, at + place, symbols[name])

    lookup = _LOOKS_UP + call(len(_LOOKS_UP), "simple_lookup") + C_EBREAK
    lookup += call(_INSTANTIATE, "d_instantiate") + addi(A0, ZERO, 0) + load(S1, SP, 0, _WORD) + _RETURN
    stream = _LEAVE + long_jump(ZERO, T1, at + _AT["is_stream"] + len(_LEAVE), symbols["stream_open"])
    keep = store(SP, 0, A1, _WORD)
    mode = symbols["f_mode"]
    opened = keep + call(_AT["opened"] + len(keep), "stream_open") + load(A1, SP, 0, _WORD)
    opened += load(T0, A1, mode, 4) + set_register(T1, ~_FMODE_STREAM)
    opened += arithmetic(ArithmeticFunct3.AND, T0, T0, T1) + store(A1, mode, T0, 4) + _RETURN
    keep = store(SP, 0, _A2, _WORD)
    copy = keep + call(_AT["copy"] + len(keep), "_copy_to_user") + load(T0, SP, 0, _WORD)
    copy += arithmetic(ArithmeticFunct3.SUB, A0, T0, A0) + _RETURN
    operation = _ENTER + C_EBREAK
    sleep = call(_AT["sleep"], "schedule")
    sleep += long_jump(ZERO, T1, at + _AT["sleep"] + len(sleep), at + _AT["woken"])
    parts = lookup, operation, operation, operation, stream, opened, copy, sleep, C_EBREAK, _RETURN
    code = b""
    for name, part in zip(_PARTS, parts, strict=True):
        code += C_EBREAK * ((_AT[name] - len(code)) // len(C_EBREAK)) + part
    return code + C_EBREAK * ((_SIZE - len(code)) // len(C_EBREAK))


_TRAP = len(_ENTER)
RISCV_STUBS = ControlStubs(
    made=_riscv_code,
    size=_SIZE,
    looked_up=_LOOKED_UP,
    instantiate=_INSTANTIATE,
    lookup_ends=_LOOKUP_ENDS,
    operations={name: _AT[name] for name in ("open", "read", "write")},
    traps=tuple(_AT[name] + _TRAP for name in ("open", "read", "write")),
    is_stream=_AT["is_stream"],
    opened=_AT["opened"],
    copy=_AT["copy"],
    sleep=_AT["sleep"],
    woken=_AT["woken"],
    returns=_AT["returns"],
)
