"""Guest code around a probe's handler: detour buffers, ftrace's trampoline, the return trampoline.

They save a struct pt_regs on the stack of the probed code, meet a breakpoint where the handler is reached,
and restore the registers from what the handler left.
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
"""Bytes that the jump may replace: three compressed instructions and half of the fourth."""
MAX_COPIED = MAX_REGION + LONG_JUMP_SIZE
MAX_DETOUR = 384
RETURN_ROOM = SIZE + 2 * WORD
"""Bytes of stack that a return trampoline takes: pt_regs and the return address, 16-byte aligned."""
_NUMBERS = {name: number for number, name in enumerate(REGISTER_NAMES)}


def detour_jump(region: Region, target: int) -> bytes:
    """What replaces a region: auipc and jalr on a free register, filled up by a c.nop.

    Raises: KernelError ERANGE. Mirrors: opt.c:arch_optimize_kprobes (optprobes v6, 2023).
    """
    register = _NUMBERS[_scratch(region).entry]
    jump = long_jump(register, register, region.addr, target)
    return jump + C_NOP * ((region.length - len(jump)) // len(C_NOP))


def relocated(region: Region, to: int, *, compressed: bool) -> bytes:
    """See Arch.relocated.

    Linux: the address behind the region is loaded from beside the code. Deviates: auipc alone reaches it.
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
    """See Arch.around_handler.

    Mirrors: opt_trampoline.S:optprobe_template_entry, opt.c:prepare_detour_buffer (optprobes v6, 2023).
    """
    save = save_general() + complete(set_register(T0, region.addr))
    return save, load_general() + move_stack_pointer(SIZE)


def ftrace_trampoline(breakpoint_: bytes) -> HandlerStub:
    """What an fentry site calls by t0; it goes on at the saved ip and sp.

    Linux: v6.1's sites have 16 bytes and call by ra. Deviates: 8 bytes and t0, as from v6.3 on.
    Mirrors: arch/riscv/kernel/mcount-dyn.S:ftrace_regs_caller (v6.3).
    """
    save = save_general() + complete(b"")
    restore = load_general(but=T0) + load(T0, SP, OFFSETS["ip"], WORD) + load(SP, SP, OFFSETS["sp"], WORD)
    return HandlerStub(save + breakpoint_ + restore + jump_register(T0), len(save))


def return_trampoline(breakpoint_: bytes) -> HandlerStub:
    """What hooked functions return to; as long wherever it is.

    Mirrors: arch/riscv/kernel/probes/kprobes_trampoline.S:__kretprobe_trampoline (v6.1).
    """
    save = save_general(RETURN_ROOM)
    save += complete(set_to_address(T0, len(save), 0), RETURN_ROOM)
    return HandlerStub(save + breakpoint_ + RETURN_FROM_FRAME, len(save))


RETURN_FROM_FRAME = (
    load_general(but=RA) + load(RA, SP, SIZE, WORD) + move_stack_pointer(RETURN_ROOM) + jump_register(RA)
)
"""What a return trampoline ends with."""


def repetition(at: int, entry: int, turns: int) -> bytes:
    """Code at `at` that calls `entry` as often as the u64 cell at `turns` says; see Arch.repetition."""
    head = move_stack_pointer(-2 * WORD) + store(SP, 0, RA, WORD)
    turn = long_jump(RA, RA, at + len(head), entry) + set_register(T0, turns)
    turn += load(T1, T0, 0, WORD) + addi(T1, T1, -1) + store(T0, 0, T1, WORD)
    turn += branch(BranchFunct3.NE, T1, ZERO, -len(turn))
    return head + turn + load(RA, SP, 0, WORD) + move_stack_pointer(2 * WORD) + jump_register(RA)
