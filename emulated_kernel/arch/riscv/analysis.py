"""One pass over a function: its instructions, what forbids jump optimization in it, and free registers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache

from emulated_kernel.arch.analysis.dataflow import Effect, solve
from emulated_kernel.arch.analysis.function import Function
from emulated_kernel.arch.analysis.reason import Finding, Reason
from emulated_kernel.arch.analysis.region import Live
from emulated_kernel.arch.riscv.insn import (
    GP,
    REGISTER_NAMES,
    RVC_SIZE,
    RVI_SIZE,
    S0,
    S1,
    SP,
    T0,
    T1,
    T2,
    T3,
    T6,
    TP,
    RiscvInsn,
    RiscvOpcode,
    decode_all,
)

ALL_REGISTERS = 0xFFFFFFFE
"""x1 to x31; x0 is constant."""

_RS1, _RS2, _RD = 1, 2, 4
_CSR_IMMEDIATE = 4
"""Bit of a system instruction's funct3: the first source is a number."""
_FORMS = {
    RiscvOpcode.LOAD: _RS1 | _RD,
    RiscvOpcode.LOAD_FP: _RS1,
    RiscvOpcode.MISC_MEM: _RS1,
    RiscvOpcode.OP_IMM: _RS1 | _RD,
    RiscvOpcode.AUIPC: _RD,
    RiscvOpcode.OP_IMM_32: _RS1 | _RD,
    RiscvOpcode.STORE: _RS1 | _RS2,
    RiscvOpcode.STORE_FP: _RS1,
    RiscvOpcode.AMO: _RS1 | _RS2 | _RD,
    RiscvOpcode.OP: _RS1 | _RS2 | _RD,
    RiscvOpcode.LUI: _RD,
    RiscvOpcode.OP_32: _RS1 | _RS2 | _RD,
    RiscvOpcode.BRANCH: _RS1 | _RS2,
    RiscvOpcode.JALR: _RS1 | _RD,
    RiscvOpcode.JAL: _RD,
}


def effect(insn: RiscvInsn) -> tuple[int, int]:
    """Masks of the registers that it reads, and of those that it overwrites as a whole.

    What isn't known, as vectors and floating point, reads all and overwrites none.
    """
    if insn.opcode == RiscvOpcode.SYSTEM:
        return _system_effect(insn)
    form = _FORMS.get(RiscvOpcode(insn.opcode)) if insn.opcode in _OPCODES else None
    if form is None:
        return ALL_REGISTERS, 0
    reads = (1 << insn.rs1 if form & _RS1 else 0) | (1 << insn.rs2 if form & _RS2 else 0)
    return reads & ALL_REGISTERS, (1 << insn.rd if form & _RD else 0) & ALL_REGISTERS


_OPCODES = frozenset(RiscvOpcode)


def _system_effect(insn: RiscvInsn) -> tuple[int, int]:
    """csr instructions; the others may do anything."""
    if not insn.funct3 & 3:
        return ALL_REGISTERS, 0
    reads = 0 if insn.funct3 & _CSR_IMMEDIATE else 1 << insn.rs1
    return reads & ALL_REGISTERS, 1 << insn.rd & ALL_REGISTERS


_NEVER_DEAD: int = 1 << SP | 1 << GP | 1 << TP
_KEPT_BY_CALLS = frozenset((S0, S1, *range(18, T3)))
_LOAD_POINTER = 3
"""funct3 of ld."""
TEMPORARIES: int = sum(1 << number for number in (T0, T1, T2, *range(T3, T6 + 1)))
"""Mask of t0 to t6: no arguments of a call, no results, and not preserved by it."""


class RiscvFunctionAnalysis:
    """A function decoded once, with its branches and data flow, for the rules."""

    def __init__(self, function: Function, *, compressed: bool) -> None:
        self.function = function
        code = function.code[: function.size]
        self.insns: dict[int, RiscvInsn] = dict(decode_all(code, function.addr, compressed=compressed))
        self._sources: dict[int, list[int]] = {}
        """By target of jumps and branches, the addresses of these."""
        self._mentioned = 0
        for addr, insn in self.insns.items():
            self._look_at(addr, insn)
        self.hazard = min(self._hazards(), key=lambda finding: finding.addr, default=None)
        """The first thing that forbids optimization anywhere in the function."""

    def jump_into(self, inside: range) -> int | None:
        """The first jump or branch of the function with a target there."""
        return min((source for to in inside for source in self._sources.get(to, ())), default=None)

    def _look_at(self, addr: int, insn: RiscvInsn) -> None:
        reads, writes = effect(insn)
        if reads != ALL_REGISTERS:
            self._mentioned |= reads | writes
        target = self._target(addr, insn)
        if target is not None:
            self._sources.setdefault(target, []).append(addr)

    def _target(self, addr: int, insn: RiscvInsn) -> int | None:
        """Target of a direct jump or branch, also of a jalr by way of auipc."""
        if insn.relative_target is not None:
            return addr + insn.relative_target
        upper = self.insns.get(addr - RVI_SIZE)
        if (
            not insn.is_indirect_jump
            or upper is None
            or upper.opcode != RiscvOpcode.AUIPC
            or upper.rd != insn.rs1
        ):
            return None
        return addr - RVI_SIZE + upper.upper_immediate + insn.immediate

    def _hazards(self) -> Iterator[Finding]:
        end = self.function.addr
        for addr, insn in self.insns.items():
            if addr in self.function.exception_entries:
                yield Finding(Reason.EXCEPTION_TABLE, addr)
            if insn.is_indirect_jump and self._target(addr, insn) is None and not self._is_tail_call(addr):
                yield Finding(Reason.INDIRECT_JUMP, addr)
            end = addr + insn.length
        if end < self.function.end:
            yield Finding(Reason.UNDECODABLE, end)

    def _is_tail_call(self, addr: int) -> bool:
        """Whether an indirect jump goes to a pointer as it was loaded: not by a table, which is indexed.

        gcc's tables hold 32 bits, to which an address is added. All ways to the jump are looked at.
        """
        register = self.insns[addr].rs1
        loads = self._definitions(addr, register)
        return loads is not None and all(
            at is None or self._loads_pointer(at, self.insns[at]) for at in loads
        )

    def _loads_pointer(self, addr: int, insn: RiscvInsn) -> bool:
        if insn.opcode != RiscvOpcode.LOAD or insn.funct3 != _LOAD_POINTER or insn.rs1 == SP:
            return False
        bases = self._definitions(addr, insn.rs1)
        return bases is not None and all(
            at is None or self.insns[at].opcode != RiscvOpcode.OP for at in bases
        )

    def _definitions(self, addr: int, register: int) -> set[int | None] | None:
        """The instructions that a register's value at `addr` may come from, None for the function's caller.

        No set where a call may have overwritten it.
        """
        found: set[int | None] = set()
        seen, ways = {addr}, self._before(addr)
        while ways:
            at = ways.pop()
            if at in seen:
                continue
            seen.add(at)
            insn = self.insns[at]
            if effect(insn)[1] >> register & 1:
                found.add(at)
                continue
            if insn.is_call and register not in _KEPT_BY_CALLS:
                return None
            if at == self.function.addr:
                found.add(None)
            ways += self._before(at)
        return found

    def _before(self, addr: int) -> list[int]:
        """The instructions that an address is reached from."""
        before = [source for source in self._sources.get(addr, ()) if not self.insns[source].is_call]
        for size in (RVC_SIZE, RVI_SIZE):
            insn = self.insns.get(addr - size)
            if insn is not None and insn.length == size and not _never_falls_through(insn):
                before.append(addr - size)
        return before

    # Registers

    def live_mask(self, addr: int) -> int:
        """Registers that may still be read in front of the instruction at `addr`; all where there is none.

        What the function reads before it writes it, or what it leaves with: kernel assembly follows no
        calling convention that could be relied on. But a temporary that the function doesn't mention is
        nobody's. Mirrors: opt.c:find_register, update_free_reg (optprobes v6, 2023). Deviates: all ways are
        followed, not the straight one alone, and arguments that aren't mentioned may be passed on.
        """
        live: int = self._live.get(addr, ALL_REGISTERS)
        return live & (self._mentioned | ~TEMPORARIES) | _NEVER_DEAD

    def at(self, addr: int) -> Live:
        """The same by name."""
        return as_live(self.live_mask(addr))

    @cached_property
    def _live(self) -> dict[int, int]:
        return solve({addr: self._effect(addr, insn) for addr, insn in self.insns.items()}, ALL_REGISTERS)

    def _effect(self, addr: int, insn: RiscvInsn) -> Effect:
        reads, kills = effect(insn)
        behind = addr + insn.length
        if addr in self.function.exception_entries:
            return Effect(ALL_REGISTERS, 0, (), True)
        if insn.opcode == RiscvOpcode.BRANCH:
            return Effect(reads, kills, (behind, addr + insn.branch_offset), False)
        if insn.opcode == RiscvOpcode.JAL and not insn.is_call:
            return Effect(reads, kills, (addr + insn.jump_offset,), False)
        if insn.opcode in (RiscvOpcode.JAL, RiscvOpcode.JALR):
            return Effect(reads, kills, (), True)
        return Effect(reads, kills, (behind,), False)


def _never_falls_through(insn: RiscvInsn) -> bool:
    return insn.opcode in (RiscvOpcode.JAL, RiscvOpcode.JALR) and not insn.is_call


@lru_cache(4096)
def as_live(mask: int) -> Live:
    """One object for equal states: there are few, and what is compiled is looked up by them."""
    names = (name for number, name in enumerate(REGISTER_NAMES) if mask >> number & 1)
    return Live(frozenset(names), flags=False)


ALL_LIVE = as_live(ALL_REGISTERS)
"""Where nothing is known."""
