"""Probe checks of arm64: whether Linux would register a probe at an address, and if not, why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import repeat

from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region
from emulated_kernel.arch.analysis.function import Function, reserved_range
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.analysis.tactic import Tactics
from emulated_kernel.arch.analysis.xrefs import Reference
from emulated_kernel.arch.arm64 import insn
from emulated_kernel.arch.arm64.insn import REGISTER_NAMES, SIZE, Handling, handling_of, words_of
from emulated_kernel.arch.arm64.relocate import Relocation, relocation_of
from emulated_kernel.arch.probe_checks import PAD_SAMPLE, OptimizationPolicy, ProbeChecker
from emulated_kernel.image.kallsyms import Location, Symbol
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern

ALL_LIVE = LiveRegisters(frozenset(REGISTER_NAMES), flags=True)
_ATOMIC_CONTEXT = 32
"""Number of instructions before a probe that are searched for an exclusive load (ldxr).

Mirrors: arch/arm64/kernel/probes/decode-insn.h:MAX_ATOMIC_CONTEXT_SIZE (v6.12).
"""
_LOAD_MASK, _LOAD_VALUE = insn.LOAD_EXCLUSIVE
_BRANCH = lazy_pattern(b"(?s)(?=...[\\x14-\\x17\\x34-\\x37\\x54\\x94-\\x97\\xb4-\\xb7])")
"""Regular expression that matches at the first byte of a direct branch or call."""
_ADDRESS = lazy_pattern(b"(?s)(?=...[\\x10\\x30\\x50\\x70\\x90\\xb0\\xd0\\xf0])")
"""Regular expression that matches at the first byte of an adr or adrp."""
_ADD_LOW = insn.Pattern(0xFFC00000, 0x91000000)
_PAIR_REACH = 8
"""Number of instructions after an adrp that are searched for the add of the address's lower 12 bits."""


@dataclass(frozen=True, slots=True)
class Arm64FunctionAnalysis:
    """A function, and its instructions as 32-bit numbers, for the probe checks."""

    function: Function
    words: tuple[int, ...]
    is_guarded: bool = True
    """Whether an indirect branch may fault if it does not lead to a landing pad (BTI)."""

    def word_at(self, addr: int) -> int:
        """Return the instruction at `addr`, which must be one of `insns`."""
        return self.words[(addr - self.function.addr) // SIZE]

    @property
    def insns(self) -> range:
        """Addresses of the function's instructions."""
        return range(self.function.addr, self.function.addr + SIZE * len(self.words), SIZE)


def detoured_region(analysis: Arm64FunctionAnalysis, addr: int) -> Region | Rejection:
    """Return the region that the jump of a probe at `addr` replaces, or the rejection of the jump.

    The region is the probed instruction. No code can lead into it, and no register is needed for the jump.
    A jump replaces no landing pad: an indirect branch may reach a breakpoint in the place of a landing pad,
    but not a jump.
    """
    if addr not in analysis.insns:
        return Rejection(RejectReason.NOT_ALIGNED, addr)
    if addr in analysis.function.exception_entries:
        return Rejection(RejectReason.EXCEPTION_ENTRY, addr)
    word = analysis.word_at(addr)
    reason = _jump_reason(word, analysis.is_guarded)
    if reason is not None:
        return Rejection(reason, addr)
    reserved = reserved_range(analysis.function, addr, addr)
    return reserved or Region(addr, word.to_bytes(SIZE, "little"))


def _jump_reason(word: int, is_guarded: bool) -> RejectReason | None:
    """Return the reason why no jump may replace the instruction `word`, or None if a jump may replace it.

    `is_guarded`: see Arm64FunctionAnalysis.
    """
    if is_guarded and (insn.BTI.fits(word) or insn.PACI_SP.fits(word)):
        return RejectReason.LANDING_PAD
    return RejectReason.NOT_COPYABLE_TO_DETOUR if relocation_of(word) is Relocation.REFUSED else None


@lru_cache(1 << 16)
def _reason(word: int, is_guarded: bool) -> RejectReason | None:
    """Return the reason why `word` cannot be probed or, if it can, why no jump may replace it.

    Return None if the instruction can be probed and replaced. `is_guarded`: see Arm64FunctionAnalysis.
    """
    if handling_of(word) is Handling.REJECTED:
        return RejectReason.NOT_COPYABLE
    return _jump_reason(word, is_guarded)


_POLICY = OptimizationPolicy("optprobe-arm64", detoured_region)
STRATEGIES = {_POLICY.name: _POLICY, "extended": _POLICY}
"""Optimization policies of arm64, by the name that profiles use. The extended strategy adds no rule."""


class Arm64ProbeChecker(ProbeChecker[Arm64FunctionAnalysis]):
    """Probe checks of a kernel for arm64."""

    all_live = ALL_LIVE
    fentry_size = SIZE
    max_insn_size = SIZE
    bits = 64

    def analyse(self, function: Function) -> Arm64FunctionAnalysis:
        return Arm64FunctionAnalysis(function, tuple(words_of(function.code)), self._is_guarded)

    def insns(self, analysis: Arm64FunctionAnalysis) -> Collection[int]:
        return analysis.insns

    def check_insn(self, analysis: Arm64FunctionAnalysis, addr: int) -> Rejection | None:
        """Return the reason why Linux rejects a probe on the instruction at `addr`; None if Linux accepts it.

        Linux rejects an address that is not aligned, an instruction with a fixup in the exception table, and
        one that can be neither copied nor simulated. It also rejects the instructions after an exclusive
        load, up to and including its store.
        Mirrors: arch/arm64/kernel/probes/kprobes.c:arch_prepare_kprobe,
        arch/arm64/kernel/probes/decode-insn.c:arm_kprobe_decode_insn (v6.12).
        """
        if addr not in analysis.insns:
            return Rejection(RejectReason.NOT_ALIGNED, addr)
        if addr in analysis.function.exception_entries:
            return Rejection(RejectReason.HAS_FIXUP, addr)
        if handling_of(analysis.word_at(addr)) is Handling.REJECTED:
            return Rejection(RejectReason.NOT_COPYABLE, addr)
        index = (addr - analysis.function.addr) // SIZE
        before = analysis.words[max(index - _ATOMIC_CONTEXT, 0) : index]
        return Rejection(RejectReason.IN_EXCLUSIVE, addr) if _ends_in_exclusive(before) else None

    @cached_property
    def _is_guarded(self) -> bool:
        """Whether functions begin with a landing pad (BTI).

        True if a `bti` precedes the two nops at any of the first fentry sites, or if the kernel has no fentry
        sites.
        Mirrors: arch/arm64/kernel/ftrace.c:ftrace_call_adjust (v6.12).
        """
        before = [self._text_at(site - 2 * SIZE, SIZE) for site in self._mcount[:PAD_SAMPLE]]
        return not before or any(insn.BTI.fits(int.from_bytes(code, "little")) for code in before)

    def check_address_safe(self, where: Location, addr: int) -> Rejection | None:
        found = super().check_address_safe(where, addr)
        if found is not None and found.reason is RejectReason.WITHIN_FENTRY:
            return self._named(Rejection(RejectReason.NOT_ALIGNED, addr))
        return found

    def is_entry_site(self, offset: int) -> bool:
        """Return True if an fentry site at `offset` in a function is the second of the two nops at its entry.

        A landing pad (`bti`) may precede the nops.
        """
        return SIZE <= offset <= 2 * SIZE

    def _forbidden(self, symbol: Symbol, addr: int) -> Rejection | None:
        """Return the reason to reject a probe at `addr`: an fentry site, or the kprobe blacklist.

        Return None if there is no reason.
        Mirrors: kernel/kprobes.c:check_ftrace_location, without CONFIG_KPROBES_ON_FTRACE (v6.12).
        """
        if addr in self.mcount:
            return Rejection(RejectReason.AT_FENTRY, addr)
        return super()._forbidden(symbol, addr)

    def _has_forbidden(self, symbol: Symbol) -> bool:  # noqa: ARG002 - it overrides
        """Return True for all functions: almost all have an fentry site, which _forbidden() rejects.

        See ProbeChecker._has_forbidden.
        """
        return True

    def reasons(self, symbol: Symbol) -> Mapping[int, RejectReason | Tactics | None]:
        """Return a map: instruction address -> first reason against a probe or jump there; see ProbeChecker.

        This method decides about all instructions at once. A check of each instruction would take too long,
        because a kernel has millions of instructions. The results equal those of check_each_insn(). Only a
        function with blacklisted addresses is checked instruction by instruction.
        """
        if self.strategy is None or super()._has_forbidden(symbol):
            return super().reasons(symbol)
        known = self._function(symbol)
        analysis = known.analysis
        insns = analysis.insns
        words = analysis.words
        found = dict(zip(insns, map(_reason, words, repeat(analysis.is_guarded)), strict=True))
        for index in _in_exclusives(words):
            if found[insns[index]] is not RejectReason.NOT_COPYABLE:
                found[insns[index]] = RejectReason.IN_EXCLUSIVE
        exceptions = known.function.exception_entries
        found |= {addr: RejectReason.HAS_FIXUP for addr in exceptions if addr in insns}
        found |= {addr: reason for addr, reason in known.reserved.items() if addr in insns}
        return found | dict.fromkeys(self._fentry_sites(symbol), RejectReason.AT_FENTRY)

    def live_in(self, analysis: Arm64FunctionAnalysis, addr: int) -> LiveRegisters:  # noqa: ARG002
        """Return all registers as live, without an analysis, because no jump needs a free register."""
        return ALL_LIVE

    def has_jump_table(self, symbol: Symbol) -> bool:
        return any(map(insn.BR.fits, self._function(symbol).analysis.words))

    def possible_branches(self, addr: int, code: bytes, window: range | None) -> Iterator[Reference]:  # noqa: ARG002
        for at, word in _aligned(_BRANCH, addr, code):
            offset = insn.branch_offset(word)
            if offset is not None:
                yield at + offset, at

    def possible_addresses(self, addr: int, code: bytes, window: range | None) -> Iterator[Reference]:  # noqa: ARG002
        """Yield (target, source) for each adr, and for each adrp with an add after it; see ProbeChecker.

        The add must be one of the next _PAIR_REACH instructions.
        """
        for at, word in _aligned(_ADDRESS, addr, code):
            taken = insn.taken_address(word, at)
            if taken is None:
                continue
            if insn.ADR.fits(word):
                yield taken, at
                continue
            start = at - addr + SIZE
            for behind in words_of(code[start : start + SIZE * _PAIR_REACH]):
                if _ADD_LOW.fits(behind) and behind >> 5 & 31 == word & 31:
                    yield taken + (behind >> 10 & 0xFFF), at

    def label_size(self, code: bytes) -> int:  # noqa: ARG002 - all labels have the same size
        return SIZE


def _ends_in_exclusive(words: tuple[int, ...]) -> bool:
    """Return True if the last exclusive access in `words` is a load, so that its store is still to come.

    Mirrors: arch/arm64/kernel/probes/decode-insn.c:is_probed_address_atomic (v6.12).
    """
    for word in reversed(words):
        if insn.STORE_EXCLUSIVE.fits(word):
            return False
        if insn.LOAD_EXCLUSIVE.fits(word):
            return True
    return False


def _in_exclusives(words: Sequence[int]) -> Iterator[int]:
    """Yield the indices in `words` of the instructions after an exclusive load, up to its store.

    The store is included. If there is none, yield at most _ATOMIC_CONTEXT indices for a load. check_insn()
    rejects these instructions. An index may be yielded repeatedly.
    """
    loads = [index for index, word in enumerate(words) if word & _LOAD_MASK == _LOAD_VALUE]
    for index in loads:
        for behind in range(index + 1, min(index + 1 + _ATOMIC_CONTEXT, len(words))):
            yield behind
            if insn.STORE_EXCLUSIVE.fits(words[behind]):
                break


def _aligned(pattern: re.Pattern[bytes], addr: int, code: bytes) -> Iterator[tuple[int, int]]:
    """Yield (address, instruction) for each match of `pattern` at an aligned address of `code`.

    `addr`: address of the start of `code`.
    """
    for match in pattern.finditer(code):
        at = match.start()
        if (addr + at) % SIZE == 0:
            yield addr + at, int.from_bytes(code[at : at + SIZE], "little")
