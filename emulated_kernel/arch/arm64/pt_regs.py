"""struct user_pt_regs on the stack of the probed code, and code that saves and restores registers."""

from __future__ import annotations

from emulated_kernel.arch.arm64.encoder import (
    SP,
    WORD,
    RegisterOp,
    add_immediate,
    compute,
    load,
    load_all,
    move_stack_pointer,
    read_system_register,
    store,
    store_all,
    write_flags,
)
from emulated_kernel.arch.arm64.insn import REGISTER_NAMES

PT_REGS = (*REGISTER_NAMES, "sp", "ip", "flags")
"""Names of the registers in the order of struct user_pt_regs, one word each."""
SIZE = WORD * len(PT_REGS)
"""Size of struct user_pt_regs in bytes; a multiple of the stack alignment."""
OFFSETS = {name: WORD * index for index, name in enumerate(PT_REGS)}
FLAGS = PT_REGS.index("flags")
SCRATCH = 16
"""Register x16, which handler programs do not use."""

_PLACES = {number: WORD * number for number in range(len(REGISTER_NAMES))}
_EL1H = 5


def read_state(rd: int, spare: int) -> bytes:
    """Return code that adds the rest of the processor state to the condition flags in rd.

    The rest consists of the exception masks, and of the mode, which is EL1h. The code overwrites `spare`.
    """
    code = read_system_register(spare, "daif") + compute(RegisterOp.ADD, rd, rd, spare)
    return code + add_immediate(rd, rd, _EL1H)


def save_general(room: int = SIZE) -> bytes:
    """Return code that saves x0 to x30 and the processor state in a struct user_pt_regs.

    The code first lowers sp by `room` bytes, so that the struct begins at sp. After the code has saved
    SCRATCH and x17, it overwrites them.
    """
    state = read_system_register(SCRATCH, "nzcv") + read_state(SCRATCH, 17)
    state += store(SP, OFFSETS["flags"], SCRATCH, WORD)
    return move_stack_pointer(-room) + store_all(SP, _PLACES) + state


def complete(set_ip: bytes, room: int = SIZE) -> bytes:
    """Return code that fills in the fields sp and ip of a struct that save_general() has made.

    `set_ip`: code that loads ip into SCRATCH, which is overwritten. `room`: distance in bytes from the struct
    to the probed code's sp.
    """
    code = set_ip + store(SP, OFFSETS["ip"], SCRATCH, WORD)
    return code + add_immediate(SCRATCH, SP, room) + store(SP, OFFSETS["sp"], SCRATCH, WORD)


def load_general(*but: int) -> bytes:
    """Return code that restores the condition flags, and x0 to x30 except `but`, from the struct at sp."""
    places = {number: at for number, at in _PLACES.items() if number not in but}
    flags = load(SCRATCH, SP, OFFSETS["flags"], WORD) + write_flags(SCRATCH)
    return flags + load_all(SP, places)
