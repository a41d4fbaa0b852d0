"""Verdicts: how Linux treats a probe on an instruction of a subject, judged by bytes and tables only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from functools import cached_property

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.probe_rules import probe_rules_named
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.analysis.tactic import Tactics
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.arch.riscv.insn import RVI_SIZE
from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.kallsyms import Location, Symbol
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.kprobes.codegen.guest_code import BreakpointKind, breakpoint_kind
from emulated_kernel.kprobes.profile import (
    RISCV_PROFILE,
    RISCV_PROFILES,
    Profile,
    check_architecture,
    profile_named,
    with_strategy,
)
from emulated_kernel.util.fast_dataclass import dataclass, replace
from emulated_kernel.util.linux_rule import series_of
from kprobefs.measure.coverage_subject import Subject

X86_PROFILE = "linux-6.1"
LINUX_RULES = {"optprobe": "optprobe-linux"}
"""Name of an optimization policy -> name of the policy that applies only Linux's rules.

The policy `optprobe` also checks branches from other functions.
"""
_X86_FILLER = b"\0\xcc"
_INT3 = 0xCC


class ProbeOutcome(Enum):
    """Outcome of a probe: the way in which it takes its hits, or its refusal.

    The values are the names in the output.
    """

    __hash__ = object.__hash__

    OPTIMIZED = "optimized"
    BREAKPOINT = "breakpoint"
    FTRACE = "ftrace"
    REFUSED = "refused"


WITH_BREAKPOINT = (ProbeOutcome.BREAKPOINT, ProbeOutcome.OPTIMIZED)
"""Outcomes of probes with a breakpoint. An optimized probe has one before its jump is written."""


def outcome_of(reason: RejectReason | Tactics | None) -> ProbeOutcome:
    """Return the outcome to which a reason leads; tactics or None mean that a jump is possible."""
    if not isinstance(reason, RejectReason):
        return ProbeOutcome.OPTIMIZED
    if reason.errno:
        return ProbeOutcome.REFUSED
    return ProbeOutcome.FTRACE if reason is RejectReason.FTRACE else ProbeOutcome.BREAKPOINT


@dataclass(frozen=True, slots=True)
class Verdict:
    """Linux's decision about a probe event on one instruction."""

    rejection: Rejection | None
    """The first rule that refuses the probe or its jump; None if the probe is optimized."""
    region: Region | None
    """The region that the jump replaces; None if there is no jump."""

    @property
    def outcome(self) -> ProbeOutcome:
        """Way in which the probe takes its hits, or its refusal."""
        return outcome_of(None if self.rejection is None else self.rejection.reason)


def chosen_profile(name: str | None, arch: str, tables: ProbedTables) -> Profile:
    """Return the profile called `name`, or, if `name` is None, the profile that fits the kernel.

    A distribution's kernel has the profile that profile_of() returns. Raises: KernelError (no such profile,
    or it is for another architecture than the kernel).
    """
    usual = RISCV_PROFILE if arch.startswith("riscv") else X86_PROFILE
    if name is not None and isinstance(tables, KernelImage):
        check_architecture(name, arch)
    if name is not None or not isinstance(tables, LinuxKernel):
        return profile_named(name or usual)
    from emulated_kernel.guests.linux.probing.detect_interface import profile_of

    return profile_of(tables)


def own_profile(profile: Profile, kernel: LinuxKernel) -> Profile:
    """Return a profile for the own kprobes of an arm64 or riscv64 kernel, which have no jumps.

    `profile`: the profile of kprobefs's kprobes in the kernel.
    """
    name = f"linux-{series_of(kernel.release)}"
    return replace(profile, name=name, optimizer=False, ftrace=bool(kernel.mcount))


def profile_text(name: str, tables: ProbedTables) -> str:
    """Return the text that shows a profile's name in the output.

    For a RISC-V profile and a kernel of kprobefs's own, the text also says that a mount needs --profile NAME.
    Without the option, such a mount has no jumps.
    """
    if name in RISCV_PROFILES and isinstance(tables, KernelImage):
        return f"{name} (a mount needs --profile {name} for it)"
    return name


class Judge:
    """Decides how a probe on an instruction is treated, for one subject and one profile."""

    def __init__(self, subject: Subject, profile: Profile) -> None:
        self.subject = subject
        self.arch = arch_named(subject.arch)
        self.profile = profile
        names = (LINUX_RULES.get(name, name) for name in profile.strategies)
        builds_jumps = profile.optimizer and subject.has_optprobes is not False
        self.strategy = self.arch.strategy(names) if builds_jumps else None
        self._rules = probe_rules_named(profile.probe_rules)
        self.checker = self.arch.probe_checker(
            subject.tables, self.strategy, ftrace=profile.ftrace, rules=self._rules
        )
        if subject.has_own_kprobes:
            self.checker.refuse_sites(subject.refused_sites, RVI_SIZE)
        self._others = dict[str, Judge]()
        self._is_x86 = subject.arch in ("x86_64", "i386")

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """Return sentences for the output: the CPUs and the kprobes for which the verdicts are valid."""
        if self.subject.has_own_kprobes:
            return self.subject.remarks
        own = self.subject.own_kprobes(has_jumps=self.strategy is not None)
        return (*self.subject.remarks, *([own] if own else []))

    def with_strategy(self, name: str) -> Judge:
        """Return a judge of the same subject with the optimization policy `name`.

        The judge is cached, because building its index of references takes time.

        Raises: KernelError (no such policy, or the profile has no optimizer).
        """
        found = self._others.get(name)
        if found is None:
            found = Judge(self.subject, with_strategy(self.profile, name))
            self._others[name] = found
        return found

    def place(self, where: Location) -> Location:
        """Return where Linux puts a probe requested at `where`: if this is a landing pad, after the pad."""
        return self.checker.moved_place(where)[0]

    def _entry(self, symbol: Symbol) -> int:
        """Return the address at which Linux puts a probe that is requested at a function's start."""
        return symbol.address + self.place(Location(symbol, 0)).offset

    def reasons(self, symbol: Symbol) -> Collection[RejectReason | Tactics | None]:
        """Return, for each instruction of a function except filler, the first reason against a jump at it.

        In place of a reason, there are tactics or None if a jump is allowed; see ProbeChecker.reasons(). If
        kprobe events refuse the function, each reason is NOTRACE. A landing pad counts as the instruction to
        which Linux moves its probe.
        """
        if self.is_notrace(symbol):
            found: Mapping[int, RejectReason | Tactics | None] = dict.fromkeys(
                self.checker.boundaries(symbol), RejectReason.NOTRACE
            )
        else:
            found = self.checker.reasons(symbol)
        entry = self._entry(symbol)
        if entry != symbol.address and entry in found:
            found = {**found, symbol.address: found[entry]}
        code = self._filled_code(symbol)
        start = symbol.address
        end = start + len(code)
        if self._is_x86 and _INT3 in code:
            return [reason for addr, reason in found.items() if addr < end and code[addr - start] != _INT3]
        if len(code) == symbol.size:
            return found.values()
        return [reason for addr, reason in found.items() if addr < end]

    def _filled_code(self, symbol: Symbol) -> bytes:
        """Return a function's machine code without the filler at its end.

        Zeros at the function's end count as filler. On x86, int3 is filler too; boot also writes it after
        returns.
        """
        filler = _X86_FILLER if self._is_x86 else b"\0"
        return self.subject.tables.read(symbol.address, symbol.size).rstrip(filler)

    def verdicts(self, symbol: Symbol) -> dict[int, Verdict]:
        """Return a map address -> verdict, for each instruction of a function except filler.

        A landing pad has the verdict on the instruction to which Linux moves its probe.
        """
        forbidden = Rejection(RejectReason.NOTRACE, symbol.address) if self.is_notrace(symbol) else None
        found: dict[int, Verdict] = {}
        code = self._filled_code(symbol)
        start = symbol.address
        for addr, refused, region in self.checker.check_each_insn(symbol):
            if addr >= start + len(code) or (self._is_x86 and code[addr - start] == _INT3):
                continue
            rejection = forbidden or refused
            if rejection is None and isinstance(region, Rejection):
                rejection = region
            is_jump = rejection is None and isinstance(region, Region)
            found[addr] = Verdict(rejection, region if is_jump and isinstance(region, Region) else None)
        entry = self._entry(symbol)
        if start in found and entry in found:
            found[start] = found[entry]
        return found

    def verdict(self, where: Location) -> Verdict:
        """Return the verdict on a probe at `where`, which may be inside an instruction."""
        where = self.place(where)
        addr = where.symbol.address + where.offset
        checker = self.checker
        refused = (
            Rejection(RejectReason.NOTRACE, where.symbol.address) if self.is_notrace(where.symbol) else None
        )
        refused = refused or checker.may_probe(addr)
        if refused is not None:
            return Verdict(refused, None)
        region = checker.optimized_region(addr)
        return Verdict(region, None) if isinstance(region, Rejection) else Verdict(None, region)

    def breakpoint_kind(self, where: Location) -> BreakpointKind | None:
        """Return how a breakpoint at a place executes the probed instruction.

        Return None if a probe at the place is refused or has no breakpoint.
        """
        if self.verdict(where).outcome not in WITH_BREAKPOINT:
            return None
        where = self.place(where)
        addr = where.symbol.address + where.offset
        code = self.checker.unpatched_code(where.symbol)[where.offset :][: self.arch.max_insn_size]
        may_fault = addr in self.checker.may_fault
        # The kind does not depend on the address of the copy.
        prepared = self.arch.prepare(code, addr, addr, rules=self._rules, may_fault=may_fault)
        return breakpoint_kind(prepared, self.profile)

    def is_notrace(self, symbol: Symbol) -> bool:
        """Return True if kprobe events refuse the function because it is notrace.

        A split-off part whose whole function is unknown counts as traceable.
        """
        if not self.profile.ftrace or not (self.subject.complete or self.checker.has_whole(symbol)):
            return False
        return not self.checker.is_traced(symbol)
