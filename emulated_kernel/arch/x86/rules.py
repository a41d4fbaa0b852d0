"""Linux's rules of jump optimization, asked about a kernel image function by function."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from emulated_kernel.arch.base import Live
from emulated_kernel.arch.x86.analysis import FunctionAnalysis
from emulated_kernel.arch.x86.djprobe import DjprobeAnalysis
from emulated_kernel.arch.x86.foreign import BranchIndex, possible_branches
from emulated_kernel.arch.x86.function import Function, Site, TextLayout
from emulated_kernel.arch.x86.liveness import ALL_LIVE, Liveness
from emulated_kernel.arch.x86.prepare import JMP32_SIZE
from emulated_kernel.arch.x86.reason import Finding, Reason
from emulated_kernel.arch.x86.verdict import can_optimize


class Symbol(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...


class Location(Protocol):
    @property
    def symbol(self) -> Symbol: ...


class Symbols(Protocol):
    def lookup(self, address: int, /) -> Location | None: ...

    def lookup_name(self, name: str, /) -> int | None: ...


class AnalysedImage(Protocol):
    """The tables of a kernel binary that the rules look at."""

    @property
    def kallsyms(self) -> Symbols: ...

    @property
    def text_ranges(self) -> Sequence[tuple[int, int]]: ...

    @property
    def ex_table(self) -> Iterable[tuple[int, int]]: ...

    @property
    def mcount(self) -> Collection[int]: ...

    @property
    def jump_labels(self) -> Iterable[tuple[int, int, int]]: ...

    def read(self, va: int, size: int, /) -> bytes: ...


class OptprobeRules:
    """Implements arch.base.OptimizationRules; each function is decoded once, when first asked about.

    Deviates: Linux looks for jumps into a region in the function alone that the region is in, as it is now.
    But its cold part, another symbol, jumps there too, and so does a jump label that is off now.
    """

    def __init__(self, image: AnalysedImage, bits: int, *, ftrace: bool) -> None:
        self._image = image
        self._bits = bits
        self._ftrace = ftrace
        self._layout = _layout(image)
        self._analyses: dict[int, FunctionAnalysis] = {}
        self._liveness: dict[int, Liveness] = {}
        self.refresh()

    def refresh(self) -> None:
        """See OptimizationRules.refresh."""
        self._fentry = sorted(self._image.mcount) if self._ftrace else []
        self._exceptions = sorted(insn for insn, _ in self._image.ex_table)
        self._labels = sorted(code for code, *_ in self._image.jump_labels)
        self._label_targets = BranchIndex((target, code) for code, target, _ in self._image.jump_labels)
        self._index: BranchIndex | None = None
        core = self._layout.text
        self._analyses = {start: known for start, known in self._analyses.items() if start in core}
        self._liveness = {start: known for start, known in self._liveness.items() if start in core}

    def detoured_length(self, addr: int) -> int | str:
        """See OptimizationRules.detoured_length."""
        where = self._image.kallsyms.lookup(addr)
        if where is None:
            return Finding(Reason.NO_SYMBOL, addr).text
        outcome = can_optimize(self._analysis(where.symbol), addr, self._layout)
        if isinstance(outcome, Finding):
            return outcome.text
        entered = self._entered(where.symbol, range(addr + 1, addr + outcome))
        return entered.text if entered else outcome

    def live_at(self, addr: int) -> Live:
        """See OptimizationRules.live_at."""
        where = self._image.kallsyms.lookup(addr)
        if where is None:
            return ALL_LIVE
        start = where.symbol.address
        liveness = self._liveness.get(start)
        if liveness is None:
            liveness = self._liveness[start] = Liveness(self._function(where.symbol), self._bits)
        return liveness.at(addr)

    def _entered(self, symbol: Symbol, region: range) -> Finding | None:
        """A way into a region that isn't a jump of the function itself."""
        label = self._label_targets.into(region)
        if label is not None:
            return Finding(Reason.JUMP_LABEL_INTO_RANGE, label)
        branch = self._branches().into(region, lambda source: self._is_foreign(source, symbol))
        return None if branch is None else Finding(Reason.FOREIGN_BRANCH, branch)

    def _is_foreign(self, addr: int, symbol: Symbol) -> bool:
        """Whether it is an instruction of another function."""
        where = self._image.kallsyms.lookup(addr)
        if where is None or where.symbol.address == symbol.address:
            return False
        return addr in self._analysis(where.symbol).lengths

    def _branches(self) -> BranchIndex:
        if self._index is None:
            text = ((start, self._image.read(start, end - start)) for start, end in self._image.text_ranges)
            self._index = BranchIndex(branch for piece in text for branch in possible_branches(*piece))
        return self._index

    def _analysis(self, symbol: Symbol) -> FunctionAnalysis:
        analysis = self._analyses.get(symbol.address)
        if analysis is None:
            analysis = FunctionAnalysis(self._function(symbol), self._layout, self._bits)
            self._analyses[symbol.address] = analysis
        return analysis

    def _function(self, symbol: Symbol) -> Function:
        size = symbol.size
        if symbol.address in self._layout.text:
            # The last function's size runs up to the next symbol, which may be data.
            size = min(size, self._layout.text.stop - symbol.address)
        return Function(
            name=symbol.name,
            addr=symbol.address,
            size=symbol.size,
            code=self._image.read(symbol.address, size),
            fentry_sites=_inside(self._fentry, symbol),
            exception_entries=_inside(self._exceptions, symbol),
            jump_labels=tuple(Site(code, JMP32_SIZE) for code in sorted(_inside(self._labels, symbol))),
        )


def _inside(addresses: Sequence[int], symbol: Symbol) -> frozenset[int]:
    """Those of the sorted addresses that lie in a function: a kernel has tens of thousands of them."""
    first = bisect_left(addresses, symbol.address)
    return frozenset(addresses[first : bisect_left(addresses, symbol.address + symbol.size)])


class DjprobeRules:
    """Implements arch.base.OptimizationRules by djprobe's static analysis."""

    def __init__(self, image: AnalysedImage, bits: int) -> None:
        self._image = image
        self._bits = bits
        self._text_end = max(end for _, end in image.text_ranges)
        self._analyses: dict[int, DjprobeAnalysis] = {}

    def refresh(self) -> None:
        """See OptimizationRules.refresh."""
        core = range(self._text_end)
        self._analyses = {start: known for start, known in self._analyses.items() if start in core}

    def detoured_length(self, addr: int) -> int | str:
        """See OptimizationRules.detoured_length."""
        where = self._image.kallsyms.lookup(addr)
        if where is None:
            return Finding(Reason.NO_SYMBOL, addr).text
        found = self._analysis(where.symbol).region(addr)
        return found.text if isinstance(found, Finding) else found.length

    def live_at(self, addr: int) -> Live:  # noqa: ARG002 - nobody had thought of it
        """See OptimizationRules.live_at."""
        return ALL_LIVE

    def _analysis(self, symbol: Symbol) -> DjprobeAnalysis:
        analysis = self._analyses.get(symbol.address)
        if analysis is None:
            size = symbol.size
            if symbol.address < self._text_end:
                size = min(size, self._text_end - symbol.address)
            code = self._image.read(symbol.address, size)
            function = Function(symbol.name, symbol.address, size, code)
            analysis = self._analyses[symbol.address] = DjprobeAnalysis(function, self._bits)
        return analysis


def _layout(image: AnalysedImage) -> TextLayout:
    lookup = image.kallsyms.lookup_name
    starts, ends = zip(*image.text_ranges, strict=True)

    def between(start: str, end: str) -> range:
        first, last = lookup(start), lookup(end)
        return range(0) if first is None or last is None else range(first, last)

    return TextLayout(
        text=range(min(starts), max(ends)),
        image_end=lookup("_end") or max(ends),
        entry_text=between("__entry_text_start", "__entry_text_end"),
        thunks=between("__indirect_thunk_start", "__indirect_thunk_end"),
    )
