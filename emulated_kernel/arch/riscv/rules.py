"""The rules of jump optimization on RISC-V, for an image."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from emulated_kernel.arch.analysed import AnalysedImage
from emulated_kernel.arch.base import Scratch
from emulated_kernel.arch.function import Function
from emulated_kernel.arch.image_rules import ImageRules
from emulated_kernel.arch.reason import Finding
from emulated_kernel.arch.riscv.analysis import ALL_LIVE, FunctionAnalysis
from emulated_kernel.arch.riscv.assemble import JUMP_SIZE
from emulated_kernel.arch.riscv.insn import REGISTER_NAMES, RVC_SIZE, RVI_SIZE, Opcode, decode_insn
from emulated_kernel.arch.riscv.verdict import can_optimize


class OptprobeRules(ImageRules[FunctionAnalysis]):
    """Those of the optprobes patch."""

    all_live = ALL_LIVE
    label_size = JUMP_SIZE
    bits = 64

    def __init__(self, image: AnalysedImage, *, compressed: bool, ftrace: bool) -> None:
        self._compressed = compressed
        super().__init__(image, ftrace=ftrace)

    def scratch_at(self, addr: int) -> Scratch | None:
        """See OptimizationRules.scratch_at."""
        where = self._image.kallsyms.lookup(addr)
        if where is None:
            return None
        outcome = can_optimize(self._analysis(where.symbol), addr)
        if isinstance(outcome, Finding):
            return None
        return Scratch(REGISTER_NAMES[outcome.entry], REGISTER_NAMES[outcome.exit])

    def _analyse(self, function: Function) -> FunctionAnalysis:
        return FunctionAnalysis(function, compressed=self._compressed)

    def _boundaries(self, analysis: FunctionAnalysis) -> Collection[int]:
        return analysis.insns

    def _can_optimize(self, analysis: FunctionAnalysis, addr: int) -> int | Finding:
        outcome = can_optimize(analysis, addr)
        return outcome if isinstance(outcome, Finding) else outcome.length

    def _live(self, analysis: FunctionAnalysis) -> FunctionAnalysis:
        return analysis

    def _possible_branches(self, addr: int, code: bytes) -> Iterator[tuple[int, int]]:
        step = RVC_SIZE if self._compressed else RVI_SIZE
        for at in range(0, len(code), step):
            if not _may_branch(code[at], code[at + 1]):
                continue
            insn = decode_insn(code[at : at + RVI_SIZE].ljust(RVI_SIZE, b"\0"), compressed=True)
            if insn.relative_target is not None:
                yield addr + at + insn.relative_target, addr + at


def _may_branch(low: int, high: int) -> bool:
    """By the first two bytes, which nearly all others fail."""
    return low & 0x7F in _BRANCHES or (low & 3 == 1 and high >> 5 in _COMPRESSED)


_BRANCHES = (Opcode.BRANCH, Opcode.JAL)
_COMPRESSED = (5, 6, 7)
"""The highest bits of c.j, c.beqz and c.bnez."""
