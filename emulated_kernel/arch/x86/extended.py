"""The optimization policy `extended` on x86: safe jumps at addresses where Linux's rule refuses them.

Linux forbids jumps in whole functions, and by the opcode of a replaced instruction. The tactics (relaxations
of these rules) look at the replaced bytes instead: no code, table or data may lead into these bytes. A detour
can have a relocated branch or call. A relocated call pushes the original return address and jumps. So no
stack holds an address in the detour, and call chains do not show the detour. Only the last replaced
instruction may be a call, because the called function returns to the address after the call. The probe
checker looks for entrances from outside the function (OptimizationPolicy.by_data, by_code).
"""

from __future__ import annotations

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.function import reserved_range
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.analysis.tactic import Tactic, Tactics
from emulated_kernel.arch.x86 import punned
from emulated_kernel.arch.x86.analysis import X86FunctionAnalysis
from emulated_kernel.arch.x86.copy_insn import INT3_SIZE, JMP32_SIZE
from emulated_kernel.arch.x86.encoder import INT3
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE, X86Insn, decode_insn
from emulated_kernel.arch.x86.insn_attributes import InsnAttributes, Relocation

_LEAVES = (Relocation.LEAVE, Relocation.JUMP)
_DIRECT = (Relocation.JUMP, Relocation.BRANCH)
_RELOCATED = (Relocation.JUMP, Relocation.BRANCH, Relocation.CALL)
_REP = 0xF3
_RM_SIB = 4
"""Value of the r/m field of ModRM if a SIB byte follows."""
_NO_INDEX = 0x20
"""Index field of a SIB byte without an index register."""


def region(analysis: X86FunctionAnalysis, addr: int, kept: int = 0) -> Region | Rejection:
    """Return the region (instructions) that a jump at `addr` would replace, or the rejection of the jump.

    The rules are those of the optimization policy `extended`. The last `kept` bytes of the jump are not
    written. These bytes must be equal to the bytes that the code has at their addresses.
    """
    function = analysis.function
    if addr in analysis.layout.entry_text:
        return Rejection(RejectReason.ENTRY_TEXT, addr)
    if function.end - addr < JMP32_SIZE:
        return Rejection(RejectReason.REGION_TOO_SHORT, addr)
    undecodable = analysis.flow.hazards.get(RejectReason.UNDECODABLE)
    if undecodable is not None:
        return Rejection(RejectReason.UNDECODABLE, undecodable)
    found = _covered(analysis, addr, kept)
    if kept and isinstance(found, Region) and not punned.has_room(found, analysis.bits):
        return Rejection(RejectReason.NO_PUN, found.end)
    return found


def _covered(analysis: X86FunctionAnalysis, addr: int, kept: int) -> Region | Rejection:
    """Return the region (bytes) that a jump at `addr` covers, or the rejection of the jump.

    The last `kept` bytes of the jump keep their values. The region consists of whole instructions, padding,
    and the kept bytes.
    """
    used: list[Relocation] = []
    at = addr
    end = addr + JMP32_SIZE - kept
    jump = analysis.flow.branch_into(range(addr + INT3_SIZE, end))
    if jump is not None:
        return Rejection(RejectReason.JUMP_INTO_RANGE, jump.source)
    while at < end:
        facts = analysis.flow.facts.get(at)
        refused = _refusal(analysis, addr, at, facts)
        if facts is None or refused is not None:
            return refused or Rejection(RejectReason.NOT_A_BOUNDARY, at)
        used.append(facts.relocation)
        if facts.relocation is Relocation.CALL and at + facts.length < end:
            return Rejection(RejectReason.CALL_BEFORE_END, at)
        if facts.relocation is Relocation.SHADOW and at + facts.length >= end:
            return Rejection(RejectReason.DELAYS_INTERRUPTS, at)
        at += facts.length
        if facts.relocation in _LEAVES:
            break
    copied = at
    while at < end:
        size = _padding(analysis, at)
        if not size:
            return Rejection(RejectReason.CODE_AFTER_JUMP, at)
        at += size
    if kept and at > end:
        return Rejection(RejectReason.NOT_A_BOUNDARY, end)
    reserved = reserved_range(analysis.function, addr, at + kept - 1)
    if reserved is not None:
        return reserved
    return Region(
        addr,
        analysis.bytes_at(addr, at + kept - addr),
        padding=at - copied,
        kept=kept,
        tactics=_tactics(analysis, addr, used, has_padding=at > copied, is_punned=kept > 0),
    )


def _refusal(
    analysis: X86FunctionAnalysis, addr: int, at: int, facts: InsnAttributes | None
) -> Rejection | None:
    """Return the rejection if the instruction at `at` can't be in the region of a jump at `addr`; else None.

    `facts`: attributes of the instruction; None if no instruction begins at `at`.
    """
    if facts is None:
        return Rejection(RejectReason.NOT_A_BOUNDARY, at)
    if facts.relocation is Relocation.REFUSED:
        return Rejection(facts.rejection or RejectReason.NOT_BOOSTABLE, at)
    if at in analysis.function.exception_entries:
        return Rejection(RejectReason.EXCEPTION_ENTRY, at)
    if facts.relocation in _DIRECT:
        insn = analysis.bytes_at(at, facts.length)
        displacement = int.from_bytes(insn[-facts.displacement :], "little", signed=True)
        if at + facts.length + displacement == addr:
            return Rejection(RejectReason.JUMP_TO_START, at)
    return None


def _padding(analysis: X86FunctionAnalysis, at: int) -> int:
    """Return the size in bytes of the int3 or nop at `at`; 0 if neither is there."""
    facts = analysis.flow.facts.get(at)
    if facts is None:
        return 0
    code = analysis.bytes_at(at, facts.length)
    if code == INT3:
        return len(INT3)
    insn = decode_insn(code.ljust(MAX_INSN_SIZE, b"\0"), analysis.bits)
    is_nop = insn.opcode == b"\x90" and not insn.rex & 1 and _REP not in insn.prefixes
    is_filler = is_nop or insn.opcode == b"\x0f\x1f" or (analysis.bits == 32 and _is_lea_nop(insn, code))
    return facts.length if is_filler else 0


def _is_lea_nop(insn: X86Insn, code: bytes) -> bool:
    """Return True for a lea that sets a register to itself plus 0. gcc pads 32-bit code with such a lea."""
    if insn.opcode != b"\x8d" or insn.modrm is None or not insn.displacement_offset or insn.displacement:
        return False
    if insn.modrm & 7 != _RM_SIB:
        return insn.rm == insn.reg
    return code[insn.displacement_offset - 1] & 0x3F == _NO_INDEX | insn.reg


def _tactics(
    analysis: X86FunctionAnalysis,
    addr: int,
    used: list[Relocation],
    *,
    has_padding: bool,
    is_punned: bool,
) -> Tactics:
    """Return the tactics (relaxations of Linux's rules) that the jump at `addr` needs.

    `used`: kinds of relocation of the region's instructions. `has_padding`: the region has padding.
    `is_punned`: the last bytes of the jump are not written, because the code there has the same bytes.
    """
    flow = analysis.flow
    needed = {
        Tactic.RETURN_THUNK: RejectReason.THUNK_JUMP in flow.hazards and not flow.jumps_through_register,
        Tactic.NEXT_BYTE: not is_punned and flow.jump_into(addr + JMP32_SIZE, addr + JMP32_SIZE) is not None,
        Tactic.RELOCATED_BRANCH: any(each in _RELOCATED for each in used),
        Tactic.INDIRECT_JUMP: flow.jumps_through_register,
        Tactic.EXACT_TABLES: RejectReason.EXCEPTION_TABLE in flow.hazards,
        Tactic.PADDING: has_padding,
        Tactic.OPCODE: Relocation.BEYOND_TABLE in used,
        Tactic.PUNNED: is_punned,
    }
    return tuple(tactic for tactic, is_needed in needed.items() if is_needed)
