"""The code in an arm64 guest that traps to the host in calls on control files; see ControlStubs."""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.guests.linux.mounts.control_stubs import ControlStubs
from emulated_kernel.util.code_listing import machine_code

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

    The offset of each part is a multiple of _ARM64_ROOM. `symbols`: name of a kernel symbol -> address.
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
