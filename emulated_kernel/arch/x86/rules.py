"""Linux's rules of jump optimization, asked about a kernel image function by function."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from emulated_kernel.arch.x86.analysis import FunctionAnalysis
from emulated_kernel.arch.x86.function import Function, TextLayout
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

    def read(self, va: int, size: int, /) -> bytes: ...


class OptprobeRules:
    """Implements arch.base.OptimizationRules; each function is decoded once, when first asked about."""

    def __init__(self, image: AnalysedImage, bits: int, *, ftrace: bool) -> None:
        self._image = image
        self._bits = bits
        self._fentry = frozenset(image.mcount) if ftrace else frozenset()
        self._exceptions = frozenset(insn for insn, _ in image.ex_table)
        self._layout = _layout(image)
        self._analyses: dict[int, FunctionAnalysis] = {}

    def detoured_length(self, addr: int) -> int | str:
        """See OptimizationRules.detoured_length."""
        where = self._image.kallsyms.lookup(addr)
        if where is None:
            return Finding(Reason.NO_SYMBOL, addr).text
        outcome = can_optimize(self._analysis(where.symbol), addr, self._layout)
        return outcome.text if isinstance(outcome, Finding) else outcome

    def _analysis(self, symbol: Symbol) -> FunctionAnalysis:
        analysis = self._analyses.get(symbol.address)
        if analysis is None:
            analysis = FunctionAnalysis(self._function(symbol), self._layout, self._bits)
            self._analyses[symbol.address] = analysis
        return analysis

    def _function(self, symbol: Symbol) -> Function:
        inside = range(symbol.address, symbol.address + symbol.size)
        return Function(
            name=symbol.name,
            addr=symbol.address,
            size=symbol.size,
            # The last function's size runs up to the next symbol, which may be data.
            code=self._image.read(symbol.address, min(symbol.size, self._layout.text.stop - symbol.address)),
            fentry_sites=frozenset(site for site in self._fentry if site in inside),
            exception_entries=frozenset(insn for insn in self._exceptions if insn in inside),
        )


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
