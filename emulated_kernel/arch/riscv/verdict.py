"""Will a kprobe register here, and will it be optimized by way of which registers? On RISC-V.

Source of the rules of optimization: "Add OPTPROBES feature on RISCV", v6, 2023.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cache, lru_cache

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

    def reasons(self, symbol: Symbol) -> dict[int, Reason | None]:
        """In one look backwards over the function, and without an object for each answer.

        As detoured() says it, which is asked where somebody else patches or jumps to what would be replaced.
        """
        known = self._function(symbol)
        if self.strategy is not STRATEGIES["optprobe-riscv"] or self._has_forbidden(symbol):
            return super().reasons(symbol)
        analysis, reserved, fentry, function = known.analysis, known.reserved, self.fentry, known.function
        insns, end = analysis.insns, analysis.end
        hazard = None if analysis.hazard is None else analysis.hazard.reason
        live = None if hazard or analysis.has_idle_register else analysis.live
        never = obstacle = entered = foreign = function.end + LONG_JUMP_SIZE + RVI_SIZE
        targets = [0, *sorted(analysis.jump_targets)]
        ways = [0, *sorted(self._entrances.targets(range(function.addr, function.end)))]
        below, below_ways = targets.pop(), ways.pop()
        patched: set[int] = set()
        for site in (*function.fentry_sites, *function.jump_labels, *function.static_calls):
            patched.update(range(site.addr - LONG_JUMP_SIZE - RVC_SIZE + 1, site.addr + site.size))
        found: list[Reason | None] = []
        # Looking into an enum takes longer than all else that is done for an instruction.
        copied, rejected = Handling.COPIED, Handling.REJECTED
        for addr, insn in reversed(insns.items()):
            handling = insn.handling
            if handling is not copied:
                obstacle = addr
            while below > addr + 1:
                entered, below = below, targets.pop()
            while below_ways > addr:
                foreign, below_ways = below_ways, ways.pop()
            if addr in reserved:
                found.append(reserved[addr].reason)
                continue
            if addr in fentry:
                found.append(Reason.FTRACE)
                continue
            if handling is rejected:
                found.append(Reason.NOT_COPYABLE)
                continue
            behind = addr + LONG_JUMP_SIZE
            if obstacle < behind:
                found.append(Reason.NOT_BOOSTABLE)
                continue
            if behind not in insns and behind != end:
                behind += RVC_SIZE
                if behind not in insns and behind != end:
                    behind = never
            if behind >= function.end:
                found.append(Reason.NO_ROOM)
            elif entered < behind:
                found.append(Reason.JUMP_INTO_RANGE)
            elif hazard:
                found.append(hazard)
            elif foreign < behind or addr in patched:
                outcome = self._detoured(known, addr)
                found.append(outcome.reason if isinstance(outcome, Finding) else None)
            elif live is None:
                found.append(None)
            elif live[addr] == ALL_REGISTERS:
                found.append(Reason.NO_FREE_REGISTER)
            else:
                found.append(Reason.NO_FREE_REGISTER_BEHIND if live[behind] == ALL_REGISTERS else None)
        found.reverse()
        return dict(zip(insns, found, strict=True))

    def live_in(self, analysis: RiscvFunctionAnalysis, addr: int) -> Live:
        return analysis.at(addr)

    def register_text(self, addr: int) -> str:
        """Of the registers, which are all needed, the one that would be taken first."""
        analysis, register = self._analysis(addr), _PREFERENCE[0]
        at = analysis.first_need(addr, register)
        by = "" if at is None else f" by {at:#x}: {self.insn_text(at)}"
        return f"{REGISTER_NAMES[register]} may be needed{by}"

    def pairs(self, symbol: Symbol) -> int:
        """How many instructions of a function the authors of the series would count as optimizable.

        Two movable ones stand there, whatever their length, with one register that is free at both ends of
        them; nothing jumps to the second one, and nothing in the function forbids it.
        """
        analysis = self._analysis(symbol.address)
        if analysis.hazard is not None:
            return 0
        insns, jumps = analysis.insns, analysis.jump_targets
        function = range(analysis.function.addr, analysis.end)
        ends = [*insns, analysis.end]
        entered: Collection[int] = jumps
        if any(target in function and target not in insns for target in jumps):
            # The one that leads into an instruction leads into two pairs.
            entered = {
                second
                for first, second, end in zip(ends, ends[1:], ends[2:], strict=False)
                if not jumps.isdisjoint(range(first + RVC_SIZE, end))
            }
        if analysis.has_idle_register:
            masks = [0] * len(ends)
        else:
            masks = [*analysis.live.values(), analysis.live_mask(analysis.end)]
        copied = Handling.COPIED
        movable = [insn.handling is copied for insn in insns.values()]
        pairs = zip(movable, movable[1:], masks, masks[2:], ends[1:], strict=False)
        return sum(
            first and second and before | behind != ALL_REGISTERS and start not in entered
            for first, second, before, behind, start in pairs
        )

    def possible_branches(self, addr: int, code: bytes) -> Iterator[tuple[int, int]]:
        step = RVC_SIZE if self._compressed else RVI_SIZE
        for match in _BRANCH.finditer(code):
            at = match.start()
            if at % step:
                continue
            insn = decode_insn(code[at : at + RVI_SIZE].ljust(RVI_SIZE, b"\0"), compressed=True)
            if insn.relative_target is not None:
                yield addr + at + insn.relative_target, addr + at

    def label_size(self, code: bytes) -> int:  # noqa: ARG002 - all are as long
        return JUMP_SIZE


_BRANCH = re.compile(
    b"(?s)(?=[%s].|[%s][\xa0-\xff])"
    % (
        bytes(opcode | bit for opcode in (RiscvOpcode.BRANCH, RiscvOpcode.JAL) for bit in (0, 0x80)),
        b"".join(re.escape(bytes((low,))) for low in range(1, 256, 4)),
    )
)
"""By its first two bytes: a branch or a jal, or c.j, c.beqz or c.bnez."""
