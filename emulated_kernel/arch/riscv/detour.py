"""Guest code around a probe's handler on RISC-V: detour buffers, ftrace trampoline, return trampoline.

Each piece of code saves a struct pt_regs on the stack of the probed code, and hits a breakpoint that calls
the handler. After that, it loads the registers from the struct pt_regs, which the handler may have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from emulated_kernel.arch.analysis.detour_region import Region, ScratchRegisters
from emulated_kernel.arch.arch_hooks import HandlerStub, OriginalPlace, StubEnd
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
from emulated_kernel.arch.riscv.insn import (
    RA,
    REGISTER_NAMES,
    SP,
    T0,
    T1,
    ZERO,
    RiscvInsn,
    attributes_of_all,
    decode_all,
    decode_insn,
)
from emulated_kernel.arch.riscv.pt_regs import OFFSETS, SIZE, WORD, complete, load_general, save_general
from emulated_kernel.arch.riscv.relocate import LEAVES, RELOCATED_CALLS, relocate, relocation_of
from emulated_kernel.machine.interrupts.trap_handlers import LinkedJump

MAX_REGION = 10
"""Maximum size in bytes of a region (the instructions that a jump replaces).

Three instructions have 2 bytes, and the last one has 4.
"""
_MAX_GROWTH = 4 * 10
"""Upper limit for the number of bytes by which relocation makes a region's code longer.

Each of four 2-byte branches can become 12 bytes.
"""
MAX_COPIED = MAX_REGION + _MAX_GROWTH + LONG_JUMP_SIZE
MAX_DETOUR = 384
RETURN_ROOM = SIZE + 2 * WORD
"""Size in bytes of a return trampoline's stack frame: pt_regs and the return address, 16-byte aligned."""
_EVEN = (1 << 64) - 2
"""Mask of the bits of the target address that a jalr keeps: all except bit 0."""
_NUMBERS = {name: number for number, name in enumerate(REGISTER_NAMES)}


def detour_jump(region: Region, target: int) -> bytes:
    """Encode the code that replaces a region: a jump to `target` (auipc and jalr), padded with c.nop.

    The jump goes through the region's free register. Raises: KernelError ERANGE (farther than 2 GiB).
    Mirrors: opt.c:arch_optimize_kprobes (optprobes v6, 2023).
    """
    register = _NUMBERS[_scratch(region).entry]
    jump = long_jump(register, register, region.addr, target)
    return jump + C_NOP * ((region.length - len(jump)) // len(C_NOP))


def relocated(region: Region, to: int, *, compressed: bool) -> bytes:
    """Return the region's instructions, relocated to `to`, and a jump back (auipc and jalr); see Arch.

    `compressed`: the kernel uses RVC.
    Linux: the detour of optprobes v6 loads the address of the region's end from a word next to the code.
    Deviates: an auipc computes the address.
    """
    code = b"".join(code for _, _, code in _relocated_insns(region, to, compressed=compressed))
    return code + long_jump(ZERO, _NUMBERS[_scratch(region).exit], to + len(code), region.end)


def _relocated_insns(region: Region, to: int, *, compressed: bool) -> Iterator[tuple[int, RiscvInsn, bytes]]:
    """Yield (address, instruction, code of its copy) for each instruction of a region except padding.

    `to`: address of the first copy. `compressed`: the kernel uses RVC.
    """
    scratch = _NUMBERS[_scratch(region).exit]
    jump = partial(long_jump, ZERO, scratch)
    copied = region.code[: region.length - region.padding]
    for at, insn in decode_all(copied, region.addr, compressed=compressed):
        original = region.code[at - region.addr : at - region.addr + insn.length]
        code = relocate(insn, original, at, to, jump, partial(_linked_call, scratch))
        yield at, insn, code
        to += len(code)


def _linked_call(scratch: int, source: int, register: int, offset: int, following: int) -> bytes:
    """Encode a relocated jalr whose base register `register` also receives the return address.

    `source`: address at which the code will be placed. `offset`: offset of the target from the base.
    `following`: the return address. The code overwrites the register `scratch`.
    """
    target = addi(scratch, register, offset)
    return target + set_to_address(register, source + len(target), following) + jump_register(scratch)


def stub_end(region: Region, to: int, breakpoint_: bytes, *, compressed: bool) -> StubEnd:
    """Return the code that ends a stub (the compiled handlers of a breakpoint hit), for the address `to`.

    The code has the effect of the only instruction of `region`, and uses no free register. A breakpoint takes
    the place of each jump that would need one; see StubEnd.leads. `breakpoint_`: the breakpoint instruction.
    `compressed`: the kernel uses RVC.
    """
    insn, code, leads = _stub_insn(region, to, breakpoint_, compressed=compressed)
    if relocation_of(insn) not in (*LEAVES, *RELOCATED_CALLS):
        leads[to + len(code)] = region.end
        code += breakpoint_
    return StubEnd(code, leads)


def _stub_insn(
    region: Region, to: int, breakpoint_: bytes, *, compressed: bool
) -> tuple[RiscvInsn, bytes, dict[int, int | LinkedJump]]:
    """Return a region's only instruction, the code that replaces it at `to`, and a map of breakpoints.

    The code has no jump back. A breakpoint takes the place of each jump that would need a register. The map
    says where these breakpoints lead, as StubEnd.leads.
    """
    leads: dict[int, int | LinkedJump] = {}

    def jump(source: int, target: int) -> bytes:
        leads[source] = target
        return breakpoint_

    def linked_call(source: int, register: int, offset: int, following: int) -> bytes:
        name = REGISTER_NAMES[register]
        leads[source] = LinkedJump(name, offset, _EVEN, name, following)
        return breakpoint_

    insn = decode_insn(region.code, compressed=compressed)
    return insn, relocate(insn, region.code, region.addr, to, jump, linked_call), leads


def original_place(
    region: Region, copied: int, address: int, breakpoint_: bytes, *, compressed: bool
) -> OriginalPlace:
    """Map an address in the relocated instructions to the original instruction; see Arch.

    `copied`: address of the first relocated instruction. `breakpoint_`: as in stub_end(). No relocated RISC-V
    instruction pushes, so `pushed` of the result is 0.
    """
    at = copied
    insns: Iterable[tuple[int, RiscvInsn, bytes]]
    if region.scratch is None:
        insn, code, _ = _stub_insn(region, copied, breakpoint_, compressed=compressed)
        insns = ((region.addr, insn, code),)
    else:
        insns = _relocated_insns(region, copied, compressed=compressed)
    for original, insn, code in insns:
        if address < at + len(code):
            is_call = relocation_of(insn) in RELOCATED_CALLS and insn.rd == RA
            *before, last = attributes_of_all(code, at, compressed=True)
            return OriginalPlace(original, is_calling=is_call and bool(before) and address == last)
        at += len(code)
    return OriginalPlace(region.end)


def _scratch(region: Region) -> ScratchRegisters:
    assert region.scratch is not None, "there is no far jump without a register"
    return region.scratch


def around_handler(region: Region) -> tuple[bytes, bytes]:
    """Return code that saves the registers in a struct pt_regs on the stack, and code that restores them.

    The saved ip is the region's address. See Arch.

    Mirrors: opt_trampoline.S:optprobe_template_entry, opt.c:prepare_detour_buffer (optprobes v6, 2023).
    """
    save = save_general() + complete(set_register(T0, region.addr))
    return save, load_general() + move_stack_pointer(SIZE)


def ftrace_trampoline(breakpoint_: bytes) -> HandlerStub:
    """Return the trampoline that fentry sites call through t0; it continues at the saved ip and sp.

    `breakpoint_`: breakpoint instruction that calls the handler.
    Linux: fentry sites of v6.1 have 16 bytes and call through ra. Deviates: the sites have 8 bytes and call
    through t0, as in v6.3 and later.
    Mirrors: arch/riscv/kernel/mcount-dyn.S:ftrace_regs_caller (v6.3).
    """
    save = save_general() + complete(b"")
    restore = load_general(but=T0) + load(T0, SP, OFFSETS["ip"], WORD) + load(SP, SP, OFFSETS["sp"], WORD)
    return HandlerStub(save + breakpoint_ + restore + jump_register(T0), len(save))


def return_trampoline(breakpoint_: bytes) -> HandlerStub:
    """Return the return trampoline, to which hooked functions return. Its code is position-independent.

    `breakpoint_`: breakpoint instruction that calls the handler.
    Mirrors: arch/riscv/kernel/probes/kprobes_trampoline.S:__kretprobe_trampoline (v6.1).
    """
    save = save_general(RETURN_ROOM)
    save += complete(set_to_address(T0, len(save), 0), RETURN_ROOM)
    return HandlerStub(save + breakpoint_ + RETURN_FROM_FRAME, len(save))


RETURN_FROM_FRAME = (
    load_general(but=RA) + load(RA, SP, SIZE, WORD) + move_stack_pointer(RETURN_ROOM) + jump_register(RA)
)
"""End of a return trampoline: code that restores registers and jumps to the real return address."""


def repetition(at: int, entry: int, turns: int) -> bytes:
    """Return guest code, for the address `at`, with a loop that calls the code at `entry`.

    The number of calls is the u64 at address `turns`, which the loop counts down to 0; see Arch.
    """
    head = move_stack_pointer(-2 * WORD) + store(SP, 0, RA, WORD)
    turn = long_jump(RA, RA, at + len(head), entry) + set_register(T0, turns)
    turn += load(T1, T0, 0, WORD) + addi(T1, T1, -1) + store(T0, 0, T1, WORD)
    turn += branch(BranchFunct3.NE, T1, ZERO, -len(turn))
    return head + turn + load(RA, SP, 0, WORD) + move_stack_pointer(2 * WORD) + jump_register(RA)
