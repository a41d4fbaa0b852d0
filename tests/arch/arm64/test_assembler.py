"""The arm64 assembler of handlers produces the instructions that were written, or refuses the text with a
reason.
"""

from __future__ import annotations

from typing import Any

import capstone
import pytest

from emulated_kernel.arch.arm64.arch import Arm64
from emulated_kernel.arch.program.asm_source import Assembly, SourceText
from emulated_kernel.util.errors import KernelError

PLACE = 0xFFFF4000_00001C48


def assembled(text: str) -> Assembly:
    assembler = Arm64.assembler
    source = SourceText.parse(text, comment=assembler.comment)
    names = assembler.cells(source)
    return assembler.assemble(source, {name: PLACE + 8 * number for number, name in enumerate(names)})


def listing(code: bytes) -> str:
    engine: Any = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
    return "; ".join(f"{name} {rest}".strip() for _, _, name, rest in engine.disasm_lite(code, 0))


def address(register: str, value: int) -> str:
    """Return instructions that load `value` into `register`, in the notation of capstone."""
    parts = [(value >> shift & 0xFFFF, shift) for shift in (0, 16, 32, 48)]
    (first, _), *rest = [part for part in parts if part[0]]
    moves = [f"movk {register}, #{number:#x}, lsl #{shift}" for number, shift in rest]
    return "; ".join([f"mov {register}, #{first:#x}", *moves])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add x9, x9, #10", "add x9, x9, #0xa"),
        ("ADD X9, X9, 0b11 // three", "add x9, x9, #3"),
        ("mov x1, #-1 # all bits", "mov x1, #-1"),
        ("again: subs x1, x1, #1; b.ne again", "subs x1, x1, #1; b.ne #0"),
        ("cbz x1, out; tbnz w2, #31, out; nop; out:", "cbz x1, #0xc; tbnz w2, #0x1f, #0xc; nop"),
        ("b out; nop; out: nop", "b #8; nop; nop"),
        ("ldr x1, [x2, #16]; str w1, [x2], #4", "ldr x1, [x2, #0x10]; str w1, [x2], #4"),
        ("ldr x1, =0x123456789", "mov x1, #0x6789; movk x1, #0x2345, lsl #16; movk x1, #0x1, lsl #32"),
        ("ldr w1, =-1", "mov x1, #0xffff; movk x1, #0xffff, lsl #16"),
        ("ldr x9, a", f"{address('x9', PLACE)}; ldr x9, [x9]"),
        ("ldrh w9, a + 2", f"{address('x9', PLACE + 2)}; ldrh w9, [x9]"),
        ("str w9, b, x10; adr x1, c", f"{address('x10', PLACE)}; str w9, [x10]; {address('x1', PLACE + 8)}"),
    ],
)
def test_what_was_written_is_what_is_made(text: str, expected: str) -> None:
    made = assembled(text)
    shown = listing(made.code).replace("movz", "mov").replace("#1, lsl", "#0x1, lsl")
    assert shown == expected.replace("movz", "mov")
    assert made.starts == tuple(range(0, len(made.code), 4))


@pytest.mark.parametrize(
    ("text", "reads", "writes", "flags"),
    [
        ("add x1, x2, x3", "x2 x3", "x1", False),
        ("adds x1, x2, w3, sxtw", "x2 x3", "x1", True),
        ("cmp x1, x30", "x1 x30", "", True),
        ("movk x1, #1", "x1", "x1", False),
        ("mov w1, #1; movk x1, #1, lsl #16", "", "x1", False),
        ("bfi x1, x2, #3, #4", "x1 x2", "x1", False),
        ("ldp x1, x2, [x3], #16", "x3", "x1 x2 x3", False),
        ("stp x1, xzr, [x3, #-16]!", "x1 x3", "x3", False),
        ("ldr x1, [x2, x3, lsl #3]", "x2 x3", "x1", False),
        ("again: ldxr x1, [x2]; stxr w4, x1, [x2]; cbnz w4, again", "x2", "x1 x4", False),
        ("cbz x1, out; mov x2, #1; out: mov x3, x2", "x1 x2", "x2 x3", False),
        ("csel x1, x2, x29, eq", "x2 x29", "x1", False),
        ("str x1, cell, x2", "x1", "x2", False),
    ],
)
def test_registers_are_found(text: str, reads: str, writes: str, flags: bool) -> None:
    made = assembled(text)
    assert (set(made.reads), set(made.writes), made.writes_flags) == (
        set(reads.split()),
        set(writes.split()),
        flags,
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bl #8", "isn't an instruction on general registers"),
        ("ret", "isn't an instruction on general registers"),
        ("brk #4", "isn't an instruction on general registers"),
        ("svc #0", "isn't an instruction on general registers"),
        ("mrs x0, nzcv", "isn't an instruction on general registers"),
        ("msr daifset, #2", "isn't an instruction on general registers"),
        ("wfi", "isn't an instruction on general registers"),
        ("adrp x0, #0x1000", "isn't an instruction on general registers"),
        ("fmov x0, d1", "isn't an instruction on general registers"),
        ("ldr q0, [x1]", "q0 is no general register"),
        ("ldr x0, [sp]", "stack pointer"),
        ("mov x0, sp", "stack pointer"),
        ("add sp, sp, #16", "stack pointer"),
        ("ldr x0, #64", "addresses don't depend on the handler's"),
        ("b nowhere", "jumps lead to labels of the text"),
        ("cbz x0, #8", "jumps lead to labels of the text"),
        ("br x0", "isn't an instruction on general registers"),
        ("mov x18, #1", "x18 is the platform's"),
        ("ldr x1, [x18], #8", "x18 is the platform's"),
        ("mov x30, #1", "x30 may be another probe's to change"),
        ("mov w0, #0x1ffffffff", "doesn't fit"),
        ("ldr w0, =0x100000000", "doesn't fit"),
        ("add x0, x1, #0x1001", "keystone"),
        ("ldadd x1, x2, [x3]", "keystone"),
        ("ldr x0, cell + 1", "a cell has 8 bytes"),
        ("str x0, cell", "has 3 operands"),
        ("str x0, cell, x0", "overwritten by the address"),
        ("frob x0", "keystone"),
    ],
)
def test_what_is_refused_says_where_and_why(text: str, why: str) -> None:
    with pytest.raises(KernelError, match=f"code, line 2, column 3: .*{why}"):
        assembled(f"nop\n  {text}")
