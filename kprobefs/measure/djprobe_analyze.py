"""`kprobefs djprobe-analyze`: the region that a djprobe would replace at an address, or the rejection.

Source: "Djprobe" (Ottawa Linux Symposium 2007), section 3.2, and its tool djprobe_static_code_analyzer.
"""

from __future__ import annotations

from pathlib import Path

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.function import Function
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.x86 import djprobe
from emulated_kernel.arch.x86.analysis import X86FunctionAnalysis
from emulated_kernel.arch.x86.insn_attributes import DecodeCache
from emulated_kernel.image.debuginfo import DebugInfo, DescribedFunction, open_debuginfo
from emulated_kernel.image.linux.open_image import open_elf
from emulated_kernel.util.fast_dataclass import asdict, dataclass
from kprobefs.common.errors import CliError, ExitStatus


@dataclass(frozen=True)
class AnalysisResult:
    """Result of the analysis of one address.

    `length`: size in bytes of the region, the instructions that the jump replaces, or 0 if djprobe cannot be
    used.
    """

    address: str
    function: str
    offset: int
    length: int
    reason: str

    def text(self) -> str:
        """Return one line: the length, and the reason if the length is 0."""
        return f"{self.length} {self.reason}".rstrip()

    def as_dict(self) -> dict[str, str | int]:
        return asdict(self)


def analyze(path: Path, place: str, debug_path: Path | None = None, bug_size: int = 2) -> AnalysisResult:
    """Analyze an address (0x...) or SYMBOL[+OFFSET] of an ELF file or a compressed kernel.

    `debug_path`: file with the debug information; None: it is searched for. `bug_size`: size in bytes of a
    BUG() in the code.
    Raises: CliError (`place` is malformed), KernelError (no usable file, or no such place), OSError.
    """
    with open_elf(path) as file, open_debuginfo(file, path, debug_path) as info:
        function, addr = _find(info, place)
        found = _region(info, function, addr, bug_size)
    region = found if isinstance(found, Region) else None
    return AnalysisResult(
        address=f"{addr:#x}",
        function=function.name,
        offset=addr - function.parts[0].start,
        length=region.length if region else 0,
        reason="" if isinstance(found, Region) else found.text,
    )


def _region(info: DebugInfo, function: DescribedFunction, addr: int, bug_size: int) -> Region | Rejection:
    """Return the region that a jump at `addr` would replace, or the rejection of the jump.

    A jump into the region from another part of a split function is also a reason for rejection. `bug_size`:
    see analyze().
    """
    facts = DecodeCache(info.bits)
    probed = function.part_at(addr) or function.parts[0]

    def analysis(part: range) -> X86FunctionAnalysis:
        code = info.text(part)
        return X86FunctionAnalysis(
            Function(function.name, part.start, len(code), code), facts, bug_size=bug_size
        )

    found = djprobe.region(analysis(probed), addr)
    if isinstance(found, Region):
        for part in function.parts:
            branch = analysis(part).flow.branch_into(djprobe.prohibited(found)) if part != probed else None
            if branch is not None:
                return Rejection(RejectReason.JUMP_INTO_RANGE, branch.source)
    return found


def _find(info: DebugInfo, place: str) -> tuple[DescribedFunction, int]:
    name, _, offset = place.partition("+")
    try:
        if name[:1].isdigit():
            addr = int(place, 0)
            return info.containing(addr), addr
        distance = int(offset, 0) if offset else 0
        function, start = info.named(name)
        return function, start + distance
    except ValueError:
        raise CliError(f"{place}: give an address (0x...) or SYMBOL[+OFFSET]", ExitStatus.USAGE) from None
