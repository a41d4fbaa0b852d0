"""Guest code of a detour on arm64: it saves a struct user_pt_regs around the handler, and jumps back.

Linux has no jump optimization on arm64.
"""

from __future__ import annotations

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.arch_hooks import OriginalPlace, StubEnd
from emulated_kernel.arch.arm64 import pt_regs
from emulated_kernel.arch.arm64.encoder import (
    BRK,
    SP,
    WORD,
    add_immediate,
    branch,
    branch_if_zero,
    load,
    move_stack_pointer,
    return_to,
    set_register,
    store,
)
from emulated_kernel.arch.arm64.insn import LINK, REGISTER_NAMES, SIZE, called_register
from emulated_kernel.arch.arm64.relocate import MAX_RELOCATED, Relocation, relocate, relocation_of
from emulated_kernel.machine.interrupts.trap_handlers import LinkedJump

MAX_COPIED = MAX_RELOCATED + SIZE
MAX_DETOUR = 256
MAX_REPETITION = 64
_LINK_ROOM = 16
"""Size in bytes of the stack memory in which the loop of repetition() saves x30."""
_COUNT = 17
"""Number of the register in which the loop of repetition() counts down the calls."""


def around_handler(region: Region) -> tuple[bytes, bytes]:
    """Return code that saves a struct user_pt_regs on the stack, and code that restores registers; see Arch.

    The second code restores the condition flags from the saved processor state, and no other bit of this
    state.
    """
    save = pt_regs.save_general() + pt_regs.complete(set_register(pt_regs.SCRATCH, region.addr))
    return save, pt_regs.load_general() + move_stack_pointer(pt_regs.SIZE)


def repetition(at: int, entry: int, turns: int) -> bytes:
    """Return code at `at` that calls `entry` repeatedly; see Arch.

    The u64 at `turns` is the number of calls, which the code counts down to 0.
    """
    place = pt_regs.SCRATCH
    head = move_stack_pointer(-_LINK_ROOM) + store(SP, 0, LINK, WORD)
    turn = branch(at + len(head), entry, links=True) + set_register(place, turns)
    turn += load(_COUNT, place, 0, WORD) + add_immediate(_COUNT, _COUNT, -1) + store(place, 0, _COUNT, WORD)
    turn += branch_if_zero(_COUNT, -len(turn), inverted=True)
    return head + turn + load(LINK, SP, 0, WORD) + move_stack_pointer(_LINK_ROOM) + return_to(LINK)


def _word(region: Region) -> int:
    return int.from_bytes(region.code, "little")


def relocated(region: Region, to: int) -> bytes:
    """Return the region's only instruction, relocated to `to`, and a jump back; see Arch."""
    code = relocate(_word(region), region.addr, to)
    return code + branch(to + len(code), region.end)


def stub_end(region: Region, to: int) -> StubEnd:
    """Return the end of a stub (a compiled handler that a breakpoint leads to), placed at `to`; see Arch.

    The end is what relocated() returns, except for a blr: then it is a breakpoint, from which the guest
    continues in the called function. A br in the end could not replace the blr: with branch target
    identification, a br cannot reach landing pads that allow only calls.
    """
    register = called_register(_word(region))
    if register is None:
        return StubEnd(relocated(region, to))
    jump = LinkedJump(REGISTER_NAMES[register], 0, (1 << 64) - 1, REGISTER_NAMES[LINK], region.end)
    return StubEnd(BRK, {to: jump})


def original_place(region: Region, copied: int, address: int) -> OriginalPlace:
    """Map an address in the relocated instruction to the original instruction; see Arch.

    `copied`: address of the relocated instruction. No relocated instruction pushes, so `pushed` of the result
    is 0.
    """
    word = _word(region)
    if called_register(word) is not None:
        return OriginalPlace(region.addr)
    jump_back = copied + len(relocate(word, region.addr, copied))
    if address >= jump_back:
        return OriginalPlace(region.end)
    is_last = address == jump_back - SIZE
    return OriginalPlace(region.addr, is_calling=is_last and relocation_of(word) is Relocation.CALL)
