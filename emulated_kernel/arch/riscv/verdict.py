"""Will a probe be jump-optimized here, and by way of which registers?

Source: "Add OPTPROBES feature on RISCV", v6, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

from emulated_kernel.arch.reason import Finding, Reason
from emulated_kernel.arch.reserved import reserved_range
from emulated_kernel.arch.riscv.analysis import FunctionAnalysis
from emulated_kernel.arch.riscv.assemble import LONG_JUMP_SIZE
from emulated_kernel.arch.riscv.effects import ALL_REGISTERS
from emulated_kernel.arch.riscv.insn import A0, A7, RA, RVC_SIZE, S0, S1, T0, T1, T2, T3, T6
from emulated_kernel.arch.riscv.prepare import Handling, handling

_PREFERENCE = (T1, T2, *range(T3, T6 + 1), T0, *range(A7, A0 - 1, -1), RA, *range(18, T3), S1, S0)


@dataclass(frozen=True, slots=True)
class Optimizable:
    """What the jump replaces, and the numbers of the registers that it and the jump back overwrite."""

    length: int
    entry: int
    exit: int


def can_optimize(analysis: FunctionAnalysis, addr: int) -> Optimizable | Finding:
    """How a probe at `addr` is optimized, or why it stays an ebreak.

    Deviates: a function with an indirect jump is left alone, as x86 does; so are fentry sites and labels.
    Mirrors: opt.c:can_optimize, arch_prepare_optimized_kprobe (optprobes v6, 2023).
    """
    length = _copied_length(analysis, addr)
    if isinstance(length, Finding):
        return length
    function = analysis.function
    if function.end - addr <= length:
        return Finding(Reason.NO_ROOM, addr)
    jump = analysis.jump_into(range(addr + RVC_SIZE, addr + length))
    if jump is not None:
        return Finding(Reason.JUMP_INTO_RANGE, jump)
    reserved = reserved_range(function, addr, addr + length - 1, fentry_size=LONG_JUMP_SIZE)
    return analysis.hazard or reserved or _free_registers(analysis, addr, length)


def _copied_length(analysis: FunctionAnalysis, addr: int) -> int | Finding:
    """Bytes of whole instructions that make room for the jump. Mirrors: opt.c:search_copied_insn."""
    length = 0
    while length < LONG_JUMP_SIZE:
        at = addr + length
        insn = analysis.insns.get(at)
        if insn is None:
            return Finding(Reason.NO_ROOM if length else Reason.NOT_A_BOUNDARY, addr)
        if handling(insn) is not Handling.COPIED:
            return Finding(Reason.NOT_BOOSTABLE, at)
        length += insn.length
    return length


def _free_registers(analysis: FunctionAnalysis, addr: int, length: int) -> Optimizable | Finding:
    """One that is free at both ends if there is one. Mirrors: opt.c:find_free_registers."""
    before = ALL_REGISTERS & ~analysis.live_mask(addr)
    behind = ALL_REGISTERS & ~analysis.live_mask(addr + length)
    both = _preferred(before & behind)
    if both:
        return Optimizable(length, both, both)
    entry, back = _preferred(before), _preferred(behind)
    if not entry:
        return Finding(Reason.NO_FREE_REGISTER, addr)
    return (
        Optimizable(length, entry, back) if back else Finding(Reason.NO_FREE_REGISTER_BEHIND, addr + length)
    )


def _preferred(mask: int) -> int:
    return next((number for number in _PREFERENCE if mask >> number & 1), 0)
