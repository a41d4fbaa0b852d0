"""Rules of jump optimization, asked about a kernel image function by function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from emulated_kernel.arch.analysed import AnalysedImage, Symbol
from emulated_kernel.arch.base import Live, Scratch
from emulated_kernel.arch.entrances import Entrances
from emulated_kernel.arch.function import Function, Site, TextLayout
from emulated_kernel.arch.reason import Finding, Reason


class FunctionLiveness(Protocol):
    def at(self, addr: int, /) -> Live: ...


Analysis = TypeVar("Analysis")
"""What an architecture finds out about a function in one pass."""


class ImageRules(ABC, Generic[Analysis]):
    """Implements arch.base.OptimizationRules; each function is decoded once, when first asked about.

    Deviates: Linux looks for jumps into a region in the function alone that the region is in, as it is now.
    But its cold part, another symbol, jumps there too, and so does a jump label that is off now.
    """

    all_live: Live
    """What is said where nothing is known."""
    label_size: int
    """Bytes of a jump label."""
    bits: int
    """Of a word."""

    def __init__(self, image: AnalysedImage, *, ftrace: bool) -> None:
        self._image = image
        self._ftrace = ftrace
        self._layout = text_layout(image)
        self._analyses: dict[int, Analysis] = {}
        self._liveness: dict[int, FunctionLiveness] = {}
        self.refresh()

    # What differs between architectures

    @abstractmethod
    def _analyse(self, function: Function) -> Analysis: ...

    @abstractmethod
    def _boundaries(self, analysis: Analysis) -> Collection[int]:
        """Addresses of a function's instructions."""

    @abstractmethod
    def _can_optimize(self, analysis: Analysis, addr: int) -> int | Finding:
        """Bytes that the jump replaces, by what is seen in the function itself."""

    @abstractmethod
    def _live(self, analysis: Analysis) -> FunctionLiveness: ...

    @abstractmethod
    def _possible_branches(self, addr: int, code: bytes) -> Iterator[tuple[int, int]]:
        """Target and source of what looks like a direct branch, wherever instructions begin."""

    # OptimizationRules

    def refresh(self) -> None:
        """See OptimizationRules.refresh."""
        self._fentry = sorted(self._image.mcount) if self._ftrace else []
        self._exceptions = sorted(insn for insn, _ in self._image.ex_table)
        self._labels = sorted(code for code, *_ in self._image.jump_labels)
        self._entrances = Entrances(self._image, self.bits, self._possible_branches)
        core = self._layout.text
        self._analyses = {start: known for start, known in self._analyses.items() if start in core}
        self._liveness = {start: known for start, known in self._liveness.items() if start in core}

    def detoured_length(self, addr: int) -> int | str:
        """See OptimizationRules.detoured_length."""
        where = self._image.kallsyms.lookup(addr)
        if where is None:
            return Finding(Reason.NO_SYMBOL, addr).text
        outcome = self._can_optimize(self._analysis(where.symbol), addr)
        if isinstance(outcome, Finding):
            return outcome.text
        region = range(addr + 1, addr + outcome)
        entered = self._entrances.label(region) or self._entrances.branch(region, where.symbol, self._is_insn)
        return entered.text if entered else outcome

    def scratch_at(self, addr: int) -> Scratch | None:  # noqa: ARG002 - most jumps need none
        """See OptimizationRules.scratch_at."""
        return None

    def live_at(self, addr: int) -> Live:
        """See OptimizationRules.live_at."""
        where = self._image.kallsyms.lookup(addr)
        if where is None:
            return self.all_live
        start = where.symbol.address
        liveness = self._liveness.get(start)
        if liveness is None:
            liveness = self._liveness[start] = self._live(self._analysis(where.symbol))
        return liveness.at(addr)

    def _is_insn(self, symbol: Symbol, addr: int) -> bool:
        return addr in self._boundaries(self._analysis(symbol))

    def _analysis(self, symbol: Symbol) -> Analysis:
        analysis = self._analyses.get(symbol.address)
        if analysis is None:
            analysis = self._analyses[symbol.address] = self._analyse(self._function(symbol))
        return analysis

    def _function(self, symbol: Symbol) -> Function:
        size = symbol.size
        if symbol.address in self._layout.text:
            # The last function's size runs up to the next symbol, which may be data.
            size = min(size, self._layout.text.stop - symbol.address)
        labels = sorted(_inside(self._labels, symbol))
        return Function(
            name=symbol.name,
            addr=symbol.address,
            size=symbol.size,
            code=self._image.read(symbol.address, size),
            fentry_sites=_inside(self._fentry, symbol),
            exception_entries=_inside(self._exceptions, symbol),
            jump_labels=tuple(Site(code, self.label_size) for code in labels),
        )


def _inside(addresses: Sequence[int], symbol: Symbol) -> frozenset[int]:
    """Those of the sorted addresses that lie in a function: a kernel has tens of thousands of them."""
    first = bisect_left(addresses, symbol.address)
    return frozenset(addresses[first : bisect_left(addresses, symbol.address + symbol.size)])


def text_layout(image: AnalysedImage) -> TextLayout:
    """The ranges that symbols of an image tell."""
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
