"""The rules of jump optimization on x86: Linux's, and djprobe's."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from emulated_kernel.arch.analysed import AnalysedImage, Symbol
from emulated_kernel.arch.base import Live
from emulated_kernel.arch.entrances import Entrances
from emulated_kernel.arch.function import Function
from emulated_kernel.arch.image_rules import ImageRules
from emulated_kernel.arch.reason import Finding, Reason
from emulated_kernel.arch.x86.analysis import FunctionAnalysis
from emulated_kernel.arch.x86.branches import possible_branches
from emulated_kernel.arch.x86.djprobe import DetouredRegion, DjprobeAnalysis
from emulated_kernel.arch.x86.liveness import ALL_LIVE, Liveness
from emulated_kernel.arch.x86.prepare import JMP32_SIZE
from emulated_kernel.arch.x86.verdict import can_optimize


class OptprobeRules(ImageRules[FunctionAnalysis]):
    """Linux's rules, for an image."""

    all_live = ALL_LIVE
    label_size = JMP32_SIZE

    def __init__(self, image: AnalysedImage, bits: int, *, ftrace: bool) -> None:
        self.bits = bits
        super().__init__(image, ftrace=ftrace)

    def _analyse(self, function: Function) -> FunctionAnalysis:
        return FunctionAnalysis(function, self._layout, self.bits)

    def _boundaries(self, analysis: FunctionAnalysis) -> Collection[int]:
        return analysis.lengths

    def _can_optimize(self, analysis: FunctionAnalysis, addr: int) -> int | Finding:
        return can_optimize(analysis, addr, self._layout)

    def _live(self, analysis: FunctionAnalysis) -> Liveness:
        return Liveness(analysis.function, self.bits)

    def _possible_branches(self, addr: int, code: bytes) -> Iterator[tuple[int, int]]:
        return possible_branches(addr, code)


class DjprobeRules:
    """Implements arch.base.OptimizationRules by djprobe's static analysis.

    Deviates: that looks for jumps in the function alone, and leaves those by a table and those of a fixup to
    whoever probes. Here they forbid the djprobe, as branches of other functions do.
    """

    def __init__(self, image: AnalysedImage, bits: int) -> None:
        self._image = image
        self._bits = bits
        self._text_end = max(end for _, end in image.text_ranges)
        self._analyses: dict[int, DjprobeAnalysis] = {}
        self.refresh()

    def refresh(self) -> None:
        """See OptimizationRules.refresh."""
        core = range(self._text_end)
        self._analyses = {start: known for start, known in self._analyses.items() if start in core}
        self._entrances = Entrances(self._image, self._bits, possible_branches)

    def detoured_length(self, addr: int) -> int | str:
        """See OptimizationRules.detoured_length."""
        where = self._image.kallsyms.lookup(addr)
        if where is None:
            return Finding(Reason.NO_SYMBOL, addr).text
        found = self._analysis(where.symbol).region(addr)
        if isinstance(found, DetouredRegion):
            return self._entered(found, where.symbol) or found.length
        return found.text

    def _entered(self, region: DetouredRegion, symbol: Symbol) -> str | None:
        """The first way into a region that the analysis doesn't see, as the `reason` file tells it."""
        entrances, inside = self._entrances, region.prohibited
        found = (
            entrances.label(inside)
            or entrances.fixup(inside)
            or entrances.pointer(inside)
            or entrances.branch(inside, symbol, self._is_insn)
        )
        return found.text if found else None

    def _is_insn(self, symbol: Symbol, addr: int) -> bool:
        return self._analysis(symbol).is_insn(addr)

    def scratch_at(self, addr: int) -> None:
        """See OptimizationRules.scratch_at."""

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
