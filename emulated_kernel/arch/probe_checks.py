"""Where a kernel can be probed, and where a jump can take a breakpoint's place: from bytes and tables.

It needs no machine: the tables may be those of a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Generic, TypeVar

from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region
from emulated_kernel.arch.analysis.disassembly import Disassembler
from emulated_kernel.arch.analysis.function import Function, PatchSite, TextLayout
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason, RejectSubject
from emulated_kernel.arch.analysis.xrefs import CodeXrefs
from emulated_kernel.image.address_set import AddressSet
from emulated_kernel.image.kallsyms import Location, Symbol
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.util.fast_dataclass import dataclass

_PAD_SAMPLE = 8
"""Traced functions that are looked at for landing pads."""
MAX_KNOWN = 512
"""Functions whose analyses are kept, those that were asked about last."""
Analysis = TypeVar("Analysis")
"""What an architecture finds out about a function in one pass."""


@dataclass(frozen=True)
class OptimizationPolicy(Generic[Analysis]):
    """A set of rules by which a jump may take the place of a breakpoint; profiles name it."""

    name: str
    region: Callable[[Analysis, int], Region | Rejection]
    """What the jump replaces, or the first rule against it that is seen in the function itself."""
    entered: Callable[[Region], range] | None = None
    """Addresses that must not be branch targets from outside the function; None: not checked."""
    by_data: bool = False
    """Exception fixups and pointers in data count as well."""
    by_commit: bool = False
    """A probe asks for its jump by `length`, and a commit writes it; otherwise the optimizer does both."""
    reasons: Callable[[Any, AnalyzedFunction[Analysis]], dict[int, RejectReason | None]] | None = None
    """ProbeChecker.reasons() of a whole function, faster than one instruction after the other.

    It needs a probe checker of the architecture, and a function of which no part is in the blacklist."""
    pairs: Callable[[Analysis], int] | None = None
    """How many instructions of a function its authors count as optimizable, where they count otherwise."""


class AnalyzedFunction(Generic[Analysis]):
    """A function with a probe or a candidate in it; decoded at the first check of its instructions."""

    def __init__(self, symbol: Symbol, function: Function, analyse: Callable[[Function], Analysis]) -> None:
        self.symbol = symbol
        self.function = function
        self._analyse = analyse

    @cached_property
    def analysis(self) -> Analysis:
        return self._analyse(self.function)

    @cached_property
    def reserved(self) -> dict[int, RejectReason]:
        """Why its bytes that others patch or trap on can't be probed, by the first of Linux's checks.

        Linux: an fentry site up to v5.17; later ones let a breakpoint be written into what ftrace patches as
        a whole.
        """
        function = self.function
        found = dict[int, RejectReason]()
        for sites, reason in (
            (function.jump_labels, RejectReason.JUMP_LABEL),
            (function.static_calls, RejectReason.STATIC_CALL),
            ([PatchSite(bug, 1) for bug in function.bug_entries], RejectReason.BUG),
            (
                [PatchSite(site.addr + 1, site.size - 1) for site in function.fentry_sites],
                RejectReason.WITHIN_FENTRY,
            ),
        ):
            for site in sites:
                for addr in range(site.addr, site.addr + site.size):
                    found.setdefault(addr, reason)
        return found


class ProbeChecker(ABC, Generic[Analysis]):
    """Whether a probe can be registered and optimized; a function is decoded once, at its first check.

    Deviates: Linux looks for jumps into a region in the function alone that the region is in, as it is now.
    But its cold part, another symbol, jumps there too, and so does a jump label that is off now.
    """

    all_live: LiveRegisters
    """What is said where nothing is known."""
    bits: int
    """Of a word."""
    fentry_size: int
    """Bytes of an fentry site."""
    call_size = 0
    """Bytes of a static call site."""
    max_insn_size: int
    landing_pad: bytes = b""
    """What indirect calls may lead to, in front of a function's first instruction; no pads where empty."""
    """Bytes of the longest instruction."""

    def __init__(
        self,
        image: ProbedTables,
        strategy: OptimizationPolicy[Analysis] | None,
        disassembler: Disassembler,
        *,
        ftrace: bool,
    ) -> None:
        """`ftrace`: probes on fentry sites are called from there; otherwise the sites are plain nops."""
        self.strategy = strategy
        self._disassembler = disassembler
        self._image = image
        self._symbols = image.kallsyms
        self._ftrace = ftrace
        self.mcount: Set[int] = frozenset()
        """All fentry sites."""
        self.fentry: Set[int] = frozenset()
        """Those that ftrace calls probes from: all, or none."""
        self.may_fault: frozenset[int] = frozenset()
        """Instructions that have a fixup in __ex_table."""
        self.layout = self.text_layout(image)
        self._known: OrderedDict[int, AnalyzedFunction[Analysis]] = OrderedDict()
        self._entrances = CodeXrefs(image, self.bits, self.possible_branches)
        self.tables_changed()

    # What differs between architectures

    @abstractmethod
    def analyse(self, function: Function) -> Analysis:
        """Decode a function."""

    @abstractmethod
    def insns(self, analysis: Analysis) -> Collection[int]:
        """The addresses of a function's instructions."""

    @abstractmethod
    def check_insn(self, analysis: Analysis, addr: int) -> Rejection | None:
        """Why an instruction can't be executed elsewhere. Mirrors: arch_prepare_kprobe (v6.1)."""

    @abstractmethod
    def live_in(self, analysis: Analysis, addr: int) -> LiveRegisters:
        """What the function may still read from there on."""

    @abstractmethod
    def possible_branches(self, addr: int, code: bytes) -> Iterator[tuple[int, int]]:
        """Target and source of what looks like a direct branch, wherever instructions begin."""

    @abstractmethod
    def label_size(self, code: bytes) -> int:
        """Bytes of the jump label that begins so."""

    def text_layout(self, image: ProbedTables) -> TextLayout:
        """The ranges that symbols of an image tell."""
        core, *_ = image.text_ranges
        return TextLayout(text=range(*core))

    # Tables

    def tables_changed(self) -> None:
        """A module came or went: what was said of its addresses is void."""
        image = self._image
        self._text_ranges = sorted(image.text_ranges)
        self._blacklist = sorted(image.blacklist)
        mcount = image.mcount
        self.mcount = mcount if isinstance(mcount, AddressSet) else frozenset(mcount)
        self._mcount = mcount.in_order if isinstance(mcount, AddressSet) else sorted(mcount)
        self.fentry = self.mcount if self._ftrace else frozenset()
        self._exceptions = sorted(insn for insn, _ in image.ex_table)
        self.may_fault = frozenset(self._exceptions)
        self._bugs = sorted(image.bugs)
        self._labels = sorted(code for code, *_ in image.jump_labels)
        self._static_calls = sorted(site for site, *_ in image.static_calls)
        self._entrances.tables_changed()
        core = self.layout.text
        for start in [start for start in self._known if start not in core]:
            del self._known[start]

    # Registering

    def may_probe(self, addr: int) -> Rejection | None:
        """Why a kprobe can't be registered there; None: it can.

        Mirrors: kernel/kprobes.c:register_kprobe (v6.1).
        """
        where = self._symbols.lookup(addr)
        if where is None:
            return Rejection(RejectReason.NO_SYMBOL, addr)
        return self.check_address_safe(where, addr) or self.check_prepare(addr)

    def function_entry(self, where: Location, addr: int) -> int | None:
        """Where a probe of an entry stands: behind its landing pad; None where `addr` is within the function.

        Mirrors: arch/x86/kernel/kprobes/core.c:arch_adjust_kprobe_addr (v6.1).
        """
        start = body = addr - where.offset
        size = len(self.landing_pad)
        # No pad is where an fentry site is. Linux makes a no-op of one that no branch needs.
        may_have = size and start not in self.mcount
        if may_have and (start + size in self.mcount or self._is_pad(start)) and self._has_pads:
            body += size
        return body if addr in (start, body) else None

    def is_entry_site(self, where: Location) -> bool:
        """Whether an fentry site is that of the function it lies in.

        Linux: the site of a weak function that was dropped lies in the function in front of it.
        Mirrors: kernel/trace/ftrace.c:test_for_valid_rec (v6.1)
        """
        return not where.offset or (where.offset <= len(self.landing_pad) and self._has_pads)

    def _is_pad(self, addr: int) -> bool:
        is_text = _span(self._text_ranges, addr) is not None
        return is_text and self._image.read(addr, len(self.landing_pad)) == self.landing_pad

    @cached_property
    def _has_pads(self) -> bool:
        """Whether indirect branches are checked: then most functions that are traced have pads."""
        size = len(self.landing_pad)
        return bool(size) and any(self._is_pad(site - size) for site in self._mcount[:_PAD_SAMPLE])

    def check_address_safe(self, where: Location, addr: int) -> Rejection | None:
        """What the tables have against a probe at `addr`, which is `where` in the symbols' words.

        Mirrors: kernel/kprobes.c:check_kprobe_address_safe (v6.1).
        """
        if _span(self._text_ranges, addr) is None:
            return Rejection(RejectReason.NOT_TEXT, addr)
        forbidden = self._forbidden(where.symbol, addr)
        if forbidden is not None:
            return forbidden
        reason = self._function(where.symbol).reserved.get(addr)
        return None if reason is None else Rejection(reason, addr)

    def check_prepare(self, addr: int) -> Rejection | None:
        """Why the instruction there, which the tables don't forbid, can't be probed."""
        if addr in self.fentry:
            return None
        found = self.check_insn(self._analysis(addr), addr)
        return found and self._named(found)

    def check_traced(self, addr: int) -> Rejection | None:
        """Why events keep out of the function: tracing itself may use it.

        Mirrors: kernel/trace/trace_kprobe.c:within_notrace_func (v6.1).
        """
        where = self._symbols.lookup(addr)
        if where is None or self.is_traced(where.symbol):
            return None
        return Rejection(RejectReason.NOTRACE, where.symbol.address)

    def is_traced(self, symbol: Symbol) -> bool:
        """Whether ftrace traces a function, or the one that it was split off from."""
        if _inside(self._mcount, symbol):
            return True
        whole = self._split_from(symbol)
        found = None if whole is None else self._symbols.lookup(whole)
        return found is not None and bool(_inside(self._mcount, found.symbol))

    def _forbidden(self, symbol: Symbol, addr: int) -> Rejection | None:
        """By the blacklist. A part that the compiler split off (`foo.cold`, `foo.part.0`) follows `foo`.

        Mirrors: kernel/kprobes.c:within_kprobe_blacklist (v6.1).
        """
        entry = _span(self._blacklist, addr)
        if entry is None:
            whole = self._split_from(symbol)
            entry = None if whole is None else _span(self._blacklist, whole)
        return None if entry is None else Rejection(RejectReason.BLACKLISTED, entry)

    def _split_from(self, symbol: Symbol) -> int | None:
        """Where the function begins that the compiler made a part of this name of."""
        base, dot, _ = symbol.name.partition(".")
        return self._symbols.lookup_name(base) if dot else None

    def has_whole(self, symbol: Symbol) -> bool:
        """Whether it is no part that the compiler split off, or one of a function that is known."""
        return "." not in symbol.name or self._split_from(symbol) is not None

    # Optimizing

    def optimized_region(self, addr: int) -> Region | Rejection:
        """What the jump of a probe there would replace, or why there can't be one; `addr` may be probed.

        Mirrors: arch_prepare_optimized_kprobe, can_optimize (v6.1).
        """
        where = self._symbols.lookup(addr)
        if where is None:
            return Rejection(RejectReason.NO_SYMBOL, addr)
        found = self._detoured(self._function(where.symbol), addr)
        return self._named(found) if isinstance(found, Rejection) else found

    def _detoured(self, known: AnalyzedFunction[Analysis], addr: int) -> Region | Rejection:
        strategy = self.strategy
        if addr in self.fentry:
            return Rejection(RejectReason.FTRACE, addr)
        if strategy is None:
            return Rejection(RejectReason.NOT_BUILT, addr)
        found = strategy.region(known.analysis, addr)
        if strategy.entered is None or isinstance(found, Rejection):
            return found
        return self._entered(strategy, strategy.entered(found), known.symbol) or found

    def _entered(
        self, strategy: OptimizationPolicy[Analysis], inside: range, symbol: Symbol
    ) -> Rejection | None:
        """A way into a region that its function doesn't show."""
        ways = self._entrances
        found = ways.label(inside)
        if found is None and strategy.by_data:
            found = ways.fixup(inside) or ways.pointer(inside)
        return found or ways.branch(inside, symbol, self._is_insn)

    def live_at(self, addr: int) -> LiveRegisters:
        """What the function at `addr` may still read from there on; everything where that isn't known."""
        where = self._symbols.lookup(addr)
        return self.all_live if where is None else self.live_in(self._function(where.symbol).analysis, addr)

    # Whole functions

    def check_each_insn(self, symbol: Symbol) -> Iterator[tuple[int, Rejection | None, Region | Rejection]]:
        """Of each instruction of a function: address, may_probe() and detoured(), findings without `what`."""
        known = self._function(symbol)
        forbidden = self._has_forbidden(symbol)
        for addr in self.insns(known.analysis):
            refused = self._forbidden(symbol, addr) if forbidden else None
            if refused is None and addr in known.reserved:
                refused = Rejection(known.reserved[addr], addr)
            if refused is None and addr not in self.fentry:
                refused = self.check_insn(known.analysis, addr)
            yield addr, refused, self._detoured(known, addr)

    def boundaries(self, symbol: Symbol) -> Collection[int]:
        """Where the instructions of a function begin."""
        return self.insns(self._function(symbol).analysis)

    def reasons(self, symbol: Symbol) -> dict[int, RejectReason | None]:
        """Of each instruction, by address, the first reason against a jump there; None: there can be one."""
        at_once = self.strategy and self.strategy.reasons
        if at_once and not self._has_forbidden(symbol):
            return at_once(self, self._function(symbol))
        if self._is_forbidden(symbol):
            return dict.fromkeys(self.boundaries(symbol), RejectReason.BLACKLISTED)
        found: dict[int, RejectReason | None] = {}
        for addr, refused, outcome in self.check_each_insn(symbol):
            finding = refused or outcome
            found[addr] = finding.reason if isinstance(finding, Rejection) else None
        return found

    def pairs(self, symbol: Symbol) -> int | None:
        """See OptimizationPolicy.pairs; None where that doesn't count so."""
        count = self.strategy and self.strategy.pairs
        return count(self._function(symbol).analysis) if count else None

    def _is_forbidden(self, symbol: Symbol) -> bool:
        """Whether all of a function is in the blacklist."""
        whole = self._split_from(symbol)
        if whole is not None and _span(self._blacklist, whole) is not None:
            return True
        at = bisect_right(self._blacklist, symbol.address, key=itemgetter(0)) - 1
        return at >= 0 and self._blacklist[at][1] >= symbol.address + symbol.size

    def _has_forbidden(self, symbol: Symbol) -> bool:
        """Whether the blacklist has anything to do with a function."""
        end = bisect_left(self._blacklist, symbol.address + symbol.size, key=itemgetter(0))
        # Spans are disjoint: one that reaches into the function is the last that begins before its end.
        if end > 0 and self._blacklist[end - 1][1] > symbol.address:
            return True
        return "." in symbol.name and self._is_forbidden(symbol)

    # Functions

    def _analysis(self, addr: int) -> Analysis:
        where = self._symbols.lookup(addr)
        assert where is not None, "callers have looked for the symbol"
        return self._function(where.symbol).analysis

    def _is_insn(self, symbol: Symbol, addr: int) -> bool:
        return addr in self.insns(self._function(symbol).analysis)

    def _function(self, symbol: Symbol) -> AnalyzedFunction[Analysis]:
        start = symbol.address
        known = self._known.get(start)
        if known is None:
            if len(self._known) == MAX_KNOWN:
                self._known.popitem(last=False)
            known = self._known[start] = AnalyzedFunction(symbol, self._read(symbol), self.analyse)
        else:
            self._known.move_to_end(start)
        return known

    def _read(self, symbol: Symbol) -> Function:
        size = symbol.size
        if symbol.address in self.layout.text:
            # The last function's size runs up to the next symbol, which may be data.
            size = min(size, self.layout.text.stop - symbol.address)
        read = self._image.read
        labels = [PatchSite(code, self.label_size(read(code, 2))) for code in _inside(self._labels, symbol)]
        fentry = _inside(self._mcount, symbol) if self.fentry else ()
        return Function(
            name=symbol.name,
            addr=symbol.address,
            size=symbol.size,
            code=read(symbol.address, size),
            fentry_sites=tuple(PatchSite(site, self.fentry_size) for site in fentry),
            exception_entries=frozenset(_inside(self._exceptions, symbol)),
            bug_entries=frozenset(_inside(self._bugs, symbol)),
            jump_labels=tuple(labels),
            static_calls=tuple(
                PatchSite(site, self.call_size) for site in _inside(self._static_calls, symbol)
            ),
        )

    def _named(self, finding: Rejection) -> Rejection:
        if finding.reason.about is None:
            return finding
        is_insn = finding.reason.about is RejectSubject.INSN
        return replace(finding, blamed=self.insn_text if is_insn else self.register_text)

    def register_text(self, addr: int) -> str:
        """Which register isn't free there, and what needs it; on RISC-V alone jumps take one."""
        raise AssertionError(f"{addr:#x}: no jump of this architecture needs a register")

    def insn_text(self, addr: int) -> str:
        """The instruction there, in the assembler's words."""
        where = self._symbols.lookup(addr)
        size = self.max_insn_size
        if where is not None:
            size = min(size, where.symbol.size - where.offset)
        _, _, text = next(self._disassembler.insns(self._image.read(addr, size), addr))
        return text


def _inside(addresses: Sequence[int], symbol: Symbol) -> Sequence[int]:
    """Those of the sorted addresses that lie in a function: a kernel has tens of thousands of them."""
    first = bisect_left(addresses, symbol.address)
    return addresses[first : bisect_left(addresses, symbol.address + symbol.size)]


def _span(spans: Sequence[tuple[int, int] | tuple[int, int, str]], addr: int) -> int | None:
    """Where the one of the sorted, disjoint spans begins that holds `addr`."""
    at = bisect_right(spans, addr, key=itemgetter(0)) - 1
    return spans[at][0] if at >= 0 and addr < spans[at][1] else None
