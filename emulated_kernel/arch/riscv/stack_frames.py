"""Effects of RISC-V instructions on a stack frame, for unwinding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from emulated_kernel.arch.analysis.stack_frames import (
    CFA,
    IP,
    Effect,
    Flow,
    Frame,
    FrameInsn,
    add_to_register,
    copy_low_half,
    forget_registers,
    load_word,
    store_register,
    unchanged,
)
from emulated_kernel.arch.riscv.insn import (
    REGISTER_NAMES,
    SP,
    T0,
    ZERO,
    RiscvInsn,
    RiscvOpcode,
    decode_all,
    sign_extend,
)

EXCEPTION_PC = "sepc"
_SEPC = 0x141
_WORD = 8
_DOUBLE = 3
"""Value of the field funct3 in ld and sd."""
_SRET = 0x10200073
_SCRATCH = (EXCEPTION_PC, "ra", *(f"t{n}" for n in range(7)), *(f"a{n}" for n in range(8)))
"""Registers that a called function may change."""


def frame_insns(
    code: bytes, addr: int, *, compressed: bool, switches_stack: bool
) -> Iterator[tuple[int, FrameInsn]]:
    """Yield each instruction of a function: address, and effect on the stack frame.

    `switches_stack`: the function loads sp from memory, and returns on a stack that an earlier call of the
    function has left. `compressed`: the kernel uses RVC.
    """
    upper: tuple[int, int] | None = None
    for at, insn in decode_all(code, addr, compressed=compressed):
        yield at, _read(insn, at, upper, switches_stack)
        upper = (insn.rd, at + insn.upper_immediate) if insn.opcode == RiscvOpcode.AUIPC else None


def _read(insn: RiscvInsn, at: int, upper: tuple[int, int] | None, switches_stack: bool) -> FrameInsn:
    length = insn.length
    if insn.opcode == RiscvOpcode.JALR and insn.rd == insn.rs1 == T0:
        # A handler's code calls a routine (ir.CallPerCpu), which keeps all other registers.
        return FrameInsn(length, forget_registers([REGISTER_NAMES[T0]]), Flow.CALL)
    if insn.is_call:
        return FrameInsn(length, forget_registers(_SCRATCH), Flow.CALL)
    if insn.opcode == RiscvOpcode.JAL:
        return FrameInsn(length, unchanged, Flow.JUMP, at + insn.jump_offset)
    if insn.opcode == RiscvOpcode.BRANCH:
        return FrameInsn(length, unchanged, Flow.BRANCH, at + insn.branch_offset)
    if insn.is_return or insn.word == _SRET:
        return FrameInsn(length, unchanged, Flow.RETURN)
    if insn.is_indirect_jump:
        if upper is not None and upper[0] == insn.rs1:
            return FrameInsn(length, unchanged, Flow.JUMP, upper[1] + insn.immediate)
        return FrameInsn(length, unchanged, Flow.INDIRECT)
    return FrameInsn(length, _effect(insn, switches_stack))


def _effect(insn: RiscvInsn, switches_stack: bool) -> Effect:
    rd, rs1, rs2 = (REGISTER_NAMES[number] for number in (insn.rd, insn.rs1, insn.rs2))
    if insn.opcode == RiscvOpcode.OP_IMM and not insn.funct3 and ZERO not in (insn.rd, insn.rs1):
        return add_to_register(rd, rs1, insn.immediate)
    if insn.opcode == RiscvOpcode.OP and insn.word >> 25 == 0 and not insn.funct3 and insn.rs1 == ZERO:
        return add_to_register(rd, rs2)  # c.mv
    if (
        insn.opcode == RiscvOpcode.OP_IMM_32
        and not insn.funct3 | insn.immediate
        and ZERO not in (insn.rd, insn.rs1)
    ):
        return copy_low_half(rd, rs1)  # sext.w
    if insn.opcode == RiscvOpcode.STORE:
        return store_register(rs2, rs1, _store_offset(insn), 1 << (insn.funct3 & 3), _WORD)
    if insn.opcode == RiscvOpcode.LOAD and insn.funct3 == _DOUBLE:
        if insn.rd == SP and insn.rs1 != SP and switches_stack:
            return unchanged
        return load_word(rd, rs1, insn.immediate)
    if insn.opcode == RiscvOpcode.SYSTEM and insn.word >> 20 == _SEPC:
        return partial(_exception_pc, rd if insn.rd else None, rs1 if insn.rs1 else None)
    writes = insn.writes
    return forget_registers([name for number, name in enumerate(REGISTER_NAMES) if writes >> number & 1])


def _store_offset(insn: RiscvInsn) -> int:
    return sign_extend(insn.word >> 25 << 5 | insn.rd, 12)


def _exception_pc(to: str | None, source: str | None, frame: Frame) -> None:
    """Change `frame` by the effect of an instruction that reads or writes sepc.

    `to`: register that receives the old value of sepc; None if sepc is not read. `source`: register whose
    value is written to sepc; None if sepc is not written.
    """
    was = frame.regs.get(EXCEPTION_PC)
    if source is not None:
        frame.set(EXCEPTION_PC, frame.regs.get(source))
    if to is not None:
        frame.set(to, was)


def entry_frame(*, by_interrupt: bool) -> Frame:
    """Return the stack frame at a function's entry.

    `by_interrupt`: the function is the handler of an interrupt, so sepc holds the interrupted ip, and ra is
    no return address. Otherwise ra holds the return address.
    """
    regs = {name: (name, 0) for name in REGISTER_NAMES[1:]}
    regs |= {"sp": (CFA, 0), EXCEPTION_PC if by_interrupt else "ra": (IP, 0)}
    return Frame(regs, {})
