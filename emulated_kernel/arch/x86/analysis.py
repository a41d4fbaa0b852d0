"""One function decoded for the verdict: its instructions and branches, and apart from them its liveness."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import NamedTuple

from emulated_kernel.arch.analysis.function import Function, TextLayout
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE
from emulated_kernel.arch.x86.insn_attributes import ControlTransfer, DecodeCache, InsnAttributes
from emulated_kernel.arch.x86.liveness import Liveness

NOP5 = bytes.fromhex("0f1f440000")
"""What ftrace keeps at a disabled fentry site."""
UD2_SIZE = 2
JUMP_SIZE = 5
"""Bytes of a jump with a displacement of 32 bits."""
_NOWHERE = TextLayout()


class RelativeBranch(NamedTuple):
    """A relative jump or call."""

    target: int
    source: int


class X86FunctionAnalysis:
    """A function as Linux reads it.

    `known`: facts of instructions met before. `bug_size`: bytes of a BUG(); kernels of 2007 kept the
    line and file behind the ud2 (i386: 8 bytes), today's keep them in a table (2).
    """

    def __init__(
        self, function: Function, known: DecodeCache, layout: TextLayout = _NOWHERE, bug_size: int = UD2_SIZE
    ) -> None:
        self.function = function
        self.layout = layout
        self.bits = known.bits
        self._known = known
        self._code = _unpatched(function)
        self._bug_size = bug_size

    def bytes_at(self, addr: int, size: int = MAX_INSN_SIZE) -> bytes:
        """The unpatched text from `addr` on, with zeros behind the function."""
        at = addr - self.function.addr
        return self._code[at : at + size].ljust(size, b"\0")

    @cached_property
    def flow(self) -> FunctionFlow:
        """Its instructions and jumps, decoded when a probe is to be registered there: liveness needs none."""
        return FunctionFlow(self.function, self.layout, self._code, self._known, self._bug_size)

    @cached_property
    def patched(self) -> frozenset[int]:
        """The bytes that others patch."""
        function = self.function
        sites = (*function.fentry_sites, *function.jump_labels, *function.static_calls)
        return frozenset(addr for site in sites for addr in range(site.addr, site.addr + site.size))

    @cached_property
    def liveness(self) -> Liveness:
        """What may still be read at each instruction."""
        return Liveness(self.function, self.bits)


class FunctionFlow:
    """The instructions of a function, and what forbids jump optimization in it.

    Decoding stops at the first instruction that Linux can't decode: nothing behind it can be probed,
    and nothing in front of it optimized.
    """

    def __init__(
        self, function: Function, layout: TextLayout, code: bytes, known: DecodeCache, bug_size: int
    ) -> None:
        self._thunks = layout.thunks
        self.hazard: Rejection | None = None
        """The first thing that forbids optimization anywhere in the function."""
        self._calls: list[RelativeBranch] = []
        self._jumps: list[RelativeBranch] = []
        self.facts = known.all(code, function.addr, bug_size)
        """Of the instruction at each boundary."""
        self._scan(function, code, bug_size)
        self._jumps.sort()

    def jump_into(self, first: int, last: int) -> RelativeBranch | None:
        """The jump of the function with a target in first..last, both inclusive, that comes first."""
        index = bisect_left(self._jumps, (first, 0))
        if index == len(self._jumps) or self._jumps[index].target > last:
            return None
        found = self._jumps[index : bisect_left(self._jumps, (last + 1, 0), index)]
        return min(found, key=lambda jump: jump.source)

    def branch_into(self, inside: range) -> RelativeBranch | None:
        """The same, with calls."""
        found = [branch for branch in (*self._jumps, *self._calls) if branch.target in inside]
        return min(found, key=lambda branch: branch.source, default=None)

    @property
    def jump_targets(self) -> list[int]:
        """Ascending."""
        return [target for target, _ in self._jumps]

    def _scan(self, function: Function, code: bytes, bug_size: int) -> None:
        start = function.addr
        end = function.addr
        padded = code.ljust(len(code) + MAX_INSN_SIZE, b"\0")
        branches = [(addr, facts) for addr, facts in self.facts.items() if facts.branch is not None]
        for addr, facts in branches:
            behind = addr + facts.length - start
            self._look_at_branch(addr, facts, padded[behind - facts.displacement : behind])
        if self.facts:
            addr, facts = next(reversed(self.facts.items()))
            end = addr + (facts.length - UD2_SIZE + bug_size if facts.is_ud2 else facts.length)
        entries = [addr for addr in function.exception_entries if addr in self.facts]
        if entries:
            self._forbid(RejectReason.EXCEPTION_TABLE, min(entries))
        if end < function.end:
            self._forbid(RejectReason.UNDECODABLE, end)

    def _forbid(self, reason: RejectReason, addr: int) -> None:
        if self.hazard is None or addr < self.hazard.addr:
            self.hazard = Rejection(reason, addr)

    def _look_at_branch(self, addr: int, facts: InsnAttributes, displacement: bytes) -> None:
        if facts.branch is ControlTransfer.INDIRECT_JUMP:
            self._forbid(RejectReason.INDIRECT_JUMP, addr)
            return
        target = addr + facts.length + int.from_bytes(displacement, "little", signed=True)
        if facts.branch is ControlTransfer.CALL:
            self._calls.append(RelativeBranch(target, addr))
            return
        self._jumps.append(RelativeBranch(target, addr))
        thunks = self._thunks
        if thunks and thunks.start <= target <= thunks.stop:
            self._forbid(RejectReason.THUNK_JUMP, addr)


def _unpatched(function: Function) -> bytes:
    """The text with ftrace's nop at every fentry site, whatever stands there now.

    Mirrors: arch/x86/kernel/kprobes/core.c:__recover_probed_insn (v6.1)
    """
    code = bytearray(function.code[: function.size])
    for site in function.fentry_sites:
        at = site.addr - function.addr
        if 0 <= at <= len(code) - len(NOP5):
            code[at : at + len(NOP5)] = NOP5
    return bytes(code)
