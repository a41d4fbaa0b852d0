"""struct pt_regs on the stack of the probed code: its layout, and code that saves and restores registers."""

from __future__ import annotations

from emulated_kernel.arch.riscv.encoder import addi, load, move_stack_pointer, set_register, store
from emulated_kernel.arch.riscv.insn import GP, REGISTER_NAMES, SP, T0, ZERO

PT_REGS = ("ip", *REGISTER_NAMES[1:], "status", "badaddr", "cause", "orig_a0")
"""Fields of struct pt_regs in address order, one word each. Registers x1 to x31 have the indices 1 to 31."""
WORD = 8
SIZE = WORD * len(PT_REGS)
"""Size of struct pt_regs in bytes; a multiple of the stack alignment."""
OFFSETS = {name: WORD * index for index, name in enumerate(PT_REGS)}
FIXED_REGISTERS = {"badaddr": 0, "cause": 3, "orig_a0": -1}
"""Name -> value of the fields that have the same value at every hit.

The cause is a breakpoint, and orig_a0 shows that no system call is in progress.
"""

_GENERAL = tuple(number for number in range(1, 32) if number != SP)


def read_status(rd: int) -> bytes:
    """Encode an instruction that sets rd to sstatus."""
    return set_in_status(rd, ZERO)


def set_in_status(rd: int, bits: int) -> bytes:
    """Encode csrrs: set rd to sstatus, and then set those bits of sstatus that are 1 in register `bits`."""
    return (0x100 << 20 | bits << 15 | 2 << 12 | rd << 7 | 0x73).to_bytes(4, "little")


def clear_in_status(bits: int) -> bytes:
    """Encode csrc: clear those bits of sstatus that are 1 in register `bits`."""
    return (0x100 << 20 | bits << 15 | 3 << 12 | 0x73).to_bytes(4, "little")


def save_general(room: int = SIZE, *, but: int = SP) -> bytes:
    """Return code that saves all general registers except sp and `but` in a struct pt_regs.

    The code first lowers sp by `room` bytes; the struct pt_regs begins at the new sp.
    """
    stores = (store(SP, WORD * number, number, WORD) for number in _GENERAL if number != but)
    return move_stack_pointer(-room) + b"".join(stores)


def load_general(*, but: int = SP) -> bytes:
    """Return code that loads all general registers except sp, `but` and gp from the struct pt_regs at sp.

    gp is not restored: here (not in Linux) it leads to the CPU's per-CPU data, and the task may have moved to
    another CPU since the registers were saved.
    """
    kept = (but, GP)
    return b"".join(load(number, SP, WORD * number, WORD) for number in _GENERAL if number not in kept)


def complete(set_ip: bytes, room: int = SIZE) -> bytes:
    """Return code that fills in the fields of a pt_regs that save_general() leaves out.

    The code overwrites t0, which save_general() has saved. `set_ip` is code that loads ip into t0. `room`:
    distance in bytes from the pt_regs to the probed code's sp.
    """
    code = set_ip + store(SP, OFFSETS["ip"], T0, WORD)
    code += addi(T0, SP, room) + store(SP, OFFSETS["sp"], T0, WORD)
    code += read_status(T0) + store(SP, OFFSETS["status"], T0, WORD)
    for name, value in FIXED_REGISTERS.items():
        code += set_register(T0, value) + store(SP, OFFSETS[name], T0, WORD)
    return code
