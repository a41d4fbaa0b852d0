"""ControlStubs: the code in the guest that traps to the host in calls on control files, and its offsets.

RISC-V: the code of a file operation saves the return address on the stack before it traps to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
from emulated_kernel.util.code_listing import machine_code
from emulated_kernel.util.fast_dataclass import dataclass

_A2 = A0 + 2
_WORD = 8
_FRAME = 16
_ENTER = move_stack_pointer(-_FRAME) + store(SP, _WORD, RA, _WORD)
_LEAVE = load(RA, SP, _WORD, _WORD) + move_stack_pointer(_FRAME)
_RETURN = _LEAVE + jump_register(RA)
_FMODE_STREAM = 1 << 21
"""Flag of a file without a position. Mirrors: include/linux/fs.h:FMODE_STREAM (v6.12)."""


@dataclass(frozen=True)
class ControlStubs:
    """Code of the operations of control files in the guest, and offsets in bytes in this code.

    At each of the offsets `looked_up`, `woken` and `traps`, the code has a breakpoint that traps to the
    host.
    """

    made: Callable[[int, Mapping[str, int]], bytes]
    """Function that returns the code; it takes the code's address and a map: symbol -> address."""
    size: int
    looked_up: int
    instantiate: int
    """Offset of the call of d_instantiate(). A lookup that finds a file or directory continues there.

    The host sets the arguments of the call. Other lookups continue at `lookup_ends`.
    """
    lookup_ends: int
    operations: Mapping[str, int]
    """Name of a file operation -> offset of its first instruction."""
    traps: tuple[int, ...]
    """Offsets of the breakpoints in the file operations."""
    is_stream: int
    """Offset at which the open of a file without a position continues."""
    opened: int
    """Offset at which the open of a file with a position continues."""
    copy: int
    sleep: int
    woken: int
    returns: int
    copy_to_user: str = "_copy_to_user"
    """Symbol of the function that copies data to user memory; it returns the number of bytes not copied."""


_SIZE = 0x280
_PARTS = (
    "lookup", "open", "read", "write", "is_stream", "opened", "copy", "sleep", "woken", "returns",
)  # fmt: skip
_ROOM = 0x40
"""Size in bytes of the space for each part of the code."""
_AT = {name: number * _ROOM for number, name in enumerate(_PARTS)}
_LOOKS_UP = move_stack_pointer(-_FRAME) + store(SP, _WORD, RA, _WORD) + store(SP, 0, S1, _WORD) + move(S1, A1)
_CALL_SIZE = 8
_LOOKED_UP = len(_LOOKS_UP) + _CALL_SIZE
_INSTANTIATE = _LOOKED_UP + len(C_EBREAK)
_LOOKUP_ENDS = _INSTANTIATE + _CALL_SIZE + len(addi(A0, ZERO, 0))


def _riscv_code(at: int, symbols: Mapping[str, int]) -> bytes:
    """Return the code for the address `at`, with each part at its offset in _AT."""

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

_ARM64_OPERATION = """
    fd 7b be a9 | stp x29, x30, [sp, #-32]!
    80 00 20 d4 | brk #4
"""
ARM64_LISTINGS = {
    "lookup": """
    fd 7b be a9         | stp x29, x30, [sp, #-32]!
    f3 0b 00 f9         | str x19, [sp, #16]
    f3 03 01 aa         | mov x19, x1
    30 01 00 58         | ldr x16, simple_lookup_at
    00 02 3f d6         | blr x16
    80 00 20 d4         | brk #4
    10 01 00 58         | ldr x16, d_instantiate_at
    00 02 3f d6         | blr x16
    00 00 80 d2         | mov x0, #0
    f3 0b 40 f9         | ldr x19, [sp, #16]
    fd 7b c2 a8         | ldp x29, x30, [sp], #32
    c0 03 5f d6         | ret
    imm64:simple_lookup | simple_lookup_at: .quad simple_lookup
    imm64:d_instantiate | d_instantiate_at: .quad d_instantiate
""",
    "open": _ARM64_OPERATION,
    "read": _ARM64_OPERATION,
    "write": _ARM64_OPERATION,
    "is_stream": """
    fd 7b c2 a8       | ldp x29, x30, [sp], #32
    70 00 00 58       | ldr x16, stream_open_at
    00 02 1f d6       | br x16
    1f 20 03 d5       | nop
    imm64:stream_open | stream_open_at: .quad stream_open
""",
    "opened": """
    e1 0b 00 f9       | str x1, [sp, #16]
    30 01 00 58       | ldr x16, stream_open_at
    00 02 3f d6       | blr x16
    e1 0b 40 f9       | ldr x1, [sp, #16]
    09 01 00 58       | ldr x9, f_mode_at
    2a 68 69 b8       | ldr w10, [x1, x9]
    4a 79 0a 12       | and w10, w10, #0xffdfffff
    2a 68 29 b8       | str w10, [x1, x9]
    fd 7b c2 a8       | ldp x29, x30, [sp], #32
    c0 03 5f d6       | ret
    imm64:stream_open | stream_open_at: .quad stream_open
    imm64:f_mode      | f_mode_at: .quad f_mode
""",
    "copy": """
    e2 0b 00 f9        | str x2, [sp, #16]
    f0 00 00 58        | ldr x16, copy_to_user_at
    00 02 3f d6        | blr x16
    e9 0b 40 f9        | ldr x9, [sp, #16]
    20 01 00 cb        | sub x0, x9, x0
    fd 7b c2 a8        | ldp x29, x30, [sp], #32
    c0 03 5f d6        | ret
    1f 20 03 d5        | nop
    imm64:copy_to_user | copy_to_user_at: .quad copy_to_user
""",
    "sleep": """
    90 00 00 58    | ldr x16, schedule_at
    00 02 3f d6    | blr x16
    80 00 20 d4    | brk #4
    1f 20 03 d5    | nop
    imm64:schedule | schedule_at: .quad schedule
""",
    "returns": """
    fd 7b c2 a8 | ldp x29, x30, [sp], #32
    c0 03 5f d6 | ret
""",
}
"""Name of a part of the code for arm64 -> its assembly listing.

As on RISC-V, the code of a file operation creates a stack frame before its breakpoint traps to the host.
"""
_ARM64_ROOM = 0x40


def _arm64_code(at: int, symbols: Mapping[str, int]) -> bytes:
    """Return the machine code of all parts for the address `at`.

    The offset of each part is a multiple of _ARM64_ROOM. `symbols`: name -> address.
    """
    known = {**symbols, "copy_to_user": symbols[_ARM64_COPY]}
    parts = (machine_code(part, at, known) for part in ARM64_LISTINGS.values())
    return b"".join(part.ljust(_ARM64_ROOM, b"\0") for part in parts)


_ARM64_COPY = "__arch_copy_to_user"
ARM64_STUBS = ControlStubs(
    made=_arm64_code,
    size=_ARM64_ROOM * len(ARM64_LISTINGS),
    looked_up=0x14,
    instantiate=0x18,
    lookup_ends=0x24,
    operations={"open": 0x40, "read": 0x80, "write": 0xC0},
    traps=(0x44, 0x84, 0xC4),
    is_stream=0x100,
    opened=0x140,
    copy=0x180,
    sleep=0x1C0,
    woken=0x1C8,
    returns=0x200,
    copy_to_user=_ARM64_COPY,
)
