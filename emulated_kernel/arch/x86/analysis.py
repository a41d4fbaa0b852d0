"""One pass over a function: instruction boundaries, and what forbids jump optimization in it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from emulated_kernel.arch.function import Function, TextLayout
from emulated_kernel.arch.reason import Finding, Reason
from emulated_kernel.arch.x86.decode import decode_all
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE, Insn, decode_insn, opcodes

NOP5 = bytes.fromhex("0f1f440000")
"""What ftrace keeps at a disabled fentry site."""

_RELATIVE_JUMPS = opcodes("70-7f e0-e3 e9 eb")
_JMP_FAR = 0xEA
_GROUP_5 = 0xFF


@dataclass(frozen=True, slots=True)
class Jump:
    """A relative jump; calls aren't jumps here."""

    target: int
    source: int


class FunctionAnalysis:
    """What the rules ask about a function, decoded once.

    Decoding stops at the first instruction that Linux can't decode: nothing behind it can be probed,
    and nothing in front of it optimized.
    """

    def __init__(self, function: Function, layout: TextLayout, bits: int = 64) -> None:
        self.function = function
        self.bits = bits
        self.code = _unpatched(function)
        self.lengths: dict[int, int] = {}
        """Length in bytes of the instruction at each boundary."""
        self.hazard: Finding | None = None
        """The first thing that forbids optimization anywhere in the function."""
        self._thunks = layout.thunks
        self._jumps: list[Jump] = []
        self._scan()
        self._jumps.sort(key=lambda jump: jump.target)
        self._targets = [jump.target for jump in self._jumps]

    def bytes_at(self, addr: int) -> bytes:
        """The unpatched text from `addr` on, with zeros behind the function."""
        at = addr - self.function.addr
        return self.code[at : at + MAX_INSN_SIZE].ljust(MAX_INSN_SIZE, b"\0")

    def jump_into(self, first: int, last: int) -> Jump | None:
        """The first jump of the function with a target in first..last, both inclusive."""
        index = bisect_left(self._targets, first)
        found = []
        while index < len(self._jumps) and self._targets[index] <= last:
            found.append(self._jumps[index])
            index += 1
        return min(found, key=lambda jump: jump.source, default=None)

    def _scan(self) -> None:
        entries = self.function.exception_entries
        next_addr = self.function.addr
        for addr, length, insn in decode_all(self.code, self.function.addr, self.bits):
            self.lengths[addr] = length
            next_addr = addr + length
            if addr in entries:
                self._forbid(Reason.EXCEPTION_TABLE, addr)
            self._look_at_branch(addr, length, insn)
        if next_addr < self.function.end:
            self._forbid(Reason.UNDECODABLE, next_addr)

    def _forbid(self, reason: Reason, addr: int) -> None:
        if self.hazard is None:
            self.hazard = Finding(reason, addr)

    def _look_at_branch(self, addr: int, length: int, insn: Any) -> None:
        if insn is not None and not insn.flow_control and not insn.encoding:
            return
        # Linux looks at opcode bytes, so that a VEX instruction whose opcode is 70 counts as a jo.
        seen = decode_insn(self.bytes_at(addr), self.bits)
        if is_indirect_jump(seen):
            self._forbid(Reason.INDIRECT_JUMP, addr)
        elif is_relative_jump(seen):
            target = addr + length + seen.immediate
            self._jumps.append(Jump(target, addr))
            if self._thunks and self._thunks.start <= target <= self._thunks.stop:
                self._forbid(Reason.THUNK_JUMP, addr)


def is_indirect_jump(insn: Insn) -> bool:
    """Mirrors: arch/x86/kernel/kprobes/opt.c:__insn_is_indirect_jump (v6.1)."""
    opcode = insn.opcode[0]
    return opcode == _JMP_FAR or (opcode == _GROUP_5 and insn.reg in (4, 5))


def is_relative_jump(insn: Insn) -> bool:
    """The opcodes of arch/x86/kernel/kprobes/opt.c:insn_jump_into_range (v6.1)."""
    if insn.opcode[0] == 0x0F:
        return insn.opcode[1] & 0xF0 == 0x80
    return insn.opcode[0] in _RELATIVE_JUMPS


def _unpatched(function: Function) -> bytes:
    """The text with ftrace's nop at every fentry site, whatever stands there now.

    Mirrors: arch/x86/kernel/kprobes/core.c:__recover_probed_insn (v6.1)
    """
    code = bytearray(function.code[: function.size])
    for site in function.fentry_sites:
        at = site - function.addr
        if 0 <= at <= len(code) - len(NOP5):
            code[at : at + len(NOP5)] = NOP5
    return bytes(code)
