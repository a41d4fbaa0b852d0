"""The static analysis of djprobe (2007): the region that a detour at an address replaces, or a rejection.

Source: Hiramatsu and Oshima, "Djprobe", Ottawa Linux Symposium 2007, sections 2.1 and 3.2. Unlike Linux's
optprobe, djprobe accepts indirect jumps and exception fixups in the function. It has no boosting and adjusts
no displacement.
"""

from __future__ import annotations

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.x86.analysis import X86FunctionAnalysis
from emulated_kernel.arch.x86.copy_insn import JMP32_SIZE
from emulated_kernel.arch.x86.insn import X86Insn, decode_insn
from emulated_kernel.arch.x86.insn_attributes import is_relative_jump

_CALLS = (b"\xe8", b"\x9a")
_RETURNS = (b"\xc2", b"\xc3", b"\xca", b"\xcb", b"\xcf")
_TRAPS = (b"\xcc", b"\xcd", b"\xce", b"\xf1", b"\x0f\x0b", b"\x0f\xff", b"\x0f\xb9")
_FAR_JUMP = b"\xea"
_GROUP_5 = b"\xff"


def region(analysis: X86FunctionAnalysis, addr: int) -> Region | Rejection:
    """Return the detoured region (DCR) of a probe at `addr`, or a rejection by the first rule that is broken.

    Source: the checks of section 3.2, in their order. Deviates: a probed instruction of 5 bytes or more is
    also checked, since it may be a call. For such an instruction, the search for jumps is skipped, because
    the jump to the detour replaces no other instruction.
    """
    insns: list[tuple[int, X86Insn]] = []
    at = addr
    while at < addr + JMP32_SIZE:
        if at not in analysis.flow.facts:
            return Rejection(RejectReason.BEYOND_FUNCTION if insns else RejectReason.NOT_A_BOUNDARY, at)
        insns.append((at, decode_insn(analysis.bytes_at(at), analysis.bits)))
        at += analysis.flow.facts[at].length
    end = analysis.function.end
    (_, last) = insns[-1]
    # An instruction must follow, unless the last one never falls through and ends the function.
    if at > end or (at == end and not _never_falls_through(last)):
        return Rejection(RejectReason.BEYOND_FUNCTION, at)
    found = Region(addr, analysis.bytes_at(addr, at - addr))
    branch = analysis.flow.branch_into(prohibited(found))
    if branch is not None and insns[0][1].length < JMP32_SIZE:
        return Rejection(RejectReason.JUMP_INTO_RANGE, branch.source)
    return _unmovable(insns) or found


def prohibited(region: Region) -> range:
    """Return the jump target prohibition region (JTPR): the addresses that no jump may target."""
    return range(region.addr + 1, region.addr + JMP32_SIZE)


def _never_falls_through(insn: X86Insn) -> bool:
    """Return True if an instruction is an indirect jump, a far jump or a return."""
    return insn.opcode in (*_RETURNS, _FAR_JUMP) or (insn.opcode == _GROUP_5 and insn.reg in (4, 5))


def _unmovable(insns: list[tuple[int, X86Insn]]) -> Rejection | None:
    for at, insn in insns:
        indirect_call = insn.opcode == _GROUP_5 and insn.reg in (2, 3)
        if insn.opcode in _CALLS or indirect_call or insn.opcode in _TRAPS:
            return Rejection(RejectReason.PROHIBITED_IN_DCR, at)
        if is_relative_jump(insn) or insn.rip_relative:
            return Rejection(RejectReason.RELATIVE_IN_DCR, at)
    return None
