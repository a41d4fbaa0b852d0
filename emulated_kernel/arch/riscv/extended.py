"""The optimization policy `extended` on RISC-V: jumps where optprobes refuses them, with relocated branches.

A branch or call in a detour reaches its target by auipc and jalr, through a register that is free at the
target. A relocated call loads the original return address into ra, so that no stack or register holds an
address in the detour.
Indirect jumps remain hazards: gcc's jump tables contain 32-bit offsets, so a search for pointers does not
find their targets.
"""

from __future__ import annotations

from emulated_kernel.arch.analysis.detour_region import Region, ScratchRegisters
from emulated_kernel.arch.analysis.function import reserved_range
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.analysis.tactic import Tactic
from emulated_kernel.arch.riscv.analysis import RiscvFunctionAnalysis
from emulated_kernel.arch.riscv.encoder import C_NOP, LONG_JUMP_SIZE, NOP
from emulated_kernel.arch.riscv.insn import (
    ALL_REGISTERS,
    RA,
    REGISTER_NAMES,
    RVC_SIZE,
    RVI_SIZE,
    T0,
    RiscvInsn,
    RiscvOpcode,
)
from emulated_kernel.arch.riscv.register_preference import preferred_register
from emulated_kernel.arch.riscv.relocate import LEAVES, RELOCATED_CALLS, Relocation, relocation_of

_NO_REGISTER = RejectReason.NO_FREE_REGISTER_AFTER
_COPIES = frozenset((Relocation.COPY, Relocation.BEYOND_TABLE))


class _Replaced:
    """The instructions that a jump replaces, and what is known so far about their relocation."""

    def __init__(self) -> None:
        self.relocations: list[Relocation] = []
        self.free = ALL_REGISTERS
        """Mask of the registers that are free at the targets of all long jumps of the detour."""
        self.end = 0
        """Address after the last instruction that is copied."""

    @property
    def leaves(self) -> bool:
        """Whether the last copied instruction always leaves the detour. Then no jump back is needed."""
        return self.relocations[-1] in (*LEAVES, *RELOCATED_CALLS)


def region(analysis: RiscvFunctionAnalysis, addr: int) -> Region | Rejection:
    """Return the region (instructions) that a jump at `addr` would replace, or the rejection of the jump.

    The rules are those of the optimization policy `extended`.
    """
    for reason in (RejectReason.UNDECODABLE, RejectReason.INDIRECT_JUMP):
        if reason in analysis.hazards:
            return Rejection(reason, analysis.hazards[reason])
    replaced = _instructions(analysis, addr)
    if isinstance(replaced, Rejection):
        return replaced
    function = analysis.function
    end = max(replaced.end, addr + LONG_JUMP_SIZE)
    jump = analysis.jump_into(range(addr + 1, end))
    if jump is not None:
        return Rejection(RejectReason.JUMP_INTO_RANGE, jump)
    end = replaced.end
    while end < addr + LONG_JUMP_SIZE:
        size = _padding(analysis, end)
        if not size:
            return Rejection(RejectReason.CODE_AFTER_JUMP, end)
        end += size
    if end > function.end or (end == function.end and not replaced.leaves):
        return Rejection(RejectReason.REGION_TOO_SHORT, addr)
    reserved = reserved_range(function, addr, end - 1)
    scratch = reserved or _scratch(analysis, addr, replaced)
    if isinstance(scratch, Rejection):
        return scratch
    code = function.code[addr - function.addr : end - function.addr]
    tactics = {
        Tactic.RELOCATED_BRANCH: not _COPIES.issuperset(replaced.relocations),
        Tactic.EXACT_TABLES: RejectReason.EXCEPTION_TABLE in analysis.hazards,
        Tactic.PADDING: end > replaced.end,
        Tactic.OPCODE: Relocation.BEYOND_TABLE in replaced.relocations,
    }
    needed = tuple(tactic for tactic, is_needed in tactics.items() if is_needed)
    return Region(addr, code, scratch, padding=end - replaced.end, tactics=needed)


def _instructions(analysis: RiscvFunctionAnalysis, addr: int) -> _Replaced | Rejection:
    """Return the instructions that a jump at `addr` would replace, or the rejection of the jump."""
    found = _Replaced()
    at = addr
    while at < addr + LONG_JUMP_SIZE:
        facts = analysis.insns.get(at)
        if facts is None:
            reason = RejectReason.REGION_TOO_SHORT if at >= analysis.end else RejectReason.NOT_A_BOUNDARY
            return Rejection(reason, at)
        if at in analysis.function.exception_entries:
            return Rejection(RejectReason.EXCEPTION_ENTRY, at)
        insn = analysis.insn_at(at)
        kind = relocation_of(insn)
        if kind is Relocation.REFUSED or (kind in RELOCATED_CALLS and insn.rd != RA):
            return Rejection(RejectReason.NOT_BOOSTABLE, at)
        following = at + insn.length
        if kind in RELOCATED_CALLS and following < addr + LONG_JUMP_SIZE:
            return Rejection(RejectReason.CALL_BEFORE_END, at)
        refused = _leads_on(analysis, addr, at, insn, kind, found)
        if refused is not None:
            return refused
        found.relocations.append(kind)
        at = following
        if kind in LEAVES:
            break
    found.end = at
    return found


def _leads_on(
    analysis: RiscvFunctionAnalysis, addr: int, at: int, insn: RiscvInsn, kind: Relocation, found: _Replaced
) -> Rejection | None:
    """Restrict `found.free` to the registers that are free at the target of a relocated jump, call or branch.

    `insn`: the instruction at `at`. `kind`: how it is relocated. Return a rejection if the jump leads to the
    probed instruction at `addr`; otherwise None.
    """
    target: int | None
    if kind in (Relocation.BRANCH, Relocation.JUMP):
        target = at + (insn.relative_target or 0)
        if target == addr:
            return Rejection(RejectReason.JUMP_TO_START, at)
        found.free &= _free_at(analysis, target)
    elif kind is Relocation.CALL:
        found.free &= _free_at_entry(analysis, at + (insn.relative_target or 0))
    elif kind is Relocation.REGISTER_CALL and insn.rs1 == insn.rd:
        # The base is overwritten by the return address, so that the target needs another register.
        target = _pair_target(analysis, at, insn)
        found.free &= 0 if target is None else _free_at_entry(analysis, target)
    return None


def _pair_target(analysis: RiscvFunctionAnalysis, at: int, insn: RiscvInsn) -> int | None:
    """Return the target of the jalr `insn` at `at`, or None if it is unknown.

    The target is known if an auipc directly before the jalr sets the base register, and no jump of the
    function leads to the jalr.
    """
    before = at - RVI_SIZE
    facts = analysis.insns.get(before)
    if facts is None or facts.opcode != RiscvOpcode.AUIPC or facts.rd != insn.rs1:
        return None
    if analysis.jump_into(range(at, at + 1)) is not None:
        return None
    return before + analysis.insn_at(before).upper_immediate + insn.immediate


def _free_at(analysis: RiscvFunctionAnalysis, target: int) -> int:
    """Return the mask of the registers that are free at the target of a jump."""
    if target in analysis.insns:
        return ALL_REGISTERS & ~analysis.live_mask(target)
    return _free_at_entry(analysis, target)


def _free_at_entry(analysis: RiscvFunctionAnalysis, target: int) -> int:
    """Return a mask of the registers that are known to be free at the function entry `target`.

    The mask contains only t0 if the entry is an fentry site, which overwrites t0 while its function is
    traced. The mask is 0 if the entry is no fentry site.
    """
    return 1 << T0 if target in analysis.fentry else 0


def _scratch(analysis: RiscvFunctionAnalysis, addr: int, replaced: _Replaced) -> ScratchRegisters | Rejection:
    """Return free registers for the jump to the detour and for the long jumps in it, or a rejection.

    `replaced`: the instructions from `addr` on that the jump replaces.
    """
    before = ALL_REGISTERS & ~analysis.live_mask(addr)
    after = replaced.free
    if not replaced.leaves:
        after &= ALL_REGISTERS & ~analysis.live_mask(replaced.end)
    if not before:
        return Rejection(RejectReason.NO_FREE_REGISTER, addr)
    if not after:
        return Rejection(_NO_REGISTER, replaced.end)
    both = before & after
    entry = preferred_register(both or before)
    return ScratchRegisters(REGISTER_NAMES[entry], REGISTER_NAMES[preferred_register(both or after)])


def _padding(analysis: RiscvFunctionAnalysis, at: int) -> int:
    """Return the size in bytes of the nop or the zero halfword at `at`; 0 if neither is there."""
    start = at - analysis.function.addr
    code = analysis.function.code[start : start + RVI_SIZE]
    if code == NOP:
        return len(NOP)
    return RVC_SIZE if code[:RVC_SIZE] in (C_NOP, bytes(RVC_SIZE)) else 0
