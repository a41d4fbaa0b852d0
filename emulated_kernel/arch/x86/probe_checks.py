"""Probe checks of x86: registration and optimization, by Linux's rules or djprobe's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property, partial

from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region
from emulated_kernel.arch.analysis.disassembly import Disassembler
from emulated_kernel.arch.analysis.function import Function, TextLayout, reserved_range
from emulated_kernel.arch.analysis.probe_rules import ProbeRule, ProbeRules
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.analysis.xrefs import Reference
from emulated_kernel.arch.probe_checks import AnalyzedFunction, OptimizationPolicy, ProbeChecker
from emulated_kernel.arch.x86 import djprobe, extended, references
from emulated_kernel.arch.x86.analysis import NOP5, X86FunctionAnalysis
from emulated_kernel.arch.x86.copy_insn import INT3_SIZE, JMP32_SIZE
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE
from emulated_kernel.arch.x86.insn_attributes import ControlTransfer, DecodeCache
from emulated_kernel.arch.x86.liveness import ALL_LIVE
from emulated_kernel.image.kallsyms import Location, Symbol
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.util.fast_dataclass import replace


def detoured_region(analysis: X86FunctionAnalysis, addr: int) -> Region | Rejection:
    """Return the region (instructions) that a jump at `addr` would replace, or the rejection of the jump.

    Mirrors: arch/x86/kernel/kprobes/opt.c:arch_prepare_optimized_kprobe (v6.1).
    """
    if addr in analysis.layout.entry_text:
        return Rejection(RejectReason.ENTRY_TEXT, addr)
    if analysis.function.end - addr < JMP32_SIZE:
        return Rejection(RejectReason.REGION_TOO_SHORT, addr)
    return _function_hazard(analysis, addr) or _copied_region(analysis, addr)


def reasons(_checker: object, known: AnalyzedFunction[X86FunctionAnalysis]) -> dict[int, RejectReason | None]:
    """Return a map: address of an instruction -> first reason against a probe or a jump there, or None.

    `known`: the function. The reason is that which _asked() returns for the address;
    tests/arch/test_x86_reasons.py compares the results with those of check_each_insn() for random functions.
    But _asked() makes an object for each address, and a kernel has millions of instructions. So this function
    makes one pass backwards over the instructions, and calls _asked() only where it has to.
    """
    analysis = known.analysis
    function = analysis.function
    flow = analysis.flow
    to_ask = _places_to_ask(known)
    hazard = None if flow.hazard is None else flow.hazard.reason

    out_of_reach = function.end + MAX_INSN_SIZE
    nearest_target_after = out_of_reach
    targets = [0, *flow.jump_targets]
    next_target = targets.pop()
    first_unsafe_addr = out_of_reach
    unsafe_reason: RejectReason | None = None
    found: list[RejectReason | None] = []
    for addr, (_, refusal, rejection, *_) in reversed(flow.facts.items()):
        if rejection is not None:
            first_unsafe_addr = addr
            unsafe_reason = rejection
        while next_target > addr:
            nearest_target_after = next_target
            next_target = targets.pop()
        is_entered = nearest_target_after <= addr + JMP32_SIZE
        if addr in to_ask:
            found.append(_asked(known, addr, refusal))
        elif refusal is not None:
            found.append(refusal)
        elif hazard is not None:
            # Which of the two comes first in the function decides.
            found.append(_asked(known, addr, None) if is_entered else hazard)
        elif is_entered:
            found.append(RejectReason.JUMP_INTO_RANGE)
        else:
            found.append(unsafe_reason if first_unsafe_addr < addr + JMP32_SIZE else None)
    found.reverse()
    return dict(zip(flow.facts, found, strict=True))


def _places_to_ask(known: AnalyzedFunction[X86FunctionAnalysis]) -> set[int]:
    """Return the addresses in the function `known` for which reasons() must always call _asked().

    At these addresses, a probe is refused, or a jump may overlap a patch site, a BUG, entry text, or the
    function's end.
    """
    function = known.function
    found = {*known.reserved, *range(function.end - JMP32_SIZE + 1, function.end)}
    for site in (*function.fentry_sites, *function.jump_labels, *function.static_calls):
        found.update(range(site.addr - _LONGEST_REGION + 1, site.addr + site.size))
    entry = known.analysis.layout.entry_text
    if function.addr in entry or function.end - 1 in entry:
        found.update(known.analysis.flow.facts)
    return found


def _asked(
    known: AnalyzedFunction[X86FunctionAnalysis], addr: int, refusal: RejectReason | None
) -> RejectReason | None:
    """Return the first reason against a probe at `addr` or against its jump; None if both are allowed.

    Reasons against registering a probe come before those of detoured_region(). `refusal` is the reason
    against probing the instruction, or None.
    """
    if addr in known.reserved:
        return known.reserved[addr]
    if any(addr == site.addr for site in known.function.fentry_sites):
        return RejectReason.FTRACE
    found = detoured_region(known.analysis, addr)
    return refusal or (found.reason if isinstance(found, Rejection) else None)


def _function_hazard(analysis: X86FunctionAnalysis, addr: int) -> Rejection | None:
    """Return the rejection of a jump at `addr`, or None if no instruction of the function makes it unsafe.

    The rejection names the first unsafe instruction in address order. As in Linux, a jump of the function to
    the byte after the five replaced bytes makes the jump at `addr` unsafe, too.
    """
    hazard = analysis.flow.hazard
    jump = analysis.flow.jump_into(addr + INT3_SIZE, addr + JMP32_SIZE)
    if jump and (hazard is None or jump.source < hazard.addr):
        return Rejection(RejectReason.JUMP_INTO_RANGE, jump.source)
    return hazard


def _copied_region(analysis: X86FunctionAnalysis, addr: int) -> Region | Rejection:
    """Return the region of whole instructions that a jump at `addr` replaces, or a rejection.

    All instructions of the region must be copyable into a detour buffer.

    Mirrors: arch/x86/kernel/kprobes/opt.c:copy_optimized_instructions (v6.1).
    """
    function = analysis.function
    at = addr
    facts_at = analysis.flow.facts.get
    end = addr + JMP32_SIZE
    while at < end:
        facts = facts_at(at)
        if facts is None:
            return Rejection(RejectReason.NOT_A_BOUNDARY, at)
        if facts.rejection is not None:
            return Rejection(facts.rejection, at)
        if at in function.exception_entries:
            return Rejection(RejectReason.NOT_BOOSTABLE, at)
        at += facts.length
    if not analysis.patched.isdisjoint(range(addr, at)):
        found = reserved_range(function, addr, at - 1)
        if found is not None:
            return found
    return Region(addr, analysis.bytes_at(addr, at - addr))


_RETURN_THUNKS = (
    *("__x86_return_thunk", "its_return_thunk", "retbleed_return_thunk"),
    *("srso_return_thunk", "srso_alias_return_thunk"),
)
"""Symbols of the thunks to which returns jump after boot.

Mirrors: arch/x86/kernel/cpu/bugs.c:x86_return_thunk (v6.12).
"""
_LONGEST_REGION = JMP32_SIZE - 1 + MAX_INSN_SIZE
_SHORT_LABELS = (b"\xeb", b"\x66\x90")
_SHORT_LABEL_SIZE = 2


def _interior(region: Region) -> range:
    return range(region.addr + 1, region.end)


def _tactics() -> OptimizationPolicy[X86FunctionAnalysis]:
    """Return a policy that tries jumps with the tactics (relaxations of Linux's rules).

    It first tries a jump without kept bytes, then with 1 to 4. Kept bytes are the last bytes of the jump;
    they are not written, because the code there already has these values (Region.kept).
    """
    found = None
    for kept in range(JMP32_SIZE - 1, -1, -1):
        region = partial(extended.region, kept=kept)
        name = f"tactics, {kept} bytes kept"
        found = OptimizationPolicy(name, region, _interior, by_data=True, by_code=True, beyond=found)
    assert found is not None
    return found


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        OptimizationPolicy("optprobe", detoured_region, _interior),
        OptimizationPolicy("optprobe-linux", detoured_region, reasons=reasons),
        OptimizationPolicy(
            "extended",
            detoured_region,
            _interior,
            beyond=_tactics(),
        ),
        OptimizationPolicy("djprobe", djprobe.region, djprobe.prohibited, by_data=True, by_commit=True),
    )
}
"""Name that profiles use -> optimization policy of x86.

`optprobe-linux` checks only the function itself, as Linux does. `extended` uses tactics (relaxations of
Linux's rules) where a jump is refused.
"""


class X86ProbeChecker(ProbeChecker[X86FunctionAnalysis]):
    """Probe checks of an x86_64 or i386 kernel image."""

    all_live = ALL_LIVE
    fentry_size = JMP32_SIZE
    call_size = JMP32_SIZE
    max_insn_size = MAX_INSN_SIZE
    landing_pad = bytes.fromhex("f30f1efa")

    def __init__(
        self,
        image: ProbedTables,
        strategy: OptimizationPolicy[X86FunctionAnalysis] | None,
        disassembler: Disassembler,
        *,
        bits: int,
        ftrace: bool,
        rules: ProbeRules = frozenset(),
    ) -> None:
        self.bits = bits
        self._rules = rules
        self._facts = DecodeCache(bits, rules)
        self._is_extended = strategy is not None and strategy.beyond is not None
        super().__init__(image, strategy, disassembler, ftrace=ftrace)

    def text_layout(self, image: ProbedTables) -> TextLayout:
        lookup = image.kallsyms.lookup_name

        def between(start: str, end: str) -> range:
            first = lookup(start)
            last = lookup(end)
            return range(0) if first is None or last is None else range(first, last)

        thunks = between("__indirect_thunk_start", "__indirect_thunk_end")
        return replace(
            super().text_layout(image),
            entry_text=between("__entry_text_start", "__entry_text_end"),
            thunks=thunks,
            # Only the extended strategy asks for them.
            return_thunks=frozenset(filter(None, map(lookup, _RETURN_THUNKS)) if self._is_extended else ()),
        )

    def fentry_nop(self, code: bytes) -> bytes:
        return NOP5 if len(code) == len(NOP5) else code

    def analyse(self, function: Function) -> X86FunctionAnalysis:
        return X86FunctionAnalysis(
            function, self._facts, self.layout, has_jump_tables=not self._excludes_jump_tables
        )

    @cached_property
    def _excludes_jump_tables(self) -> bool:
        """Whether indirect jumps are no hazards, because the kernel's functions have no jump tables.

        True if the probe rules contain NO_JUMP_TABLES, and the kernel is built with retpolines or landing
        pads, which restrict indirect jumps.
        """
        return ProbeRule.NO_JUMP_TABLES in self._rules and (bool(self.layout.thunks) or self._has_pads)

    def insns(self, analysis: X86FunctionAnalysis) -> Collection[int]:
        return analysis.flow.facts

    def check_insn(self, analysis: X86FunctionAnalysis, addr: int) -> Rejection | None:
        """Return the rejection of the instruction if it can't be executed out of line; otherwise None.

        Mirrors: arch/x86/kernel/kprobes/core.c:arch_prepare_kprobe (v6.1).
        """
        facts = analysis.flow.facts.get(addr)
        reason = RejectReason.NOT_A_BOUNDARY if facts is None else facts.refusal
        return None if reason is None else Rejection(reason, addr)

    def insn_size(self, where: Location) -> int:
        """Return the exact size in bytes of the instruction at `where`, not an upper limit.

        Instructions with equal bytes are prepared once (copy_insn._prepare_anywhere). With an upper limit,
        the bytes after an instruction would make equal instructions different.
        """
        facts = self._function(where.symbol).analysis.flow.facts
        return facts[where.symbol.address + where.offset].length

    def live_in(self, analysis: X86FunctionAnalysis, addr: int) -> LiveRegisters:
        return analysis.liveness.at(addr)

    def has_jump_table(self, symbol: Symbol) -> bool:
        """Return True if an indirect jump of the function may use a jump table; see ProbeChecker.

        The function must have an indirect jump, and data must contain a pointer into the function's body.
        """
        facts = self._function(symbol).analysis.flow.facts.values()
        if not any(fact.branch is ControlTransfer.INDIRECT_JUMP for fact in facts):
            return False
        first = symbol.address + len(self.landing_pad) + self.fentry_size
        return self._entrances.pointer(range(first, symbol.address + symbol.size)) is not None

    def possible_branches(self, addr: int, code: bytes, window: range | None) -> Iterator[Reference]:
        if window is None:
            return references.branches(addr, code)
        return references.branches_into(window, addr, code)

    def possible_addresses(self, addr: int, code: bytes, window: range | None) -> Iterator[Reference]:
        """Yield (target, source) for immediates of 32 bits, and for RIP-relative lea; see ProbeChecker."""
        sign = self._address_sign
        if window is None:
            yield from references.immediates(sign, self._text_ranges, addr, code)
            yield from references.rip_relative(addr, code) if self.bits == 64 else ()
        else:
            yield from references.immediates_into(sign, window, addr, code)
            yield from references.rip_relative_into(window, addr, code) if self.bits == 64 else ()

    @property
    def _address_sign(self) -> int:
        """Upper 32 bits, in place, of all kernel addresses that a sign-extended imm32 can hold; 0 on i386."""
        return 0xFFFFFFFF << 32 if self.bits == 64 else 0

    def label_size(self, code: bytes) -> int:
        return label_size(code)


def label_size(code: bytes) -> int:
    """Return the size in bytes of the jump label that `code` begins with.

    Mirrors: arch/x86/kernel/jump_label.c:arch_jump_entry_size (v6.1).
    """
    return _SHORT_LABEL_SIZE if code.startswith(_SHORT_LABELS) else JMP32_SIZE
