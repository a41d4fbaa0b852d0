"""Analysis of x86 functions for the probe checks: instructions, branches and register liveness."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

from emulated_kernel.arch.analysis.function import Function, TextLayout
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.x86.insn import MAX_INSN_SIZE
from emulated_kernel.arch.x86.insn_attributes import ControlTransfer, DecodeCache, InsnAttributes
from emulated_kernel.arch.x86.liveness import Liveness
from emulated_kernel.util.fast_named_tuple import NamedTuple

NOP5 = bytes.fromhex("0f1f440000")
"""The 5-byte nop at a disabled fentry site."""
UD2_SIZE = 2
JUMP_SIZE = 5
"""Size in bytes of a jump with a 32-bit displacement."""
_NOWHERE = TextLayout()


class RelativeBranch(NamedTuple):
    """A relative jump or call: the address of its target, and its own address."""

    target: int
    source: int


class X86FunctionAnalysis:
    """Analyses of one function, based on Linux's decoder. Each analysis is computed on first use.

    In the constructor, `known` is a cache of instruction attributes, and `layout` has address ranges of the
    kernel's text. `bug_size`: size in bytes of a BUG(). Kernels of 2007 stored line and file after the ud2
    (i386: 8 bytes); later kernels store them in a table (2 bytes). `has_jump_tables`: whether an indirect
    jump may lead to any instruction of its function; if not, indirect jumps don't forbid optimization.
    """

    def __init__(
        self,
        function: Function,
        known: DecodeCache,
        layout: TextLayout = _NOWHERE,
        bug_size: int = UD2_SIZE,
        *,
        has_jump_tables: bool = True,
    ) -> None:
        self._has_jump_tables = has_jump_tables
        self.function = function
        self.layout = layout
        self.bits = known.bits
        self._known = known
        self._code = _unpatched(function)
        self._bug_size = bug_size

    def bytes_at(self, addr: int, size: int = MAX_INSN_SIZE) -> bytes:
        """Return the unpatched text at `addr`, padded with zeros after the function's end."""
        at = addr - self.function.addr
        return self._code[at : at + size].ljust(size, b"\0")

    @cached_property
    def flow(self) -> FunctionFlow:
        """Instructions and jumps of the function, decoded at first use."""
        layout = self.layout if self._has_jump_tables else None
        return FunctionFlow(self.function, layout, self._code, self._known, self._bug_size)

    @cached_property
    def patched(self) -> frozenset[int]:
        """Addresses of the bytes that subsystems other than kprobes patch."""
        function = self.function
        sites = (*function.fentry_sites, *function.jump_labels, *function.static_calls)
        return frozenset(addr for site in sites for addr in range(site.addr, site.addr + site.size))

    @cached_property
    def liveness(self) -> Liveness:
        """Registers and flags that may still be read at each instruction."""
        return Liveness(self.function, self.bits)


class FunctionFlow:
    """Instructions of a function, and hazards that forbid jump optimization in it.

    Decoding stops at the first instruction that Linux can't decode. Instructions after it can't be probed,
    and instructions before it can't be optimized.
    """

    def __init__(
        self, function: Function, layout: TextLayout | None, code: bytes, known: DecodeCache, bug_size: int
    ) -> None:
        """Decode a function.

        `layout`: address ranges of the kernel's thunks; None if indirect jumps are no hazards. `code`:
        unpatched code of the function. `known`: cache of instruction attributes. `bug_size`: size in bytes
        of a BUG().
        """
        self._layout = layout
        self.hazard: Rejection | None = None
        """Rejection of all jumps in the function, or None if it has no hazard.

        The rejection names the hazard with the lowest address.
        """
        self.hazards = dict[RejectReason, int]()
        """Reason against optimization in the whole function -> lowest address of such a hazard."""
        self.jumps_through_register = False
        """Whether the function has an indirect jump, or a jump to a thunk other than a return thunk.

        Always False if indirect jumps are no hazards in this kernel.
        """
        self._calls: list[RelativeBranch] = []
        self._jumps: list[RelativeBranch] = []
        self.facts = known.all(code, function.addr, bug_size)
        """Address -> attributes of the instruction there."""
        self._scan(function, code, bug_size)
        self._jumps.sort()

    def jump_into(self, first: int, last: int) -> RelativeBranch | None:
        """Return the function's first jump to a target in first..last, both inclusive, or else None."""
        index = bisect_left(self._jumps, (first, 0))
        if index == len(self._jumps) or self._jumps[index].target > last:
            return None
        found = self._jumps[index : bisect_left(self._jumps, (last + 1, 0), index)]
        return min(found, key=lambda jump: jump.source)

    def branch_into(self, inside: range) -> RelativeBranch | None:
        """Return the first jump or call of the function with a target in `inside`; None if there is none."""
        branches = self._branches
        first = bisect_left(branches, (inside.start, 0))
        found = branches[first : bisect_left(branches, (inside.stop, 0), first)]
        return min(found, key=lambda branch: branch.source, default=None)

    @cached_property
    def _branches(self) -> list[RelativeBranch]:
        return sorted((*self._jumps, *self._calls))

    @property
    def jump_targets(self) -> list[int]:
        """Targets of the function's jumps in ascending order."""
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
        self.hazards[reason] = min(addr, self.hazards.get(reason, addr))
        if self.hazard is None or addr < self.hazard.addr:
            self.hazard = Rejection(reason, addr)

    def _look_at_branch(self, addr: int, facts: InsnAttributes, displacement: bytes) -> None:
        if facts.branch is ControlTransfer.INDIRECT_JUMP:
            if self._layout is not None:
                self._forbid(RejectReason.INDIRECT_JUMP, addr)
                self.jumps_through_register = True
            return
        target = addr + facts.length + int.from_bytes(displacement, "little", signed=True)
        if facts.branch is ControlTransfer.CALL:
            self._calls.append(RelativeBranch(target, addr))
            return
        self._jumps.append(RelativeBranch(target, addr))
        layout = self._layout
        if layout is None or not layout.thunks:
            return
        if layout.thunks.start <= target <= layout.thunks.stop:
            self._forbid(RejectReason.THUNK_JUMP, addr)
            self.jumps_through_register |= target not in layout.return_thunks


def _unpatched(function: Function) -> bytes:
    """Return the function's code with ftrace's nop at every fentry site, regardless of the current bytes.

    Mirrors: arch/x86/kernel/kprobes/core.c:__recover_probed_insn (v6.1).
    """
    code = bytearray(function.code[: function.size])
    for site in function.fentry_sites:
        at = site.addr - function.addr
        if 0 <= at <= len(code) - len(NOP5):
            code[at : at + len(NOP5)] = NOP5
    return bytes(code)
