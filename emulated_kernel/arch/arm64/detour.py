"""Guest code of a detour on arm64: it saves a struct user_pt_regs around the handler, and jumps back.

Linux has no jump optimization on arm64.
"""

from __future__ import annotations

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.arch_hooks import OriginalPlace
from emulated_kernel.arch.arm64.encoder import (
    SP,
    WORD,
    RegisterOp,
    add_immediate,
    branch,
    compute,
    load,
    load_all,
    move_stack_pointer,
    read_system_register,
    set_register,
    store,
    store_all,
    write_flags,
)
from emulated_kernel.arch.arm64.insn import LINK, SIZE
from emulated_kernel.arch.arm64.relocate import MAX_RELOCATED, Relocation, relocate, relocation_of

MAX_COPIED = MAX_RELOCATED + SIZE
MAX_DETOUR = 288
_GENERAL = {number: WORD * number for number in range(LINK + 1)}
"""Number of a register -> its offset in struct user_pt_regs."""
_SP = WORD * (LINK + 1)
_IP = _SP + WORD
_FLAGS = _IP + WORD
_FRAME = _FLAGS + WORD
"""Size in bytes of struct user_pt_regs; a multiple of the stack alignment."""
_KERNEL_MODE = 5
"""The field of the processor state that means: kernel mode, on the kernel's stack."""
_VALUE = 9
_OTHER = 10
"""Numbers of registers that the code changes after it has saved them."""


def around_handler(region: Region) -> tuple[bytes, bytes]:
    """Implement Arch.around_handler: save a struct user_pt_regs on the stack, and restore it.

    The code restores the condition flags from the saved processor state, and no other bit of it.
    """
    save = move_stack_pointer(-_FRAME) + store_all(SP, _GENERAL)
    save += add_immediate(_VALUE, SP, _FRAME) + store(SP, _SP, _VALUE, WORD)
    save += set_register(_VALUE, region.addr) + store(SP, _IP, _VALUE, WORD)
    save += read_system_register(_VALUE, "daif") + read_system_register(_OTHER, "nzcv")
    save += compute(RegisterOp.ORR, _VALUE, _VALUE, _OTHER) + set_register(_OTHER, _KERNEL_MODE)
    save += compute(RegisterOp.ORR, _VALUE, _VALUE, _OTHER) + store(SP, _FLAGS, _VALUE, WORD)
    restore = load(_VALUE, SP, _FLAGS, WORD) + write_flags(_VALUE)
    return save, restore + load_all(SP, _GENERAL) + move_stack_pointer(_FRAME)


def _word(region: Region) -> int:
    return int.from_bytes(region.code, "little")


def relocated(region: Region, to: int) -> bytes:
    """Implement Arch.relocated: relocate the instruction, and append a jump back."""
    code = relocate(_word(region), region.addr, to)
    return code + branch(to + len(code), region.end)


def original_place(region: Region, copied: int, address: int) -> OriginalPlace:
    """Implement Arch.original_place: map an address in the relocated instruction to the original one.

    No relocated instruction pushes, so `pushed` of the result is 0.
    """
    word = _word(region)
    jump_back = copied + len(relocate(word, region.addr, copied))
    if address >= jump_back:
        return OriginalPlace(region.end)
    is_last = address == jump_back - SIZE
    return OriginalPlace(region.addr, is_calling=is_last and relocation_of(word) is Relocation.CALL)
