"""Will a kprobe register here, and will it be optimized? Answered from bytes and tables, as Linux does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from errno import EOPNOTSUPP

from emulated_kernel.arch.function import Function, FunctionTable, TextLayout
from emulated_kernel.arch.reason import Finding, Reason
from emulated_kernel.arch.reserved import overlapping, reserved_range
from emulated_kernel.arch.x86.analysis import FunctionAnalysis
from emulated_kernel.arch.x86.boost import can_boost
from emulated_kernel.arch.x86.prepare import INT3_SIZE, JMP32_SIZE, copy_instruction, prepare_emulation
from emulated_kernel.errors import KernelError


class Mode(Enum):
    """How a registered probe is reached; the value is its flag in kprobes/list."""

    INT3 = ""
    FTRACE = "[FTRACE]"
    OPTIMIZED = "[OPTIMIZED]"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of registering a probe at an address."""

    mode: Mode | None
    """None: not registered."""
    length: int = 0
    """Bytes of the detoured region (DCR): the whole instructions that the jump replaces; 0 if none."""
    finding: Finding | None = None
    """Why not better; None for an optimized probe."""

    @property
    def errno(self) -> int:
        """0 if registered."""
        return self.finding.errno if self.finding and self.mode is None else 0

    @property
    def flags(self) -> str:
        """As in kprobes/list: "[OPTIMIZED]", "[FTRACE]" or nothing."""
        return self.mode.value if self.mode else ""


class Verdicts:
    """Verdicts on the probe points of an image; each function is decoded once.

    `events`: for probes made through kprobe_events, which keep out of notrace functions
    (CONFIG_KPROBE_EVENTS_ON_NOTRACE=n); False for register_kprobe() alone.
    """

    def __init__(self, table: FunctionTable, *, events: bool = True, bits: int = 64) -> None:
        self._table = table
        self._events = events
        self._bits = bits
        self._analyses: dict[int, FunctionAnalysis] = {}

    def at(self, addr: int) -> Verdict:
        """The verdict on a probe at `addr`, the only one in its function.

        Raises: LookupError if the table is a sample and lacks what decides.
        Mirrors: kernel/kprobes.c:register_kprobe (v6.1), with
        kernel/trace/trace_kprobe.c:within_notrace_func before it.
        """
        function = self._table.containing(addr)
        if function is None:
            return Verdict(None, finding=self._outside(addr))
        if self._events and not self._is_traced(function):
            return Verdict(None, finding=Finding(Reason.NOTRACE, function.addr))
        if self._is_blacklisted(function):
            return Verdict(None, finding=Finding(Reason.BLACKLISTED, function.addr))
        return self.within(function, addr)

    def within(self, function: Function, addr: int) -> Verdict:
        """The same for a function that is neither notrace nor blacklisted."""
        refused = _reserved(function, addr) or self._prepares(function, addr)
        if refused:
            return Verdict(None, finding=refused)
        if addr in function.fentry_sites:
            return Verdict(Mode.FTRACE, finding=Finding(Reason.FTRACE, addr))
        outcome = can_optimize(self._analysis(function), addr, self._table.layout)
        if isinstance(outcome, Finding):
            return Verdict(Mode.INT3, finding=outcome)
        return Verdict(Mode.OPTIMIZED, length=outcome)

    def _outside(self, addr: int) -> Finding:
        """An address that is in no function of the table."""
        layout = self._table.layout
        if addr in layout.text or addr in layout.modules:
            raise LookupError(f"no function is known at {addr:#x}")
        return Finding(Reason.NOT_TEXT if layout.in_image(addr) else Reason.NO_SYMBOL, addr)

    def _analysis(self, function: Function) -> FunctionAnalysis:
        analysis = self._analyses.get(function.addr)
        if analysis is None:
            analysis = FunctionAnalysis(function, self._table.layout, self._bits)
            self._analyses[function.addr] = analysis
        return analysis

    def _is_traced(self, function: Function) -> bool:
        """Mirrors: kernel/trace/trace_kprobe.c:within_notrace_func (v6.1), negated."""
        if function.traced:
            return True
        parent = self._table.parent(function)
        return parent is not None and parent.traced

    def _is_blacklisted(self, function: Function) -> bool:
        """Mirrors: kernel/kprobes.c:within_kprobe_blacklist (v6.1)."""
        if function.blacklisted:
            return True
        parent = self._table.parent(function)
        return parent is not None and parent.blacklisted

    def _prepares(self, function: Function, addr: int) -> Finding | None:
        """Mirrors: arch/x86/kernel/kprobes/core.c:arch_prepare_kprobe (v6.1)."""
        if addr in function.fentry_sites:
            return None
        analysis = self._analysis(function)
        if addr not in analysis.lengths:
            return Finding(Reason.NOT_A_BOUNDARY, addr)
        try:
            _, insn = copy_instruction(analysis.bytes_at(addr), addr, addr, self._bits)
            prepare_emulation(insn, addr, self._bits)
        except KernelError as error:
            refused = Reason.NOT_EMULATED if error.errno == EOPNOTSUPP else Reason.NOT_COPYABLE
            return Finding(refused, addr)
        return None


def _reserved(function: Function, addr: int) -> Finding | None:
    """Mirrors: kernel/kprobes.c:check_kprobe_address_safe (v6.1): what others patch or trap on."""
    if overlapping(function.jump_labels, addr, addr):
        return Finding(Reason.JUMP_LABEL, addr)
    if overlapping(function.static_calls, addr, addr):
        return Finding(Reason.STATIC_CALL, addr)
    if addr in function.bug_entries:
        return Finding(Reason.BUG, addr)
    return None


def can_optimize(analysis: FunctionAnalysis, addr: int, layout: TextLayout) -> int | Finding:
    """The length of the detoured region of a probe at `addr`, or why it stays an int3.

    Mirrors: arch/x86/kernel/kprobes/opt.c:arch_prepare_optimized_kprobe (v6.1)
    """
    function = analysis.function
    if addr in layout.entry_text:
        return Finding(Reason.ENTRY_TEXT, addr)
    if function.end - addr < JMP32_SIZE:
        return Finding(Reason.NO_ROOM, addr)
    return _function_hazard(analysis, addr) or _detoured_length(analysis, addr)


def _function_hazard(analysis: FunctionAnalysis, addr: int) -> Finding | None:
    """The first instruction of the function, in address order, that makes the jump unsafe.

    Linux: the byte behind the five counts as a jump target too.
    """
    jump = analysis.jump_into(addr + INT3_SIZE, addr + JMP32_SIZE)
    hazard = analysis.hazard
    if jump and (hazard is None or jump.source < hazard.addr):
        return Finding(Reason.JUMP_INTO_RANGE, jump.source)
    return hazard


def _detoured_length(analysis: FunctionAnalysis, addr: int) -> int | Finding:
    """Mirrors: arch/x86/kernel/kprobes/opt.c:copy_optimized_instructions (v6.1)."""
    function = analysis.function
    length = 0
    while length < JMP32_SIZE:
        at = addr + length
        try:
            _, insn = copy_instruction(analysis.bytes_at(at), at, at, analysis.bits)
        except KernelError:
            return Finding(Reason.NOT_COPYABLE_TO_DETOUR, at)
        if not can_boost(insn, may_fault=at in function.exception_entries):
            return Finding(Reason.NOT_BOOSTABLE, at)
        length += insn.length
    last = addr + length - 1
    return reserved_range(function, addr, last, fentry_size=JMP32_SIZE) or length
