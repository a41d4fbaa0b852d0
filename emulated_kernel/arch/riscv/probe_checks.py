"""Probe checks of RISC-V: for registration, and for optimization, whose jumps need free registers.

Source of the rules of optimization: "Add OPTPROBES feature on RISCV", v6, 2023.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cache
from itertools import compress, islice
from operator import and_

from emulated_kernel.arch.analysis.byte_search import displacements_into
from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region, ScratchRegisters
from emulated_kernel.arch.analysis.disassembly import Disassembler
from emulated_kernel.arch.analysis.function import Function, reserved_range
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.analysis.xrefs import Reference
from emulated_kernel.arch.probe_checks import AnalyzedFunction, OptimizationPolicy, ProbeChecker
from emulated_kernel.arch.riscv import extended
from emulated_kernel.arch.riscv.analysis import ALL_LIVE, RiscvFunctionAnalysis
from emulated_kernel.arch.riscv.encoder import JUMP_SIZE, LONG_JUMP_SIZE
from emulated_kernel.arch.riscv.insn import (
    ALL_REGISTERS,
    LENGTH,
    REGISTER_NAMES,
    REJECTED,
    RVC_SIZE,
    RVI_SIZE,
    SIMULATED,
    Handling,
    RiscvInsn,
    RiscvOpcode,
    decode_all,
    insn_of,
    relative_target,
)
from emulated_kernel.arch.riscv.register_preference import REGISTER_PREFERENCE, preferred_register
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.util.lazy_pattern import lazy_pattern


def detoured_region(analysis: RiscvFunctionAnalysis, addr: int) -> Region | Rejection:
    """Return the region (instructions) that a jump at `addr` would replace, or the rejection of the jump.

    Deviates: functions with an indirect jump are refused, as on x86, and so are fentry sites and jump labels.
    Mirrors: opt.c:can_optimize, arch_prepare_optimized_kprobe (optprobes v6, 2023).
    """
    length = copied_length(analysis, addr)
    if isinstance(length, Rejection):
        return length
    function = analysis.function
    if function.end - addr <= length:
        return Rejection(RejectReason.REGION_TOO_SHORT, addr)
    jump = analysis.jump_into(range(addr + RVC_SIZE, addr + length))
    if jump is not None:
        return Rejection(RejectReason.JUMP_INTO_RANGE, jump)
    if analysis.hazard is not None:
        return analysis.hazard
    reserved = reserved_range(function, addr, addr + length - 1)
    registers = reserved or _free_registers(analysis, addr, length)
    if isinstance(registers, Rejection):
        return registers
    at = addr - function.addr
    return Region(addr, function.code[at : at + length], registers)


def copied_length(analysis: RiscvFunctionAnalysis, addr: int) -> int | Rejection:
    """Return the length in bytes of the whole instructions that a jump at `addr` replaces, or a rejection.

    Mirrors: opt.c:search_copied_insn.
    """
    if addr not in analysis.insns:
        return Rejection(RejectReason.NOT_A_BOUNDARY, addr)
    rejection = analysis.rejections[addr]
    if rejection is not None and rejection.addr < addr + LONG_JUMP_SIZE:
        return rejection
    for length in (LONG_JUMP_SIZE, LONG_JUMP_SIZE + RVC_SIZE):
        if addr + length in analysis.insns or addr + length == analysis.end:
            return length
    return Rejection(RejectReason.REGION_TOO_SHORT, addr)


def _end_of_copy(analysis: RiscvFunctionAnalysis, addr: int) -> int:
    """Return the end address of the instructions whose length copied_length() returns.

    copied_length() must have found such instructions.
    """
    end = addr + LONG_JUMP_SIZE
    return end if end in analysis.insns or end == analysis.end else end + RVC_SIZE


def _free_registers(analysis: RiscvFunctionAnalysis, addr: int, length: int) -> ScratchRegisters | Rejection:
    """Return free registers for the jumps to and from the detour of a region, or a rejection.

    `length`: length of the region in bytes. One register for both jumps is preferred.
    Mirrors: opt.c:find_free_registers.
    """
    before = ALL_REGISTERS & ~analysis.live_mask(addr)
    behind = ALL_REGISTERS & ~analysis.live_mask(addr + length)
    both = preferred_register(before & behind)
    entry = both or preferred_register(before)
    back = both or preferred_register(behind)
    if not entry:
        return Rejection(RejectReason.NO_FREE_REGISTER, addr)
    if not back:
        return Rejection(RejectReason.NO_FREE_REGISTER_AFTER, addr + length)
    return _scratch(entry, back)


def _register_reason(analysis: RiscvFunctionAnalysis, addr: int, behind: int) -> RejectReason | None:
    """Return why no registers are free for the jumps of the region from `addr` to `behind`, or None.

    None means that _free_registers() finds registers. `behind` is the address after the region.
    """
    if analysis.has_idle_register:
        return None
    if analysis.live_mask(addr) == ALL_REGISTERS:
        return RejectReason.NO_FREE_REGISTER
    return RejectReason.NO_FREE_REGISTER_AFTER if analysis.live_mask(behind) == ALL_REGISTERS else None


@cache
def _scratch(entry: int, back: int) -> ScratchRegisters:
    return ScratchRegisters(REGISTER_NAMES[entry], REGISTER_NAMES[back])


class RiscvProbeChecker(ProbeChecker[RiscvFunctionAnalysis]):
    """Probe checks of a RISC-V kernel image, with or without compressed instructions."""

    all_live = ALL_LIVE
    fentry_size = LONG_JUMP_SIZE
    max_insn_size = RVI_SIZE
    bits = 64

    def __init__(
        self,
        image: ProbedTables,
        strategy: OptimizationPolicy[RiscvFunctionAnalysis] | None,
        disassembler: Disassembler,
        *,
        compressed: bool,
        ftrace: bool,
    ) -> None:
        self._compressed = compressed
        super().__init__(image, strategy, disassembler, ftrace=ftrace)

    def analyse(self, function: Function) -> RiscvFunctionAnalysis:
        return RiscvFunctionAnalysis(function, compressed=self._compressed, fentry=self.mcount)

    def insns(self, analysis: RiscvFunctionAnalysis) -> Collection[int]:
        return analysis.insns

    def check_insn(self, analysis: RiscvFunctionAnalysis, addr: int) -> Rejection | None:
        """Return the rejection of the instruction if it can't be executed out of line; otherwise None.

        Mirrors: arch/riscv/kernel/probes/kprobes.c:arch_prepare_kprobe (v6.1).
        """
        insn = analysis.insns.get(addr)
        if insn is None:
            return Rejection(RejectReason.NOT_A_BOUNDARY, addr)
        return Rejection(RejectReason.NOT_COPYABLE, addr) if insn.handling is Handling.REJECTED else None

    def reasons_at_once(
        self, known: AnalyzedFunction[RiscvFunctionAnalysis]
    ) -> dict[int, RejectReason | None]:
        """Return a map: address of an instruction -> first reason against a probe or a jump there, or None.

        `known`: the function. The reason is that of the first rejection by check_each_insn();
        tests/arch/riscv/test_reasons.py compares the results of both. But check_each_insn() checks each
        address separately, and a kernel has millions of instructions. So this method looks up most reasons in
        a table, by the kinds of four consecutive instructions. Only the few addresses that need other checks
        get them.
        """
        analysis = known.analysis
        function = known.function
        insns = analysis.insns
        kinds = analysis.kinds + _NOTHING
        rows = zip(kinds, kinds[1:], kinds[2:], kinds[3:], strict=False)
        found: dict[int, RejectReason | None] = dict(
            zip(insns, map(_OPTIMIZATION_BLOCKERS.__getitem__, rows), strict=False)
        )
        no_insn = RejectReason.NOT_A_BOUNDARY
        for addr in range(function.end - LONG_JUMP_SIZE - RVC_SIZE, function.end):
            if found.get(addr, no_insn) is None and _end_of_copy(analysis, addr) >= function.end:
                found[addr] = RejectReason.REGION_TOO_SHORT
        for target in analysis.jump_targets:
            for addr in range((target & -RVC_SIZE) - LONG_JUMP_SIZE, target - 1, RVC_SIZE):
                if found.get(addr, no_insn) is None and target < _end_of_copy(analysis, addr):
                    found[addr] = RejectReason.JUMP_INTO_RANGE
        if analysis.hazard is not None:
            hazard = analysis.hazard.reason
            found = {addr: reason or hazard for addr, reason in found.items()}
        shared = self._shared_places(known)
        for addr in shared if analysis.has_idle_register else insns:
            if found.get(addr, no_insn) is None:
                end = _end_of_copy(analysis, addr)
                if addr in shared:
                    found[addr] = self._shared_reason(known, range(addr, end))
                else:
                    found[addr] = _register_reason(analysis, addr, end)
        found |= {site.addr: RejectReason.FTRACE for site in function.fentry_sites if site.addr in insns}
        found |= {addr: reason for addr, reason in known.reserved.items() if addr in insns}
        return found

    def _shared_places(self, known: AnalyzedFunction[RiscvFunctionAnalysis]) -> set[int]:
        """Return the addresses in the function `known` at which a jump needs the checks of _shared_reason().

        A jump at such an address may overlap a patch site, or another function may jump into its region.
        """
        function = known.function
        found = set[int]()
        for target in self._entrances.targets(range(function.addr, function.end)):
            found.update(range(target - LONG_JUMP_SIZE - RVC_SIZE + 1, target))
        for site in (*function.fentry_sites, *function.jump_labels, *function.static_calls):
            found.update(range(site.addr - LONG_JUMP_SIZE - RVC_SIZE + 1, site.addr + site.size))
        return found

    def _shared_reason(
        self, known: AnalyzedFunction[RiscvFunctionAnalysis], replaced: range
    ) -> RejectReason | None:
        """Return the reason against a jump that would replace the addresses `replaced`, or None.

        None means that the jump is allowed. The jump is in the function `known`, at an address that
        _shared_places() returns. The method checks the last rules of detoured_region(), and the rules about
        branches into the replaced bytes from outside the function.
        """
        analysis = known.analysis
        addr = replaced.start
        behind = replaced.stop
        reserved = reserved_range(known.function, addr, behind - 1)
        if reserved is not None:
            return reserved.reason
        wanting = _register_reason(analysis, addr, behind)
        if wanting is not None:
            return wanting
        assert self.strategy is not None
        entered = self._entered(self.strategy, range(addr + 1, behind), known.symbol)
        return None if entered is None else entered.reason

    def live_in(self, analysis: RiscvFunctionAnalysis, addr: int) -> LiveRegisters:
        return analysis.at(addr)

    def register_text(self, addr: int) -> str:
        """Return a text that shows why no register is free for the jump of a probe at `addr`.

        The text names the first register of REGISTER_PREFERENCE, and an instruction that may need it.
        """
        analysis = self._analysis(addr)
        register = REGISTER_PREFERENCE[0]
        at = analysis.first_need(addr, register)
        by = "" if at is None else f" by {self.place_text(at)}: {self.insn_text(at, self.name)}"
        return f"{REGISTER_NAMES[register]} may be needed{by}"

    def has_jump_table(self, symbol: Symbol) -> bool:
        return self._function(symbol).analysis.has_jump_table

    def possible_branches(self, addr: int, code: bytes, window: range | None) -> Iterator[Reference]:
        """Yield (target, source) of all bit patterns that look like branches; see ProbeChecker.

        The search uses regular expressions. If `window` is not None, only the code from which a branch can
        reach the window is searched.
        """
        if window is None:
            yield from self._branches(_BRANCH, addr, code, 0, len(code))
            return
        for pattern, reach in ((_NEAR_BRANCH, _NEAR_REACH), (_JAL, _JAL_REACH)):
            first = window.start - addr - reach
            last = window.stop - addr + reach + RVI_SIZE
            yield from self._branches(pattern, addr, code, max(first, 0), max(last, 0))

    def _branches(
        self, pattern: re.Pattern[bytes], addr: int, code: bytes, first: int, last: int
    ) -> Iterator[Reference]:
        """Yield (target, source) for each branch that `pattern` finds in `code[first:last]`.

        `addr`: address of the start of `code`.
        """
        step = RVC_SIZE if self._compressed else RVI_SIZE
        for match in pattern.finditer(code, first, last):
            at = match.start()
            if at % step:
                continue
            bits = int.from_bytes(code[at : at + RVI_SIZE], "little")
            target = relative_target(bits)
            if target is not None:
                yield addr + at + target, addr + at

    def possible_addresses(self, addr: int, code: bytes, window: range | None) -> Iterator[Reference]:
        """Yield (target, source) for each auipc with a later addi or jalr that adds to it; see ProbeChecker.

        The addi or jalr must read the register that the auipc sets, and end at most _PAIR_REACH bytes after
        the start of the auipc. `source` is the address of the auipc.
        """
        step = RVC_SIZE if self._compressed else RVI_SIZE
        for at in _auipcs(code) if window is None else _auipcs_into(window, addr, code):
            if at % step:
                continue
            upper = insn_of(int.from_bytes(code[at : at + RVI_SIZE], "little"))
            for insn in self._insns_after(code[at + RVI_SIZE : at + _PAIR_REACH]):
                if insn.opcode in _PAIR_OPCODES and insn.rs1 == upper.rd and not insn.funct3:
                    yield addr + at + upper.upper_immediate + insn.immediate, addr + at
                if insn.writes >> upper.rd & 1:
                    break

    def _insns_after(self, code: bytes) -> Iterator[RiscvInsn]:
        return (insn for _, insn in decode_all(code, 0, compressed=self._compressed))

    def label_size(self, code: bytes) -> int:  # noqa: ARG002 - all labels have the same size
        return JUMP_SIZE


def pairs(analysis: RiscvFunctionAnalysis) -> int:
    """Return how many instructions of a function the authors of optprobes v6 regard as optimizable.

    Such an instruction and its successor are movable, whatever their lengths. One register is free both
    before and after the two. No jump leads to the second instruction, and the function has no hazard.
    """
    if analysis.hazard is not None:
        return 0
    insns = analysis.insns
    jumps = analysis.jump_targets
    entered: Collection[int] = jumps
    if any(analysis.function.addr <= target < analysis.end for target in jumps - insns.keys()):
        # A jump into the middle of an instruction excludes both pairs with that instruction.
        ends = [*insns, analysis.end]
        entered = {
            second
            for first, second, end in zip(ends, ends[1:], ends[2:], strict=False)
            if not jumps.isdisjoint(range(first + RVC_SIZE, end))
        }
    movable = analysis.kinds.translate(_MOVABLE)
    both = map(and_, movable, movable[1:])
    if not analysis.has_idle_register:
        masks = [*analysis.live.values(), analysis.live_mask(analysis.end)]
        free = (before | behind != ALL_REGISTERS for before, behind in zip(masks, masks[2:], strict=False))
        both = map(and_, both, free)
    seconds = compress(islice(insns, 1, None), both)
    return sum(1 for second in seconds if second not in entered)


def _interior(region: Region) -> range:
    return range(region.addr + 1, region.end)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        OptimizationPolicy(
            "optprobe-riscv",
            detoured_region,
            _interior,
            reasons=RiscvProbeChecker.reasons_at_once,
            pairs=pairs,
        ),
        OptimizationPolicy(
            "extended",
            detoured_region,
            _interior,
            beyond=OptimizationPolicy("tactics", extended.region, _interior, by_data=True, by_code=True),
        ),
    )
}
"""Name that profiles use -> optimization policy of RISC-V."""


class _OptimizationBlockers(dict[tuple[int, int, int, int], RejectReason | None]):
    """Cache: kinds of four consecutive instructions -> reason against a jump at the first, or None.

    A kind is RiscvInsnAttributes.kind. 0 means that the function has ended.
    """

    def __missing__(self, kinds: tuple[int, int, int, int]) -> RejectReason | None:
        reason = self._reason(kinds)
        self[kinds] = reason
        return reason

    def _reason(self, kinds: tuple[int, int, int, int]) -> RejectReason | None:
        if kinds[0] & REJECTED:
            return RejectReason.NOT_COPYABLE
        room = 0
        for kind in kinds:
            if room >= LONG_JUMP_SIZE:
                break
            if kind & (SIMULATED | REJECTED):
                return RejectReason.NOT_BOOSTABLE
            if not kind:
                return RejectReason.REGION_TOO_SHORT
            room += kind & LENGTH
        return None


_OPTIMIZATION_BLOCKERS = _OptimizationBlockers()
_MOVABLE = bytes(not kind & (SIMULATED | REJECTED) for kind in range(256))
"""Translation table: RiscvInsnAttributes.kind -> 1 if the instruction can be executed out of line, else 0."""
_NOTHING = bytes(3)
"""Three zero kinds, appended to the kinds of a function's instructions, so that each has three successors."""

_AUIPC = lazy_pattern(b"(?s)(?=[\x17\x97]...)")
_PAIR_OPCODES = (RiscvOpcode.OP_IMM, RiscvOpcode.JALR)
_PAIR_REACH = 32
"""Maximum distance in bytes from an auipc to the end of the instruction that adds the lower bits."""


def _auipcs(code: bytes) -> Iterator[int]:
    """Yield the offset of each bit pattern in `code` that looks like an auipc."""
    return (match.start() for match in _AUIPC.finditer(code))


def _auipcs_into(window: range, addr: int, code: bytes) -> Iterator[int]:
    """Yield the offset of each auipc in the code at `addr` that may serve to set an address in `window`.

    The search takes the whole 32-bit word of an auipc as the distance, although the lower 12 bits are the
    opcode and rd. A later instruction adds a signed 12-bit number. So the result also contains auipcs that
    lead to some pages around the window.
    """
    start = window.start - addr
    stop = window.stop - addr
    for at, _ in displacements_into(code, range(start - _LOW_PART, stop + 2 * _LOW_PART)):
        if code[at] & 0x7F == RiscvOpcode.AUIPC:
            yield at


_LOW_PART = 1 << 12
"""Size in bytes of the range that the lower 12 bits of a distance cover; an auipc lacks these bits."""


def _opcodes(opcode: int) -> bytes:
    return bytes((opcode, opcode | 0x80))


_NEAR = b"[%s].|[%s][\xa0-\xff]" % (
    _opcodes(RiscvOpcode.BRANCH),
    b"".join(re.escape(bytes((low,))) for low in range(1, 256, 4)),
)
_NEAR_BRANCH = lazy_pattern(b"(?s)(?=%s)" % _NEAR)
"""Regular expression that finds the first two bytes of a branch other than jal: b*, c.j, c.beqz or c.bnez."""
_NEAR_REACH = 1 << 12
"""Maximum distance in bytes from a branch other than jal to its target."""
_JAL = lazy_pattern(b"(?s)(?=[%s].)" % _opcodes(RiscvOpcode.JAL))
_JAL_REACH = 1 << 20
_BRANCH = lazy_pattern(b"(?s)(?=%s|[%s].)" % (_NEAR, _opcodes(RiscvOpcode.JAL)))
"""Regular expression that finds the first two bytes of a branch, jal, c.j, c.beqz or c.bnez."""
