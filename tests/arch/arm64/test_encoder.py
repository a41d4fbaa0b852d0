"""The A64 encoder: a disassembler prints each instruction as requested."""

from __future__ import annotations

import capstone
import pytest

from emulated_kernel.arch.arm64 import encoder as asm
from emulated_kernel.arch.arm64.encoder import SP, ZERO, ConditionCode, RegisterOp
from emulated_kernel.util.errors import KernelError

AT = 0x1000
CODES = {
    "add x1, x2, x3": asm.compute(RegisterOp.ADD, 1, 2, 3),
    "neg x1, x3": asm.compute(RegisterOp.SUB, 1, ZERO, 3),
    "asr x1, x2, x3": asm.compute(RegisterOp.ASR, 1, 2, 3),
    "mul x1, x2, x3": asm.multiply(1, 2, 3),
    "cmp x1, x2": asm.compare(1, 2),
    "sub sp, sp, #0x110": asm.move_stack_pointer(-0x110),
    "lsl x1, x2, #0x3f": asm.shift_left(1, 2, 63),
    "lsr x1, x2, #5": asm.shift_right(1, 2, 5),
    "asr x1, x2, #5": asm.shift_right(1, 2, 5, is_signed=True),
    "mov x1, xzr": asm.move(1, ZERO),
    "": asm.move(1, 1),
    "mov x1, #-1": asm.set_register(1, -1),
    "mov x1, #0": asm.set_register(1, 0),
    "mov x1, #-0xedcc; movk x1, #0x7c00, lsl #16; movk x1, #0x8000, lsl #32": asm.set_register(
        1, 0xFFFF80007C001234
    ),
    "mov x1, #1; movk x1, #0, lsl #16; movk x1, #0, lsl #32; movk x1, #0, lsl #48": asm.set_to_address(1, 1),
    "mrs x1, sp_el0": asm.read_system_register(1, "sp_el0"),
    "msr nzcv, x1": asm.write_flags(1),
    "ldrsb x1, [x2, #0xfff]": asm.load(1, 2, 0xFFF, 1, sign=True),
    "ldurh w1, [x2, #-0x100]": asm.load(1, 2, -0x100, 2),
    "str xzr, [sp, #0x7ff8]": asm.store(SP, 0x7FF8, ZERO, 8),
    "stp x0, x1, [sp]; str x30, [sp, #0x18]": asm.store_all(SP, {1: 8, 30: 24, 0: 0}),
    "ldp x30, x1, [sp, #0x10]": asm.load_all(SP, {1: 24, 30: 16}),
    "ldaxr x1, [x2]; stlxr w3, x1, [x2]; clrex ": asm.load_exclusive(1, 2)
    + asm.store_exclusive(3, 2, 1)
    + asm.CLEAR_EXCLUSIVE,
    "b.hi #0xff8": asm.branch_if(ConditionCode.HI, -8),
    "cbnz x1, #0x1010": asm.branch_if_zero(1, 16, inverted=True),
    "bl #0x8000ffc": asm.branch(AT, AT + (1 << 27) - 4, links=True),
    "ret x9": asm.return_to(9),
    "brk #4": asm.BRK,
}


@pytest.mark.parametrize("text", CODES)
def test_instructions(text: str) -> None:
    decoder = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
    insns = decoder.disasm(CODES[text], AT)  # type: ignore[no-untyped-call]
    assert "; ".join(f"{insn.mnemonic} {insn.op_str}" for insn in insns) == text


def test_a_branch_out_of_reach_is_refused() -> None:
    with pytest.raises(KernelError):
        asm.branch(AT, AT + (1 << 27))
