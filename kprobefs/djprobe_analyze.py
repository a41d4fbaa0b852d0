"""The command djprobe-analyze: how many bytes djprobe's jump would detour at an address, or why it can't.

Source: "Djprobe" (Ottawa Linux Symposium 2007), section 3.2, and its tool djprobe_static_code_analyzer.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from emulated_kernel.arch.analysis.function import Function
from emulated_kernel.arch.analysis.region import Region
from emulated_kernel.arch.x86 import djprobe
from emulated_kernel.arch.x86.analysis import X86FunctionAnalysis
from emulated_kernel.arch.x86.facts import FactsTable
from emulated_kernel.dataclass import dataclass
from emulated_kernel.image.debuginfo import DebugInfo, DescribedFunction, open_debuginfo
from kprobefs.failure import Exit, Failure


@dataclass(frozen=True)
class Answer:
    """What the analysis of one address says; `length` in bytes, 0 where djprobe can't be used."""

    address: str
    function: str
    offset: int
    length: int
    reason: str

    def text(self) -> str:
        """One line: the length, and why it is 0."""
        return f"{self.length} {self.reason}".rstrip()

    def as_dict(self) -> dict[str, str | int]:
        return asdict(self)


def analyze(path: Path, place: str, debug_path: Path | None = None, bug_size: int = 2) -> Answer:
    """The answer for an address (0x...) or SYMBOL[+OFFSET] of an ELF file.

    `bug_size`: bytes of a BUG() in its code. Raises: Failure (a place that isn't one), OSError.
    """
    with open_debuginfo(path, debug_path) as info:
        function, addr = _find(info, place)
        code = info.text(function)
        described = Function(function.name, function.low_pc, len(code), code)
        found = djprobe.region(X86FunctionAnalysis(described, FactsTable(info.bits), bug_size=bug_size), addr)
    region = found if isinstance(found, Region) else None
    return Answer(
        address=f"{addr:#x}",
        function=function.name,
        offset=addr - function.low_pc,
        length=region.length if region else 0,
        reason="" if isinstance(found, Region) else found.text,
    )


def _find(info: DebugInfo, place: str) -> tuple[DescribedFunction, int]:
    name, _, offset = place.partition("+")
    try:
        if name[:1].isdigit():
            addr = int(place, 0)
            return info.containing(addr), addr
        function = info.named(name)
        return function, function.low_pc + (int(offset, 0) if offset else 0)
    except ValueError:
        raise Failure(f"{place}: give an address (0x...) or SYMBOL[+OFFSET]", Exit.USAGE) from None
