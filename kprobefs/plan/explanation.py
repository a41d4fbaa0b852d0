"""Explanation of a probe at an address: its outcome, function, detour, better places, and arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from errno import ENODATA, ENOENT
from functools import cached_property
from itertools import pairwise
from typing import Any

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.disassembly import address_names
from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.entry_values import EntryValues
from emulated_kernel.image.kallsyms import Location, Symbol
from emulated_kernel.image.linux.btf_declaration import Parameter, Prototype, prototype
from emulated_kernel.kprobes.codegen.guest_code import BreakpointKind
from emulated_kernel.kprobes.return_hook.hook_sets import COLD_PART
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.measure.verdicts import Judge, ProbeOutcome, Verdict
from kprobefs.plan.arguments import Argument, arguments_at, changed_parameters
from kprobefs.plan.place import Place
from kprobefs.plan.planned_kernel import PlannedKernel, Variant

_DETOUR_DISTANCE = 1 << 20
"""Distance in bytes from the end of the kernel to the address for which a detour is generated.

The address of the real detour is chosen when the probe is registered. Operands that are printed as symbols do
not depend on the address.
"""
_PAGE = 1 << 12
EXTENDED = "extended"
"""Outcome that is shown if the policy PlannedKernel.strategy optimizes a probe and Linux's rule does not."""


@dataclass(frozen=True, slots=True)
class ListedInsn:
    """An instruction of the function, and the verdict on a probe at this instruction."""

    address: int
    offset: int
    """Offset in bytes from the start of the function."""
    code: bytes
    text: str
    target: int | None
    """Address to which a jump within the function goes; None for other instructions."""
    verdict: Verdict
    reason: str
    """The rule that refuses the probe or its jump, and the cause; "" if no rule is broken."""
    extended: Verdict | None
    """The verdict under the policy PlannedKernel.strategy; None if there is no such policy."""

    @property
    def mode(self) -> str:
        """The outcome, or "extended" if only the policy PlannedKernel.strategy optimizes the probe."""
        is_linux = self.extended is None or self.verdict.outcome is self.extended.outcome
        return self.verdict.outcome.value if is_linux else EXTENDED

    @property
    def end(self) -> int:
        """Address after the instruction."""
        return self.address + len(self.code)


@dataclass(frozen=True, slots=True)
class DetourInsn:
    """An instruction of the detour."""

    part: str
    """Name of the part of the detour that contains the instruction; see Arch.detour_parts."""
    offset: int
    """Offset in bytes from the start of the detour."""
    text: str
    is_relocated: bool
    """Whether the instruction is a copy of a replaced instruction, with another displacement."""


@dataclass(frozen=True, slots=True)
class OtherVerdict:
    """The verdict on a probe at an address, in a variant of the kernel with other return instructions.

    `returns`: name of the way in which boot has rewritten them; see Variant.returns.
    """

    returns: str
    outcome: ProbeOutcome
    reason: str


class Explanation:
    """Explanation of a probe at a place of a kernel. All parts are computed when they are first used."""

    def __init__(self, kernel: PlannedKernel, place: Place, variant: Variant | None = None) -> None:
        """Store the place, and choose the variant of the kernel in which a probe at the place is explained.

        `variant`: a variant of the kernel in which boot has rewritten all return instructions. If it is None,
        use a variant in which only those of the place's function are rewritten.
        """
        self.kernel = kernel
        self.place = place
        self.symbol: Symbol = place.where.symbol
        self.judge: Judge = (variant or kernel.variant(self.symbol)).judge
        strategy = kernel.strategy
        self._extended = None if strategy is None else self.judge.with_strategy(strategy)
        self._name = address_names(kernel.tables.kallsyms.lookup)

    @property
    def title(self) -> str:
        """The place as SYMBOL+OFFSET, with MODULE: before it for a module."""
        where = self.place.where
        module = "" if where.module is None else f"{where.module}:"
        return f"{module}{where.name}+{where.offset:#x}" if where.offset else f"{module}{where.name}"

    @cached_property
    def probed(self) -> Location:
        """Return the location at which Linux puts the probe: if the place is a landing pad, after the pad."""
        return self.judge.place(self.place.where)

    @property
    def is_moved(self) -> bool:
        """Whether the place is a landing pad, so that Linux puts the probe after it."""
        return self.probed.offset != self.place.where.offset

    @property
    def address(self) -> int:
        """Address at which Linux puts the probe."""
        return self.symbol.address + self.probed.offset

    @cached_property
    def verdict(self) -> Verdict:
        """Verdict on a probe at the place."""
        return self.judge.verdict(self.place.where)

    @cached_property
    def breakpoint_kind(self) -> BreakpointKind | None:
        """Return how a breakpoint at the place executes the instruction; None if there is no breakpoint.

        An optimized probe has a breakpoint while its jump is not written.
        """
        return self.judge.breakpoint_kind(self.place.where)

    @property
    def reason(self) -> str:
        """The rule that refuses the probe or its jump, and the cause; "" if no rule is broken."""
        return self._reason(self.judge, self.verdict)

    @cached_property
    def extended(self) -> Verdict | None:
        """Verdict on a probe at the place under the policy PlannedKernel.strategy.

        None if there is no such policy.
        """
        return None if self._extended is None else self._extended.verdict(self.place.where)

    @property
    def extended_reason(self) -> str:
        """The tactics of a jump at the place, or the rule by which PlannedKernel.strategy refuses the jump.

        A tactic is a way to place a jump that Linux refuses. "" if there is nothing to explain.
        """
        verdict = self.extended
        if verdict is None or self._extended is None:
            return ""
        tactics = () if verdict.region is None else verdict.region.tactics
        return "; ".join(each.value for each in tactics) or self._reason(self._extended, verdict)

    @property
    def region(self) -> Region | None:
        """The instructions that a jump at the place replaces; None if there is no jump.

        If Linux's rule refuses the jump, the policy PlannedKernel.strategy decides.
        """
        if self.verdict.region is not None or self.extended is None:
            return self.verdict.region
        return self.extended.region

    @cached_property
    def others(self) -> tuple[OtherVerdict, ...]:
        """The verdicts on the place if boot rewrites the kernel's return instructions as on other CPUs.

        There is one verdict for each way of rewriting that differs from the one that `verdict` assumes.
        """
        found = []
        for variant in self.kernel.other_variants(self.symbol):
            verdict = variant.judge.verdict(self.place.where)
            reason = self._reason(variant.judge, verdict)
            found.append(OtherVerdict(variant.returns, verdict.outcome, reason))
        return tuple(found)

    @cached_property
    def insns(self) -> tuple[ListedInsn, ...]:
        """All instructions of the function, without filler."""
        code = self._code
        start = self.symbol.address
        targets = {addr: insn.target for addr, insn in self._frame_insns.items()}
        verdicts = self.judge.verdicts(self.symbol)
        extended = {} if self._extended is None else self._extended.verdicts(self.symbol)
        addresses = [*self.judge.checker.boundaries(self.symbol), start + len(code)]
        ends = dict(pairwise(addresses))
        sweep = self.judge.arch.disassembler.insns(code, start, self._name)
        texts = {(addr, size): text for addr, size, text in sweep}
        found = []
        for addr, verdict in verdicts.items():
            insn = code[addr - start : ends[addr] - start]
            target = targets.get(addr)
            found.append(
                ListedInsn(
                    addr,
                    addr - start,
                    insn,
                    texts.get((addr, len(insn))) or self._text(insn, addr),
                    target if target in verdicts else None,
                    verdict,
                    self._reason(self.judge, verdict),
                    extended.get(addr),
                )
            )
        return tuple(found)

    @property
    def detoured(self) -> Sequence[ListedInsn]:
        """Jumps in the function that belong to optimized kprobes; empty if the kernel is not a dump.

        Each jump to an address outside of all text is taken for one of these. The instructions that the jumps
        replace are not known.
        """
        if not self.kernel.is_dump:
            return ()
        text = [range(*each) for each in self.kernel.tables.text_ranges]
        targets = {addr: insn.target for addr, insn in self._frame_insns.items()}
        return [
            insn
            for insn in self.insns
            if insn.text.startswith("jmp")
            and (target := targets.get(insn.address)) is not None
            and not any(target in part for part in text)
        ]

    @property
    def size(self) -> int:
        """Size of the function in bytes according to kallsyms, including filler at its end."""
        return self.symbol.size

    @property
    def section(self) -> str:
        """Name of the function's text section."""
        return self.judge.subject.section(self.symbol.address)

    @cached_property
    def bracket(self) -> range:
        """Addresses of the whole instructions that a jump at the place replaces, or would replace if allowed.

        If no jumps are written in the kernel, these are the addresses of the probed instruction.
        """
        region = self.region
        if region is not None:
            return range(region.addr, region.end)
        size = self.judge.arch.jump_back_size if self.judge.strategy is not None else 1
        end = self.address
        for insn in self.insns:
            if insn.address == end and end - self.address < size:
                end = insn.end
        return range(self.address, end)

    # Better places

    @property
    def better_before(self) -> ListedInsn | None:
        """Nearest instruction before the place on which a probe would be optimized; None if there is none."""
        found = [insn for insn in self._optimized if insn.address < self.address]
        return found[-1] if found else None

    @property
    def better_after(self) -> ListedInsn | None:
        """Nearest instruction after the place on which a probe would be optimized; None if there is none."""
        return next((insn for insn in self._optimized if insn.address > self.address), None)

    @property
    def accepted_around(self) -> tuple[ListedInsn | None, ListedInsn | None]:
        """Nearest instructions before and after the place that accept a probe; None for a missing one.

        An instruction at which the kernel accepts a probe although ftrace patches it is left out.
        """
        found = [
            insn
            for insn in self.insns
            if insn.verdict.outcome is not ProbeOutcome.REFUSED and insn.address not in self._unguarded
        ]
        before = [insn for insn in found if insn.address < self.address]
        after = (insn for insn in found if insn.address > self.address)
        return (before[-1] if before else None), next(after, None)

    @property
    def is_unguarded(self) -> bool:
        """Whether the kernel accepts a probe at the place, although ftrace patches the instruction."""
        return self.address in self._unguarded

    @property
    def _unguarded(self) -> Set[int]:
        return self.judge.subject.unguarded_sites if self.kernel.has_own_kprobes else frozenset()

    @cached_property
    def _optimized(self) -> Sequence[ListedInsn]:
        return [insn for insn in self.insns if insn.verdict.outcome is ProbeOutcome.OPTIMIZED]

    @property
    def containing(self) -> ListedInsn | None:
        """The instruction that contains the place, if the place is inside an instruction; otherwise None."""
        return next((insn for insn in self.insns if insn.address < self.address < insn.end), None)

    # Detour

    @cached_property
    def detour(self) -> tuple[DetourInsn, ...]:
        """The detour that a jump at the place would lead to; empty if there is no jump."""
        region = self.region
        return () if region is None else tuple(self._detour_insns(region))

    def _detour_insns(self, region: Region) -> Iterator[DetourInsn]:
        arch = self.judge.arch
        end = max(end for _, end in self.kernel.tables.text_ranges)
        buffer = (end + _DETOUR_DISTANCE) & -_PAGE
        made = arch.detour(region, buffer)
        parts = arch.detour_parts(0, made.trap, made.copied, len(made.code))
        originals = _insns_of(arch, region)

        def name(addr: int) -> str | None:
            offset = addr - buffer
            return f"detour+{offset:#x}" if 0 <= offset < len(made.code) else self._name(addr)

        for part, following in zip(parts, (*[each.start for each in parts[1:]], len(made.code)), strict=True):
            code = made.code[part.start : following]
            is_copy = part.start == made.copied
            for at, size, text in arch.disassembler.insns(code, buffer + part.start, name):
                offset = at - buffer
                insn = made.code[offset : offset + size]
                is_relocated = is_copy and insn not in originals
                yield DetourInsn(part.name, offset, text, is_relocated)

    # Prototype and arguments

    @cached_property
    def prototype(self) -> Prototype | None:
        """The function's prototype; None if the kernel's types do not include it."""
        btf = self.kernel.btf
        if btf is None or self.place.where.module is not None:
            return None
        try:
            return prototype(btf, self.symbol.name)
        except KernelError as error:
            if error.errno not in (ENOENT, ENODATA):
                raise
            return None

    @property
    def prototype_text(self) -> str:
        """The prototype in C, or a text with the reason why it isn't known."""
        if self.prototype is not None:
            return self.prototype.text
        count = self.kernel.argument_count(self.symbol.name)
        if count is not None and self.kernel.btf is None:
            return f"no prototype: this kernel has no BTF; {count} parameter{'s' * (count != 1)}"
        return f"no prototype: {self._no_prototype}"

    @property
    def _no_prototype(self) -> str:
        """The reason why the function's prototype isn't known."""
        if why := changed_parameters(self.symbol.name):
            return why
        if self.place.where.module is not None:
            return f"types of modules are not read ({self.place.where.module})"
        return "it is not in the BTF" if self.kernel.btf else "this kernel has no BTF"

    @property
    def unknown_arguments(self) -> str:
        """The reason why it isn't known which parameters the function has; "" if they are known."""
        is_known = self.prototype is not None or self.kernel.argument_count(self.symbol.name) is not None
        return "" if is_known else self._no_prototype

    @property
    def argument_words(self) -> int | None:
        """Number of words that the function's parameters take, as $argN counts them; None if unknown."""
        return None if self.prototype is None else self.prototype.words(self.judge.arch.word_size)

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The function's parameters, with the fetch arguments that read them at the explained address.

        Empty if a probe at this address is refused.
        """
        if self.verdict.outcome is ProbeOutcome.REFUSED:
            return ()
        parameters: tuple[Parameter, ...] = ()
        if self.prototype is not None:
            parameters = self.prototype.parameters
        elif (count := self.kernel.argument_count(self.symbol.name)) is not None:
            word = self.judge.arch.word_size
            parameters = (Parameter("", "", word, f"x{8 * word}", False),) * count
        _, on_entry = self.judge.checker.moved_place(self.probed)
        return arguments_at(self.judge.arch, self.entry_values, self.address, parameters, on_entry=on_entry)

    @property
    def insn_text(self) -> str:
        """Text of the instruction at the explained address; "" if the address is inside an instruction."""
        starts = [*self.judge.checker.boundaries(self.symbol), self.symbol.address + len(self._code)]
        end = next((last for first, last in pairwise(starts) if first == self.address), self.address)
        base = self.symbol.address
        return self._text(self._code[self.address - base : end - base], self.address)

    @property
    def never_returns(self) -> bool:
        """Whether no path of the function leads to a return, so that a return probe is never hit."""
        return not self.entry_values.returns

    @property
    def clones(self) -> Sequence[str]:
        """Functions that the compiler made from this one; calls of them do not hit a probe on this one."""
        return self.kernel.clones(self.symbol.name, self.place.where.module)

    @cached_property
    def entry_values(self) -> EntryValues:
        """Analysis that finds the registers and stack words that hold values from the function's entry."""
        symbol = self.symbol
        return EntryValues(
            self.judge.arch,
            self._code,
            symbol.address,
            self.kernel.ways,
            is_function=COLD_PART.search(symbol.name) is None,
            has_jump_table=any(map(self.judge.checker.has_jump_table, (symbol, *self._cold_parts))),
            cold=[(part.address, self.judge.checker.unpatched_code(part)) for part in self._cold_parts],
        )

    # Text

    @cached_property
    def _cold_parts(self) -> tuple[Symbol, ...]:
        """The parts of the function that the compiler split off, and to which the function jumps."""
        targets = {insn.target for insn in self._frame_insns.values() if insn.target is not None}
        places = (self.kernel.tables.kallsyms.lookup(target) for target in sorted(targets))
        parts = dict.fromkeys(place.symbol for place in places if place is not None)
        return tuple(part for part in parts if COLD_PART.sub("", part.name) == self.symbol.name != part.name)

    @cached_property
    def _frame_insns(self) -> Mapping[int, Any]:
        return dict(self.judge.arch.frame_insns(self._code, self.symbol.address, switches_stack=False))

    @cached_property
    def _code(self) -> bytes:
        return self.judge.checker.unpatched_code(self.symbol)

    def _text(self, code: bytes, addr: int) -> str:
        return "; ".join(text for _, _, text in self.judge.arch.disassembler.insns(code, addr, self._name))

    def _reason(self, judge: Judge, verdict: Verdict) -> str:
        rejection = verdict.rejection
        if rejection is None:
            return ""
        reason = rejection.reason
        if reason in (RejectReason.NOTRACE, RejectReason.BLACKLISTED, RejectReason.NOT_BUILT):
            return str(reason.value)
        return judge.checker.rejection_text(rejection)


def _insns_of(arch: Arch, region: Region) -> frozenset[bytes]:
    """Return the machine code of each instruction that a jump replaces."""
    replaced = region.code[: region.end - region.addr]
    starts = [*arch.instruction_boundaries(replaced, region.addr), region.end]
    return frozenset(
        region.code[first - region.addr : last - region.addr] for first, last in pairwise(starts)
    )
