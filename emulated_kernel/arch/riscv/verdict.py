"""Will a kprobe register here, and will it be optimized by way of which registers? On RISC-V.

Source of the rules of optimization: "Add OPTPROBES feature on RISCV", v6, 2023.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache, lru_cache
from itertools import pairwise

from emulated_kernel.arch.analysis.disassembly import Disassembler
from emulated_kernel.arch.analysis.function import Function, reserved_range
from emulated_kernel.arch.analysis.reason import Finding, Reason
from emulated_kernel.arch.analysis.region import Live, Region, ScratchRegisters
from emulated_kernel.arch.analysis.tables import ProbedTables
from emulated_kernel.arch.riscv.analysis import ALL_LIVE, RiscvFunctionAnalysis
from emulated_kernel.arch.riscv.assemble import JUMP_SIZE, LONG_JUMP_SIZE
from emulated_kernel.arch.riscv.insn import (
    A0,
    A7,
    ALL_REGISTERS,
    RA,
    REGISTER_NAMES,
    RVC_SIZE,
    RVI_SIZE,
    S0,
    S1,
    T0,
    T1,
    T2,
    T3,
    T6,
    Handling,
    RiscvOpcode,
    decode_insn,
)
from emulated_kernel.arch.verdict import Strategy, Verdict
from emulated_kernel.image.kallsyms import Symbol

_PREFERENCE = (T1, T2, *range(T3, T6 + 1), T0, *range(A7, A0 - 1, -1), RA, *range(18, T3), S1, S0)


def detoured_region(analysis: RiscvFunctionAnalysis, addr: int) -> Region | Finding:
    """What the jump of a probe at `addr` replaces, or why it stays an ebreak.

    Deviates: a function with an indirect jump is left alone, as x86 does; so are fentry sites and labels.
    Mirrors: opt.c:can_optimize, arch_prepare_optimized_kprobe (optprobes v6, 2023).
    """
    length = copied_length(analysis, addr)
    if isinstance(length, Finding):
        return length
    function = analysis.function
    if function.end - addr <= length:
        return Finding(Reason.NO_ROOM, addr)
    jump = analysis.jump_into(range(addr + RVC_SIZE, addr + length))
    if jump is not None:
        return Finding(Reason.JUMP_INTO_RANGE, jump)
    if analysis.hazard is not None:
        return analysis.hazard
    reserved = reserved_range(function, addr, addr + length - 1)
    registers = reserved or _free_registers(analysis, addr, length)
    if isinstance(registers, Finding):
        return registers
    at = addr - function.addr
    return Region(addr, function.code[at : at + length], registers)


def copied_length(analysis: RiscvFunctionAnalysis, addr: int) -> int | Finding:
    """Bytes of whole instructions that make room for the jump. Mirrors: opt.c:search_copied_insn."""
    if addr not in analysis.insns:
        return Finding(Reason.NOT_A_BOUNDARY, addr)
    obstacle = analysis.obstacles[addr]
    if obstacle is not None and obstacle.addr < addr + LONG_JUMP_SIZE:
        return obstacle
    for length in (LONG_JUMP_SIZE, LONG_JUMP_SIZE + RVC_SIZE):
        if addr + length in analysis.insns or addr + length == analysis.end:
            return length
    return Finding(Reason.NO_ROOM, addr)


def _free_registers(analysis: RiscvFunctionAnalysis, addr: int, length: int) -> ScratchRegisters | Finding:
    """One that is free at both ends if there is one. Mirrors: opt.c:find_free_registers."""
    before = ALL_REGISTERS & ~analysis.live_mask(addr)
    behind = ALL_REGISTERS & ~analysis.live_mask(addr + length)
    both = _preferred(before & behind)
    entry, back = both or _preferred(before), both or _preferred(behind)
    if not entry:
        return Finding(Reason.NO_FREE_REGISTER, addr)
    if not back:
        return Finding(Reason.NO_FREE_REGISTER_BEHIND, addr + length)
    return _scratch(entry, back)


@cache
def _scratch(entry: int, back: int) -> ScratchRegisters:
    return ScratchRegisters(REGISTER_NAMES[entry], REGISTER_NAMES[back])


@lru_cache(4096)
def _preferred(mask: int) -> int:
    return next((number for number in _PREFERENCE if mask >> number & 1), 0)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("optprobe-riscv", detoured_region, lambda region: range(region.addr + 1, region.end)),
    )
}
"""By the name in profiles."""


class RiscvVerdict(Verdict[RiscvFunctionAnalysis]):
    """Of an image with compressed instructions, or without."""

    all_live = ALL_LIVE
    fentry_size = LONG_JUMP_SIZE
    max_insn_size = RVI_SIZE
    bits = 64

    def __init__(
        self,
        image: ProbedTables,
        strategy: Strategy[RiscvFunctionAnalysis] | None,
        disassembler: Disassembler,
        *,
        compressed: bool,
        ftrace: bool,
    ) -> None:
        self._compressed = compressed
        super().__init__(image, strategy, disassembler, ftrace=ftrace)

    def analyse(self, function: Function) -> RiscvFunctionAnalysis:
        return RiscvFunctionAnalysis(function, compressed=self._compressed)

    def insns(self, analysis: RiscvFunctionAnalysis) -> Collection[int]:
        return analysis.insns

    def check_insn(self, analysis: RiscvFunctionAnalysis, addr: int) -> Finding | None:
        """Mirrors: arch/riscv/kernel/probes/kprobes.c:arch_prepare_kprobe (v6.1)."""
        insn = analysis.insns.get(addr)
        if insn is None:
            return Finding(Reason.NOT_A_BOUNDARY, addr)
        return Finding(Reason.NOT_COPYABLE, addr) if insn.handling is Handling.REJECTED else None

    def reasons(self, symbol: Symbol) -> Iterator[tuple[int, Reason | None]]:
        """Without an object for each answer where an instruction can't be moved, as in most places."""
        known = self._function(symbol)
        if self.strategy is None or self._has_forbidden(symbol):
            yield from super().reasons(symbol)
            return
        analysis, reserved, fentry = known.analysis, known.reserved, self.fentry
        for addr, insn in analysis.insns.items():
            if addr in reserved:
                yield addr, reserved[addr].reason
            elif addr in fentry:
                yield addr, Reason.FTRACE
            elif insn.handling is Handling.REJECTED:
                yield addr, Reason.NOT_COPYABLE
            else:
                found = copied_length(analysis, addr)
                outcome = found if isinstance(found, Finding) else self._detoured(known, addr)
                yield addr, outcome.reason if isinstance(outcome, Finding) else None

    def live_in(self, analysis: RiscvFunctionAnalysis, addr: int) -> Live:
        return analysis.at(addr)

    def pairs(self, symbol: Symbol) -> int:
        """How many instructions of a function the authors of the series would count as optimizable.

        Two movable ones stand there, whatever their length, with one register that is free at both ends of
        them; nothing jumps to the second one, and nothing in the function forbids it.
        """
        analysis = self._analysis(symbol.address)
        if analysis.hazard is not None:
            return 0
        ends = pairwise((*analysis.insns, analysis.end))
        next(ends, None)
        pairs = zip(pairwise(analysis.insns.items()), ends, strict=False)
        return sum(
            first.handling is second.handling is Handling.COPIED and _is_free(analysis, addr, end)
            for ((addr, first), (_, second)), (_, end) in pairs
        )

    def possible_branches(self, addr: int, code: bytes) -> Iterator[tuple[int, int]]:
        step = RVC_SIZE if self._compressed else RVI_SIZE
        for at in range(0, len(code), step):
            if not _may_branch(code[at], code[at + 1]):
                continue
            insn = decode_insn(code[at : at + RVI_SIZE].ljust(RVI_SIZE, b"\0"), compressed=True)
            if insn.relative_target is not None:
                yield addr + at + insn.relative_target, addr + at

    def label_size(self, code: bytes) -> int:  # noqa: ARG002 - all are as long
        return JUMP_SIZE


def _is_free(analysis: RiscvFunctionAnalysis, addr: int, end: int) -> bool:
    """Nothing jumps into these instructions, and a register is free at both ends."""
    if analysis.jump_into(range(addr + RVC_SIZE, end)) is not None:
        return False
    return analysis.live_mask(addr) | analysis.live_mask(end) != ALL_REGISTERS


def _may_branch(low: int, high: int) -> bool:
    """By the first two bytes, which nearly all others fail."""
    return low & 0x7F in _BRANCHES or (low & 3 == 1 and high >> 5 in _COMPRESSED)


_BRANCHES = (RiscvOpcode.BRANCH, RiscvOpcode.JAL)
_COMPRESSED = (5, 6, 7)
"""The highest bits of c.j, c.beqz and c.bnez."""
