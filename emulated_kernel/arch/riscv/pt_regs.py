"""struct pt_regs on the stack of the probed code: saving every register in it, and restoring."""

from __future__ import annotations

from emulated_kernel.arch.riscv.encoder import addi, load, move_stack_pointer, set_register, store
from emulated_kernel.arch.riscv.insn import GP, REGISTER_NAMES, SP, T0, ZERO

PT_REGS = ("ip", *REGISTER_NAMES[1:], "status", "badaddr", "cause", "orig_a0")
"""struct pt_regs, from the lowest address up, in words: x1 to x31 are where their numbers say."""
WORD = 8
SIZE = WORD * len(PT_REGS)
"""Bytes; a multiple of what the stack pointer is aligned to."""
OFFSETS = {name: WORD * index for index, name in enumerate(PT_REGS)}
FIXED_REGISTERS = {"badaddr": 0, "cause": 3, "orig_a0": -1}
"""What is the same at every hit: a breakpoint, and no system call."""

_GENERAL = tuple(number for number in range(1, 32) if number != SP)


def read_status(rd: int) -> bytes:
    """rd = sstatus."""
    return (0x100 << 20 | ZERO << 15 | 2 << 12 | rd << 7 | 0x73).to_bytes(4, "little")


def save_general(room: int = SIZE, *, but: int = SP) -> bytes:
    """Make room for the frame, and save all but sp, and another one, in it."""
    stores = (store(SP, WORD * number, number, WORD) for number in _GENERAL if number != but)
    return move_stack_pointer(-room) + b"".join(stores)


def load_general(*, but: int = SP) -> bytes:
    """Restore all but sp, another one, and gp: that is the CPU's, which may be another one by now."""
    kept = (but, GP)
    return b"".join(load(number, SP, WORD * number, WORD) for number in _GENERAL if number not in kept)


def complete(set_ip: bytes, room: int = SIZE) -> bytes:
    """Fill in the rest of a pt_regs; t0, which is saved by then, is overwritten, by `set_ip` with ip."""
    code = set_ip + store(SP, OFFSETS["ip"], T0, WORD)
    code += addi(T0, SP, room) + store(SP, OFFSETS["sp"], T0, WORD)
    code += read_status(T0) + store(SP, OFFSETS["status"], T0, WORD)
    for name, value in FIXED_REGISTERS.items():
        code += set_register(T0, value) + store(SP, OFFSETS[name], T0, WORD)
    return code
