"""Probe checks: whether an address can be probed, and whether a jump can replace the breakpoint at it.

The checks need only bytes and tables, not a machine; the tables may come from a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import cached_property
from operator import itemgetter
from typing import Any, Generic, TypeVar

from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region
from emulated_kernel.arch.analysis.disassembly import AddressName, Disassembler, address_names, unnamed
from emulated_kernel.arch.analysis.function import Function, PatchSite, TextLayout
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason, RejectSubject
from emulated_kernel.arch.analysis.tactic import Tactics
from emulated_kernel.arch.analysis.xrefs import CodeXrefs, Reference
from emulated_kernel.image.address_set import AddressSet, firsts_in_order, in_order
from emulated_kernel.image.kallsyms import Location, Symbol
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.util.fast_dataclass import dataclass, replace

PAD_SAMPLE = 8
"""Number of fentry sites that are examined to find out whether the kernel has landing pads."""
_BEYOND = 1 << 64
"""Number above all addresses."""
MAX_KNOWN = 512
"""Maximum number of functions whose analyses are cached; the least recently used one is dropped."""
Analysis = TypeVar("Analysis")
"""Type of an architecture's analysis of one function, such as X86FunctionAnalysis."""


@dataclass(frozen=True)
class OptimizationPolicy(Generic[Analysis]):
    """The rules that decide whether a jump may replace a breakpoint. Profiles refer to a policy by name."""

    name: str
    region: Callable[[Analysis, int], Region | Rejection]
    """(analysis, address) -> region that a jump replaces, or rejection by the first rule against the jump."""
    entered: Callable[[Region], range] | None = None
    """Region -> addresses that code outside the function must not branch to.

    None if the policy doesn't check branches from outside the function.
    """
    by_data: bool = False
    """Whether the check of `entered` also treats exception fixups and pointers in data as branches."""
    by_code: bool = False
    """Whether the check of `entered` also treats instructions that load an address (lea) as branches."""
    beyond: OptimizationPolicy[Analysis] | None = None
    """Next policy to ask if this one rejects a jump in a function that ftrace knows; None if there is none.

    The next policy may have a `beyond` policy, too. The restriction to functions that ftrace knows excludes
    assembly, such as the trampolines of ftrace and of static calls. The kernel rewrites calls in these
    trampolines while it runs, and no table lists these calls.
    """
    by_commit: bool = False
    """Whether jumps are written by a djprobe commit, and only for probes whose Kprobe.length is not 0.

    If False, the optimizer writes the jumps of all probes, whatever their length is.
    """
    reasons: Callable[[Any, AnalyzedFunction[Analysis]], dict[int, RejectReason | None]] | None = None
    """Faster implementation of ProbeChecker.reasons(), for a whole function; None if there is none.

    The implementation takes a probe checker of the architecture, and a function without blacklisted
    addresses.
    """
    pairs: Callable[[Analysis], int] | None = None
    """Analysis -> number of instructions that the policy's authors count as optimizable.

    Their rule looks at pairs of successive instructions. None if the authors count as ProbeChecker does.
    """


class AnalyzedFunction(Generic[Analysis]):
    """A function of the kernel, and the results of its analysis.

    The function is decoded when one of its instructions is first checked.
    """

    def __init__(self, symbol: Symbol, function: Function, analyse: Callable[[Function], Analysis]) -> None:
        self.symbol = symbol
        self.function = function
        self._analyse = analyse

    @cached_property
    def analysis(self) -> Analysis:
        return self._analyse(self.function)

    @cached_property
    def reserved(self) -> dict[int, RejectReason]:
        """Address of a byte that can't be probed, because another subsystem uses it -> reason.

        Such subsystems patch jump labels, static calls and fentry sites, or handle the traps that __bug_table
        lists. If there are several reasons, the one that Linux checks first counts.

        Linux up to v5.17 refuses whole fentry sites. Later versions allow a breakpoint inside an instruction
        that ftrace patches as a whole.
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
    """Decides where a probe can be registered and optimized. Each function is decoded at its first check.

    Linux searches for jumps into a region only in the current text of the function around it. Deviates: a
    policy with `entered` also considers jumps from other places, such as the function's cold part, which is
    another symbol. It considers disabled jump labels, too.
    """

    all_live: LiveRegisters
    """Result of live_at() for an address whose function isn't known."""
    bits: int
    """Size of a word in bits."""
    fentry_size: int
    """Size in bytes of an fentry site."""
    call_size = 0
    """Size in bytes of a static call site; 0 if the architecture has none."""
    max_insn_size: int
    """Size in bytes of the longest instruction."""
    landing_pad: bytes = b""
    """Instruction at a function's start to which indirect branches must lead; empty if there is none."""

    def __init__(
        self,
        image: ProbedTables,
        strategy: OptimizationPolicy[Analysis] | None,
        disassembler: Disassembler,
        *,
        ftrace: bool,
    ) -> None:
        """Prepare checks of addresses in the kernel of `image`.

        `strategy`: optimization policy; None if no jump is allowed. `ftrace`: True if ftrace calls the probes
        on fentry sites; False if the sites are plain nops.
        """
        self.strategy = strategy
        self._disassembler = disassembler
        self._image = image
        self._symbols = image.kallsyms
        self._ftrace = ftrace
        self.name = address_names(self._symbols.lookup)
        """Function: address -> its name as symbol and offset, or None if it has no such name."""
        # Bound once, because the rejections of thousands of probes keep it.
        self._describe = self.rejection_text
        self.mcount: Set[int] = frozenset()
        """Addresses of all fentry sites."""
        self.fentry: Set[int] = frozenset()
        """Addresses of the fentry sites from which ftrace calls probes.

        These are all fentry sites, or none if ftrace calls no probes.
        """
        self._refused_sites: Set[int] = frozenset()
        """Addresses in fentry sites at which a probe is refused; see refuse_sites()."""
        self._site_insn_size = self.fentry_size
        self.may_fault: frozenset[int] = frozenset()
        """Addresses of the instructions that have a fixup in __ex_table."""
        self.layout = self.text_layout(image)
        self._known: OrderedDict[int, AnalyzedFunction[Analysis]] = OrderedDict()
        self._entrances = CodeXrefs(image, self.bits, self.possible_branches, self.possible_addresses)
        self.tables_changed()

    # Hooks of the architectures

    @abstractmethod
    def analyse(self, function: Function) -> Analysis:
        """Decode a function and return its analysis."""

    @abstractmethod
    def insns(self, analysis: Analysis) -> Collection[int]:
        """Return the addresses of a function's instructions."""

    @abstractmethod
    def check_insn(self, analysis: Analysis, addr: int) -> Rejection | None:
        """Return the reason why the instruction at `addr` can't be executed out of line; None if it can.

        Mirrors: arch/x86/kernel/kprobes/core.c:arch_prepare_kprobe (v6.1).
        """

    def insn_size(self, where: Location) -> int:
        """Return an upper limit for the size in bytes of the instruction at `where`, within its function.

        A subclass may return the exact size. check_prepare() must have allowed the instruction.
        """
        return min(self.max_insn_size, where.symbol.size - where.offset)

    @abstractmethod
    def live_in(self, analysis: Analysis, addr: int) -> LiveRegisters:
        """Return the registers that the function may still read from `addr` on."""

    @abstractmethod
    def has_jump_table(self, symbol: Symbol) -> bool:
        """Return True if an indirect jump of a function may lead to another address in the function."""

    @abstractmethod
    def possible_branches(self, addr: int, code: bytes, window: range | None) -> Iterator[Reference]:
        """Yield (target, source) for each bit pattern in `code` that looks like a direct branch.

        `addr`: address of `code`. Patterns may start in the middle of an instruction. `window`: range of
        addresses; branches to other addresses may be omitted. If the window is None, no branch may be
        omitted.
        """

    @abstractmethod
    def possible_addresses(self, addr: int, code: bytes, window: range | None) -> Iterator[Reference]:
        """Yield (target, source) for each bit pattern in `code` that may load an address of text.

        `addr`: address of `code`. `window`: range of targets; other targets may be omitted. If the window
        is None, no target may be omitted.
        """

    @abstractmethod
    def label_size(self, code: bytes) -> int:
        """Return the size in bytes of the jump label whose first bytes are `code`."""

    def fentry_nop(self, code: bytes) -> bytes:
        """Return the nop that boot writes to an fentry site; `code` is the site's content in the image."""
        return code

    def text_layout(self, image: ProbedTables) -> TextLayout:
        """Return the address ranges of the kernel's text that the checks use, as the image defines them."""
        core, *_ = image.text_ranges
        return TextLayout(text=range(*core))

    # Tables

    def tables_changed(self) -> None:
        """Read the image's tables again, and drop the analyses of module functions.

        The caller has loaded or unloaded a module.
        """
        image = self._image
        self._text_ranges = sorted(image.text_ranges)
        self._blacklist = sorted(image.blacklist)
        mcount = image.mcount
        self.mcount = mcount if isinstance(mcount, AddressSet) else frozenset(mcount)
        self._mcount = in_order(mcount)
        self.fentry = self.mcount if self._ftrace and not self._refused_sites else frozenset()
        self._exceptions = firsts_in_order(image.ex_table)
        self.may_fault = frozenset(self._exceptions)
        self._bugs = in_order(image.bugs)
        self._labels = firsts_in_order(image.jump_labels)
        self._static_calls = firsts_in_order(image.static_calls)
        self._entrances.tables_changed()
        core = self.layout.text
        for start in [start for start in self._known if start not in core]:
            del self._known[start]

    def refuse_sites(self, sites: Set[int], insn_size: int) -> None:
        """From now on, refuse probes at `sites`, the addresses that ftrace changes.

        This is for a kernel whose ftrace calls no probes.

        `insn_size`: size in bytes of the instructions that boot writes to fentry sites. An instruction in an
        fentry site can be probed if its address is not in `sites`.
        Mirrors: kernel/kprobes.c:check_ftrace_location, without CONFIG_KPROBES_ON_FTRACE (v6.12).
        """
        self._refused_sites = sites
        self._site_insn_size = insn_size
        self.tables_changed()

    # Registering

    def may_probe(self, addr: int) -> Rejection | None:
        """Return the reason why a kprobe can't be registered at `addr`; None if it can.

        Mirrors: kernel/kprobes.c:register_kprobe (v6.1).
        """
        where = self._symbols.lookup(addr)
        if where is None:
            return Rejection(RejectReason.NO_SYMBOL, addr)
        return self.check_address_safe(where, addr) or self.check_prepare(where, addr)

    def function_entry(self, where: Location, addr: int) -> int | None:
        """Return the address at which Linux puts a probe on the entry of the function that contains `addr`.

        This is the function's start, or the address after its landing pad if it has one. If `addr` is neither
        of these addresses, return None. `where` is the place of `addr` as a symbol and offset.

        Mirrors: arch/x86/kernel/kprobes/core.c:arch_adjust_kprobe_addr (v6.1).
        """
        body = addr - where.offset
        start = body
        size = len(self.landing_pad)
        # A function whose first instruction is an fentry site has no landing pad. Linux replaces unneeded
        # pads by nops.
        may_have = self._has_pads and start not in self.mcount
        if may_have and (start + size in self.mcount or self._is_pad(start)):
            body += size
        return body if addr in (start, body) else None

    def moved_place(self, where: Location) -> tuple[Location, bool]:
        """Return the place of a probe that was requested at `where`, and whether it is a function's entry.

        A probe on a function's landing pad is moved to the instruction after the pad.
        Mirrors: kernel/kprobes.c:_kprobe_addr (v6.1).
        """
        addr = where.symbol.address + where.offset
        entry = self.function_entry(where, addr)
        if entry is None or entry == addr:
            return where, entry is not None
        return replace(where, offset=where.offset + entry - addr), True

    def is_entry_site(self, offset: int) -> bool:
        """Return True if an fentry site at `offset` in a function is at its start, or after its landing pad.

        Linux: the fentry site of a discarded weak function lies in the function before it. For such a site,
        return False.
        Mirrors: kernel/trace/ftrace.c:test_for_valid_rec (v6.1).
        """
        return not offset or (offset <= len(self.landing_pad) and self._has_pads)

    def _is_pad(self, addr: int) -> bool:
        return self._text_at(addr, len(self.landing_pad)) == self.landing_pad

    def _text_at(self, addr: int, size: int) -> bytes:
        """Return `size` bytes of text at `addr`, or b"" if they are not all in one range of text."""
        start = _span(self._text_ranges, addr)
        is_text = start is not None and start == _span(self._text_ranges, addr + size - 1)
        return self._image.read(addr, size) if is_text else b""

    @cached_property
    def _has_pads(self) -> bool:
        """Whether the kernel has landing pads, to judge by its first fentry sites."""
        size = len(self.landing_pad)
        return bool(size) and any(self._is_pad(site - size) for site in self._mcount[:PAD_SAMPLE])

    def check_address_safe(self, where: Location, addr: int) -> Rejection | None:
        """Return the reason why the image's tables forbid a probe at `addr`, or None if they allow it.

        `where` is the place of `addr` as a symbol and offset.
        Mirrors: kernel/kprobes.c:check_kprobe_address_safe (v6.1).
        """
        if _span(self._text_ranges, addr) is None:
            return self._named(Rejection(RejectReason.NOT_TEXT, addr))
        forbidden = self._forbidden(where.symbol, addr)
        if forbidden is not None:
            return self._named(forbidden)
        reason = self._function(where.symbol).reserved.get(addr)
        return None if reason is None else self._named(Rejection(reason, addr))

    def check_prepare(self, where: Location, addr: int) -> Rejection | None:
        """Return the reason why the instruction at `addr` can't be probed, or None if it can.

        `where` is the place of `addr` as a symbol and offset. check_address_safe() must have allowed `addr`.
        """
        if addr in self.fentry:
            return None
        found = self.check_insn(self._function(where.symbol).analysis, addr)
        return found and self._named(found)

    def check_traced(self, addr: int) -> Rejection | None:
        """Return the rejection of a kprobe event at `addr` if ftrace can't trace the function, else None.

        Tracing itself may use such a function. Also return None if no symbol contains `addr`.

        Mirrors: kernel/trace/trace_kprobe.c:within_notrace_func (v6.1).
        """
        where = self._symbols.lookup(addr)
        if where is None or self.is_traced(where.symbol):
            return None
        if _span(self._text_ranges, addr) is None:
            return self._named(Rejection(RejectReason.NOT_TEXT, addr))
        return self._named(Rejection(RejectReason.NOTRACE, where.symbol.address))

    def is_traced(self, symbol: Symbol) -> bool:
        """Return True if ftrace can trace `symbol`, or the function from which `symbol` was split off."""
        if self._has_fentry_site(symbol):
            return True
        whole = self._split_from(symbol)
        found = None if whole is None else self._symbols.lookup(whole)
        return found is not None and self._has_fentry_site(found.symbol)

    def _has_fentry_site(self, symbol: Symbol) -> bool:
        sites = self._mcount
        first = bisect_left(sites, symbol.address)
        return first < len(sites) and sites[first] < symbol.address + symbol.size

    def _fentry_sites(self, symbol: Symbol) -> Sequence[int]:
        """Return the addresses of all fentry sites inside a function."""
        return _inside(self._mcount, symbol)

    def _forbidden(self, symbol: Symbol, addr: int) -> Rejection | None:
        """Return a rejection if `addr` is a refused fentry site or in the kprobe blacklist; otherwise None.

        The blacklist entry of `foo` also covers parts that the compiler split off (`foo.cold`, `foo.part.0`).
        Mirrors: kernel/kprobes.c:within_kprobe_blacklist (v6.1).
        """
        if addr in self._refused_sites:
            return Rejection(RejectReason.AT_FENTRY, addr)
        entry = _span(self._blacklist, addr)
        if entry is None:
            whole = self._split_from(symbol)
            entry = None if whole is None else _span(self._blacklist, whole)
        return None if entry is None else Rejection(RejectReason.BLACKLISTED, entry)

    def _split_from(self, symbol: Symbol) -> int | None:
        """Return the address of the function from which the compiler split `symbol` off; None if unknown."""
        base, dot, _ = symbol.name.partition(".")
        return self._symbols.lookup_name(base) if dot else None

    def has_whole(self, symbol: Symbol) -> bool:
        """Return True if `symbol` is a whole function, or was split off from a function that is known.

        Return False if the compiler split it off from an unknown function.
        """
        return "." not in symbol.name or self._split_from(symbol) is not None

    # Optimizing

    def optimized_region(self, addr: int) -> Region | Rejection:
        """Return the region that the jump of a probe at `addr` replaces, or the rejection of the jump.

        may_probe() must have allowed `addr`.
        Mirrors: arch/x86/kernel/kprobes/opt.c:arch_prepare_optimized_kprobe, can_optimize (v6.1).
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
        found = self._allowed(strategy, known, addr)
        if strategy.beyond is None or isinstance(found, Region) or not self.is_traced(known.symbol):
            return found
        return self._beyond(strategy.beyond, known, addr, found)

    def _beyond(
        self,
        policy: OptimizationPolicy[Analysis] | None,
        known: AnalyzedFunction[Analysis],
        addr: int,
        linux: Rejection,
    ) -> Region | Rejection:
        """Return the region of a jump at `addr` by the first policy that allows the jump, or a rejection.

        Try `policy`, then the policy in its field `beyond`, and so on. If all reject the jump, return the
        rejection by the first policy. But if a later policy only lacks a free address for the detour
        (NO_PUN), return its rejection. `linux`: rejection of the jump by Linux's rule. It is stored in the
        region, and is the result if `policy` is None.
        """
        refused: Rejection | None = None
        while policy is not None:
            found = self._allowed(policy, known, addr)
            if isinstance(found, Region):
                return replace(found, linux=self._named(linux))
            if refused is None or found.reason is RejectReason.NO_PUN:
                refused = found
            policy = policy.beyond
        return refused or linux

    def _allowed(
        self, policy: OptimizationPolicy[Analysis], known: AnalyzedFunction[Analysis], addr: int
    ) -> Region | Rejection:
        """Return the region of a jump at `addr` by the rules of `policy`, or the rejection of the jump.

        `known`: the function that contains `addr`. The policy in the field `beyond` is not tried.
        """
        found = policy.region(known.analysis, addr)
        if policy.entered is None or isinstance(found, Rejection):
            return found
        return self._entered(policy, policy.entered(found), known.symbol) or found

    def _entered(
        self, strategy: OptimizationPolicy[Analysis], inside: range, symbol: Symbol
    ) -> Rejection | None:
        """Return a rejection if code or data outside the function `symbol` leads into `inside`; else None.

        Jump labels and branches always count. Fixups and pointers in data count only if `strategy` has
        by_data. An instruction that loads an address in `inside` counts only if `strategy` has by_code.
        """
        ways = self._entrances
        found = ways.label(inside)
        if found is None and strategy.by_data:
            found = ways.fixup(inside) or ways.pointer(inside)
        if found is None and strategy.by_code:
            found = ways.address(inside)
        return found or ways.branch(inside, symbol, self._is_insn)

    def live_at(self, addr: int) -> LiveRegisters:
        """Return the registers that the function may still read from `addr` on.

        All registers are live if no function is known at `addr`.
        """
        where = self._symbols.lookup(addr)
        return self.all_live if where is None else self.live_in(self._function(where.symbol).analysis, addr)

    # Whole functions

    def check_each_insn(self, symbol: Symbol) -> Iterator[tuple[int, Rejection | None, Region | Rejection]]:
        """Yield each instruction's address, and the results of may_probe() and optimized_region() for it.

        Rejection.describe is not set, so the text of a rejection has only the address and the rule.
        """
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
        """Return the addresses of a function's instructions."""
        return self.insns(self._function(symbol).analysis)

    def reasons(self, symbol: Symbol) -> Mapping[int, RejectReason | Tactics | None]:
        """Return a map: instruction address -> first reason against a probe or jump there.

        The value is None if Linux allows both. If Linux's rule refuses a jump and the policy allows it, the
        value is the tuple of the jump's tactics: the relaxed rules.
        """
        at_once = self.strategy and self.strategy.reasons
        if at_once and not self._has_forbidden(symbol):
            return at_once(self, self._function(symbol))
        if self._is_forbidden(symbol):
            return dict.fromkeys(self.boundaries(symbol), RejectReason.BLACKLISTED)
        found: dict[int, RejectReason | Tactics | None] = {}
        for addr, refused, outcome in self.check_each_insn(symbol):
            finding = refused or outcome
            found[addr] = finding.reason if isinstance(finding, Rejection) else finding.tactics or None
        return found

    def unpatched_code(self, symbol: Symbol) -> bytes:
        """Return a function's machine code, with nops at all fentry sites."""
        code = bytearray(self._function(symbol).function.code)
        for site in self._fentry_sites(symbol):
            at = site - symbol.address
            nop = self.fentry_nop(bytes(code[at : at + self.fentry_size]))
            code[at : at + len(nop)] = nop
        return bytes(code)

    def pairs(self, symbol: Symbol) -> int | None:
        """Return the number of optimizable instructions in a function as the policy counts them.

        See OptimizationPolicy.pairs. Return None if the policy does not count them.
        """
        count = self.strategy and self.strategy.pairs
        return count(self._function(symbol).analysis) if count else None

    def _is_forbidden(self, symbol: Symbol) -> bool:
        """Return True if the blacklist contains all of `symbol`, or the function it was split off from."""
        whole = self._split_from(symbol)
        if whole is not None and _span(self._blacklist, whole) is not None:
            return True
        at = bisect_right(self._blacklist, symbol.address, key=itemgetter(0)) - 1
        return at >= 0 and self._blacklist[at][1] >= symbol.address + symbol.size

    def _has_forbidden(self, symbol: Symbol) -> bool:
        """Return True if an address of the function is in the blacklist or may be a refused fentry site."""
        if self._refused_sites:
            return True
        end = bisect_left(self._blacklist, symbol.address + symbol.size, key=itemgetter(0))
        # The spans are disjoint, so a span that reaches into the function is the last that begins before its
        # end.
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
            known = AnalyzedFunction(symbol, self._read(symbol), self.analyse)
            self._known[start] = known
        else:
            self._known.move_to_end(start)
        return known

    def _read(self, symbol: Symbol) -> Function:
        size = symbol.size
        if symbol.address in self.layout.text:
            # kallsyms' size of the last function extends to the next symbol, which may be data.
            size = min(size, self.layout.text.stop - symbol.address)
        read = self._image.read
        labels = [PatchSite(code, self.label_size(read(code, 2))) for code in _inside(self._labels, symbol)]
        fentry = self._fentry_sites(symbol) if self._ftrace else ()
        return Function(
            name=symbol.name,
            addr=symbol.address,
            size=symbol.size,
            code=read(symbol.address, size),
            fentry_sites=tuple(
                PatchSite(addr, self._site_insn_size)
                for site in fentry
                for addr in range(site, site + self.fentry_size, self._site_insn_size)
            ),
            exception_entries=frozenset(_inside(self._exceptions, symbol)),
            bug_entries=frozenset(_inside(self._bugs, symbol)),
            jump_labels=tuple(labels),
            static_calls=tuple(
                PatchSite(site, self.call_size) for site in _inside(self._static_calls, symbol)
            ),
        )

    def _named(self, finding: Rejection) -> Rejection:
        return replace(finding, describe=self._describe)

    def place_text(self, addr: int) -> str:
        """Return an address as symbol and offset, or as a number if it has no such name."""
        return self.name(addr) or f"{addr:#x}"

    def rejection_text(self, finding: Rejection) -> str:
        """Return a text with the location and the rule of `finding`.

        If the rule is about an instruction or a register, the text names it, too.
        """
        told = f"{self.place_text(finding.addr)}: {finding.reason.value}"
        if finding.reason.about is RejectSubject.INSN:
            return f"{told}: {self.insn_text(finding.addr, self.name)}"
        if finding.reason.about is RejectSubject.REGISTER:
            return f"{told}: {self.register_text(finding.addr)}"
        return told

    def register_text(self, addr: int) -> str:
        """Return a text that names the register that is not free at `addr`, and the reason why it is needed.

        Only jumps on RISC-V need a register.
        """
        raise AssertionError(f"{addr:#x}: no jump of this architecture needs a register")

    def insn_text(self, addr: int, name: AddressName = unnamed) -> str:
        """Return the disassembly of the instruction at `addr`, with names of addresses that `name` knows."""
        where = self._symbols.lookup(addr)
        size = self.max_insn_size
        if where is not None:
            size = min(size, where.symbol.size - where.offset)
        _, _, text = next(self._disassembler.insns(self._image.read(addr, size), addr, name))
        return text


def _inside(addresses: Sequence[int], symbol: Symbol) -> Sequence[int]:
    """Return the members of `addresses` inside a function. `addresses` is sorted, and may be very long."""
    first = bisect_left(addresses, symbol.address)
    return addresses[first : bisect_left(addresses, symbol.address + symbol.size)]


def _span(spans: Sequence[tuple[int, int] | tuple[int, int, str]], addr: int) -> int | None:
    """Return the start of the range in `spans` that contains `addr`, or None if no range contains it.

    A range is its start, its end (exclusive) and perhaps a name. The ranges are sorted and disjoint.
    """
    # Without a key function, the ranges are compared in C.
    at = bisect_right(spans, (addr, _BEYOND)) - 1
    return spans[at][0] if at >= 0 and addr < spans[at][1] else None
