"""The static analysis of djprobe (2007): may this point be detoured, and how long is its region?

Source: Hiramatsu and Oshima, "Djprobe", Ottawa Linux Symposium 2007, sections 2.1 and 3.2. Unlike Linux's
optprobe it accepts indirect jumps and exception fixups in the function, knows nothing of boosting, and
moves no displacement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from emulated_kernel.arch.function import Function
from emulated_kernel.arch.reason import Finding, Reason
from emulated_kernel.arch.x86.analysis import is_relative_jump
from emulated_kernel.arch.x86.decode import decode_all
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE, Insn, decode_insn
from emulated_kernel.arch.x86.prepare import JMP32_SIZE

UD2_SIZE = 2
_UD2 = b"\x0f\x0b"
_CALLS = (b"\xe8", b"\x9a")
_RETURNS = (b"\xc2", b"\xc3", b"\xca", b"\xcb", b"\xcf")
_TRAPS = (b"\xcc", b"\xcd", b"\xce", b"\xf1", _UD2, b"\x0f\xff", b"\x0f\xb9")
_FAR_JUMP = b"\xea"
_GROUP_5 = b"\xff"


@dataclass(frozen=True, slots=True)
class DetouredRegion:
    """The DCR of a probe: whole instructions from the insertion address (IA) on."""

    insertion_addr: int
    length: int
    """Bytes: what register_kprobe() of djprobe takes as `length`."""

    @property
    def return_addr(self) -> int:
        """RA: where the detour buffer jumps back to."""
        return self.insertion_addr + self.length

    @property
    def prohibited(self) -> range:
        """JTPR: addresses that no jump may target."""
        return range(self.insertion_addr + 1, self.insertion_addr + JMP32_SIZE)


class DjprobeAnalysis:
    """One function, disassembled once.

    `bug_size`: bytes of a BUG(), after which decoding starts afresh; kernels of 2007 kept the line and file
    behind the ud2 (i386: 8 bytes), today's keep them in a table (2).
    """

    def __init__(self, function: Function, bits: int = 64, bug_size: int = UD2_SIZE) -> None:
        self._function = function
        self._insns = dict(_disassemble(function, bits, bug_size))
        self._targets = {
            addr: addr + insn.length + insn.immediate for addr, insn in self._insns.items() if _branches(insn)
        }

    def region(self, addr: int) -> DetouredRegion | Finding:
        """The detoured region of a probe at `addr`, or the rule that forbids it."""
        insns = self._detoured(addr)
        if isinstance(insns, Finding):
            return insns
        region = DetouredRegion(addr, sum(insn.length for insn in insns))
        return self._fault(region, insns) or region

    def is_insn(self, addr: int) -> bool:
        """Whether an instruction of the function starts there."""
        return addr in self._insns

    def _detoured(self, addr: int) -> list[Insn] | Finding:
        """The instructions that the jump covers in whole or in part."""
        insns: list[Insn] = []
        at = addr
        while at < addr + JMP32_SIZE:
            insn = self._insns.get(at)
            if insn is None:
                return Finding(Reason.BEYOND_FUNCTION if insns else Reason.NOT_A_BOUNDARY, at)
            insns.append(insn)
            at += insn.length
        return insns

    def _fault(self, region: DetouredRegion, insns: list[Insn]) -> Finding | None:
        """The checks of section 3.2, in its order.

        Deviates: a probed instruction of 5 bytes or more is looked at too (it may be a call); only
        the search for jumps is skipped for it, as no boundary changes.
        """
        bottom = self._bottom(region, insns[-1])
        if bottom:
            return bottom
        if insns[0].length < JMP32_SIZE:
            for source, target in self._targets.items():
                if target in region.prohibited:
                    return Finding(Reason.JUMP_INTO_RANGE, source)
        return _unmovable(region, insns)

    def _bottom(self, region: DetouredRegion, last: Insn) -> Finding | None:
        """An instruction must follow, unless the last one never falls through and ends the function."""
        end = self._function.end
        if region.return_addr < end or (region.return_addr == end and _never_falls_through(last)):
            return None
        return Finding(Reason.BEYOND_FUNCTION, region.return_addr)


def _disassemble(function: Function, bits: int, bug_size: int) -> Iterator[tuple[int, Insn]]:
    at = function.addr
    while at < function.end:
        rest = function.code[at - function.addr : function.size]
        restart = function.end
        for addr, length, _ in decode_all(rest, at, bits):
            code = rest[addr - at : addr - at + length].ljust(MAX_INSN_SIZE, b"\0")
            insn = decode_insn(code, bits)
            yield addr, insn
            if insn.opcode == _UD2:
                restart = addr + bug_size
                break
        at = restart


def _branches(insn: Insn) -> bool:
    """Relative jumps and calls."""
    return is_relative_jump(insn) or insn.opcode == b"\xe8"


def _never_falls_through(insn: Insn) -> bool:
    """An absolute jump or a return."""
    return insn.opcode in (*_RETURNS, _FAR_JUMP) or (insn.opcode == _GROUP_5 and insn.reg in (4, 5))


def _unmovable(region: DetouredRegion, insns: list[Insn]) -> Finding | None:
    at = region.insertion_addr
    for insn in insns:
        indirect_call = insn.opcode == _GROUP_5 and insn.reg in (2, 3)
        if insn.opcode in _CALLS or indirect_call or insn.opcode in _TRAPS:
            return Finding(Reason.PROHIBITED_IN_DCR, at)
        if is_relative_jump(insn) or insn.rip_relative:
            return Finding(Reason.RELATIVE_IN_DCR, at)
        at += insn.length
    return None
