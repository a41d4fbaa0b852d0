"""Guest code around a probe's handler: detour buffers, ftrace trampoline, return trampoline.

Each saves a struct pt_regs on the stack of the probed code, hits a breakpoint that calls the handler, and
restores the registers from the values that the handler left.
"""

from __future__ import annotations

from errno import EINVAL

from emulated_kernel.arch.analysis.detour_region import Region, ScratchRegisters
from emulated_kernel.arch.arch_hooks import HandlerStub
from emulated_kernel.arch.riscv.encoder import (
    C_NOP,
    LONG_JUMP_SIZE,
    BranchFunct3,
    addi,
    branch,
    jump_register,
    load,
    long_jump,
    move_stack_pointer,
    set_register,
    set_to_address,
    store,
)
from emulated_kernel.arch.riscv.insn import RA, REGISTER_NAMES, SP, T0, T1, ZERO, Handling, decode_all
from emulated_kernel.arch.riscv.pt_regs import OFFSETS, SIZE, WORD, complete, load_general, save_general
from emulated_kernel.util.errors import KernelError

MAX_REGION = 10
"""Maximum size in bytes of a region: three compressed instructions and one of 4 bytes."""
MAX_COPIED = MAX_REGION + LONG_JUMP_SIZE
MAX_DETOUR = 384
RETURN_ROOM = SIZE + 2 * WORD
"""Size in bytes of a return trampoline's stack frame: pt_regs and the return address, 16-byte aligned."""
_NUMBERS = {name: number for number, name in enumerate(REGISTER_NAMES)}


def detour_jump(region: Region, target: int) -> bytes:
    """Encode the replacement of a region: auipc and jalr through a free register, padded by a c.nop.

    Raises: KernelError ERANGE.
    Mirrors: opt.c:arch_optimize_kprobes (optprobes v6, 2023).
    """
    register = _NUMBERS[_scratch(region).entry]
    jump = long_jump(register, register, region.addr, target)
    return jump + C_NOP * ((region.length - len(jump)) // len(C_NOP))


def relocated(region: Region, to: int, *, compressed: bool) -> bytes:
    """Implement Arch.relocated.

    Linux: it loads the region's end address from a word beside the code. Deviates: an auipc reaches it.
    """
    insns = decode_all(region.code, region.addr, compressed=compressed)
    if any(insn.handling is not Handling.COPIED for _, insn in insns):
        raise KernelError(EINVAL, "an instruction that needs its address")
    back = long_jump(ZERO, _NUMBERS[_scratch(region).exit], to + region.length, region.end)
    return region.code + back


def _scratch(region: Region) -> ScratchRegisters:
    assert region.scratch is not None, "there is no far jump without a register"
    return region.scratch


def around_handler(region: Region) -> tuple[bytes, bytes]:
    """Implement Arch.around_handler.

    Mirrors: opt_trampoline.S:optprobe_template_entry, opt.c:prepare_detour_buffer (optprobes v6, 2023).
    """
    save = save_general() + complete(set_register(T0, region.addr))
    return save, load_general() + move_stack_pointer(SIZE)


def ftrace_trampoline(breakpoint_: bytes) -> HandlerStub:
    """Return the trampoline that fentry sites call through t0; it continues at the saved ip and sp.

    Linux: fentry sites of v6.1 have 16 bytes and call through ra. Deviates: 8 bytes and t0, as since v6.3.
    Mirrors: arch/riscv/kernel/mcount-dyn.S:ftrace_regs_caller (v6.3).
    """
    save = save_general() + complete(b"")
    restore = load_general(but=T0) + load(T0, SP, OFFSETS["ip"], WORD) + load(SP, SP, OFFSETS["sp"], WORD)
    return HandlerStub(save + breakpoint_ + restore + jump_register(T0), len(save))


def return_trampoline(breakpoint_: bytes) -> HandlerStub:
    """Return the return trampoline, which hooked functions return to. It is the same for every address.

    Mirrors: arch/riscv/kernel/probes/kprobes_trampoline.S:__kretprobe_trampoline (v6.1).
    """
    save = save_general(RETURN_ROOM)
    save += complete(set_to_address(T0, len(save), 0), RETURN_ROOM)
    return HandlerStub(save + breakpoint_ + RETURN_FROM_FRAME, len(save))


RETURN_FROM_FRAME = (
    load_general(but=RA) + load(RA, SP, SIZE, WORD) + move_stack_pointer(RETURN_ROOM) + jump_register(RA)
)
"""The end of a return trampoline: it restores the registers and returns to the real return address."""


def repetition(at: int, entry: int, turns: int) -> bytes:
    """Implement Arch.repetition: code that calls `entry` as often as the u64 at `turns` says."""
    head = move_stack_pointer(-2 * WORD) + store(SP, 0, RA, WORD)
    turn = long_jump(RA, RA, at + len(head), entry) + set_register(T0, turns)
    turn += load(T1, T0, 0, WORD) + addi(T1, T1, -1) + store(T0, 0, T1, WORD)
    turn += branch(BranchFunct3.NE, T1, ZERO, -len(turn))
    return head + turn + load(RA, SP, 0, WORD) + move_stack_pointer(2 * WORD) + jump_register(RA)
