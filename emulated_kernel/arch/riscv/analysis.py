"""Analysis of a RISC-V function: instructions, hazards for jump optimization, and free registers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, KeysView, Set
from functools import cached_property, lru_cache, reduce
from itertools import compress
from operator import attrgetter, or_

from emulated_kernel.arch.analysis.dataflow import LEAVES, Control, Effect, solve
from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.analysis.function import Function
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.riscv.insn import (
    ALL_REGISTERS,
    GP,
    LEADS_ELSEWHERE,
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
    Handling,
    RiscvInsn,
    RiscvInsnAttributes,
    RiscvOpcode,
    attributes_of_all,
    decode_all,
    decode_insn,
)

_MAY_FAULT = Effect(ALL_REGISTERS, 0, LEAVES)
"""Effect of an instruction in the exception table. If it faults, control continues at its fixup."""
_ON = Control(falls_through=True)
_NEVER_DEAD: int = 1 << SP | 1 << GP | 1 << TP
_CALLEE_SAVED = frozenset((S0, S1, *range(18, T3)))
_LOAD_POINTER = 3
"""Value of the field funct3 in ld, which loads a pointer."""
_KIND = attrgetter("kind")
_MENTIONED = attrgetter("mentioned")
_LEADING = bytes(kind & LEADS_ELSEWHERE for kind in range(256))
"""Table for bytes.translate(): instruction kind -> non-zero for branches and jumps, 0 for others."""
TEMPORARIES: int = sum(1 << number for number in (T0, T1, T2, *range(T3, T6 + 1)))
"""Mask of t0 to t6: they hold neither arguments nor results, and calls don't preserve them."""


class RiscvFunctionAnalysis:
    """A function that is decoded once, with the branches and the data flow that probe checks need."""

    def __init__(self, function: Function, *, compressed: bool, fentry: Set[int] = frozenset()) -> None:
        """Decode a function. `fentry`: addresses of the kernel's fentry sites.

        `compressed`: True if the kernel uses instructions of 2 bytes (RVC), too; False if all have 4 bytes.
        """
        self.function = function
        self.fentry = fentry
        self._compressed = compressed
        code = function.code[: function.size]
        self.insns: dict[int, RiscvInsnAttributes] = attributes_of_all(
            code, function.addr, compressed=compressed
        )
        last = next(reversed(self.insns), None)
        self.end = function.addr if last is None else last + self.insns[last].length
        """Address after the last instruction."""
        self._sources: dict[int, list[int]] = {}
        """Address of a target -> addresses of the function's jumps and branches to it."""
        self._indirect_jumps: list[int] = []
        self.kinds = bytes(map(_KIND, self.insns.values()))
        """The instructions' RiscvInsnAttributes.kind, one byte each, in address order."""
        for addr, insn in compress(self.insns.items(), self.kinds.translate(_LEADING)):
            if insn.relative_target is not None:
                self._sources.setdefault(addr + insn.relative_target, []).append(addr)
            else:
                self._look_at_indirect(addr, insn)
        hazards = sorted(self._hazards(), key=attrgetter("addr"))
        self.hazards = {hazard.reason: hazard.addr for hazard in reversed(hazards)}
        """Reason why no probe in the function is optimized -> lowest address of a hazard with this reason."""
        self.hazard = hazards[0] if hazards else None
        """First hazard, by address, that forbids optimization in the whole function; None without one."""

    @cached_property
    def rejections(self) -> dict[int, Rejection | None]:
        """Address of an instruction -> rejection of the nearest instruction that a detour can't execute.

        This is the instruction itself or a later one. The value is None if a detour can execute all
        instructions up to the end of the function.
        """
        found: dict[int, Rejection | None] = {}
        first = None
        for addr, insn in reversed(self.insns.items()):
            if insn.handling is not Handling.COPIED:
                first = Rejection(RejectReason.NOT_BOOSTABLE, addr)
            found[addr] = first
        return found

    def insn_at(self, addr: int) -> RiscvInsn:
        """Return the instruction at `addr`, with its immediates."""
        at = addr - self.function.addr
        return decode_insn(self.function.code[at : at + RVI_SIZE], compressed=self._compressed)

    def jump_into(self, inside: range) -> int | None:
        """Return the lowest address of a jump or branch with a target in `inside`; None if there is none."""
        if self._sources.keys().isdisjoint(inside):
            return None
        return min((source for to in inside for source in self._sources.get(to, ())), default=None)

    @property
    def jump_targets(self) -> KeysView[int]:
        """Targets of the function's jumps and branches, including targets outside the function."""
        return self._sources.keys()

    @property
    def has_jump_table(self) -> bool:
        """Whether an indirect jump of the function may lead to another address in the function."""
        return any(not self._is_tail_call(addr) for addr in self._indirect_jumps)

    def _look_at_indirect(self, addr: int, insn: RiscvInsnAttributes) -> None:
        """Record the jump `insn` at `addr`: as a direct jump if its target is known, else as an indirect one.

        The target is known if the instruction before the jump is an auipc that sets the jump's base register.
        """
        before = addr - RVI_SIZE
        upper = self.insns.get(before)
        if upper is None or upper.opcode != RiscvOpcode.AUIPC or upper.rd != insn.rs1:
            self._indirect_jumps.append(addr)
        else:
            at = before - self.function.addr
            code = self.function.code[at : at + 2 * RVI_SIZE]
            (_, auipc), (_, jump), *_ = decode_all(code, 0, compressed=True)
            target = before + auipc.upper_immediate + jump.immediate
            self._sources.setdefault(target, []).append(addr)

    def _hazards(self) -> Iterator[Rejection]:
        for addr in self.function.exception_entries:
            if addr in self.insns:
                yield Rejection(RejectReason.EXCEPTION_TABLE, addr)
        for addr in self._indirect_jumps:
            if not self._is_tail_call(addr):
                yield Rejection(RejectReason.INDIRECT_JUMP, addr)
        if self.end < self.function.end:
            yield Rejection(RejectReason.UNDECODABLE, self.end)

    def _is_tail_call(self, addr: int) -> bool:
        """Return True if an indirect jump is a tail call: its target is an unmodified pointer from memory.

        A jump through a table isn't a tail call: gcc's tables contain 32-bit offsets, to which an address is
        added. All paths to the jump are checked.
        """
        register = self.insns[addr].rs1
        loads = self._definitions(addr, register)
        return loads is not None and all(
            at is None or self._loads_pointer(at, self.insns[at]) for at in loads
        )

    def _loads_pointer(self, addr: int, insn: RiscvInsnAttributes) -> bool:
        if insn.opcode != RiscvOpcode.LOAD or insn.funct3 != _LOAD_POINTER or insn.rs1 == SP:
            return False
        bases = self._definitions(addr, insn.rs1)
        return bases is not None and all(
            at is None or self.insns[at].opcode != RiscvOpcode.OP for at in bases
        )

    def _definitions(self, addr: int, register: int) -> set[int | None] | None:
        """Return the addresses of the instructions that may define the value of `register` at `addr`.

        None as an element means that the caller defines the value. If a call may have overwritten the
        register, return None in place of a set.
        """
        found: set[int | None] = set()
        seen = {addr}
        ways = self._before(addr)
        while ways:
            at = ways.pop()
            if at in seen:
                continue
            seen.add(at)
            insn = self.insns[at]
            if insn.writes >> register & 1:
                found.add(at)
                continue
            if insn.is_call and register not in _CALLEE_SAVED:
                return None
            if at == self.function.addr:
                found.add(None)
            ways += self._before(at)
        return found

    def _before(self, addr: int) -> list[int]:
        """Return the addresses of the instructions from which control reaches `addr` directly."""
        before = [source for source in self._sources.get(addr, ()) if not self.insns[source].is_call]
        for size in (RVC_SIZE, RVI_SIZE):
            insn = self.insns.get(addr - size)
            if insn is not None and insn.length == size and not _never_falls_through(insn):
                before.append(addr - size)
        return before

    # Registers

    def live_mask(self, addr: int) -> int:
        """Return the mask of the registers that may still be read from `addr` on.

        All registers are live where control leaves the function, because kernel assembly follows no reliable
        calling convention. All registers also count as live if no instruction begins at `addr`. But a
        temporary register that no instruction of the function names is always free.
        Mirrors: opt.c:find_register, update_free_reg (optprobes v6, 2023). Deviates: the analysis follows all
        paths, while optprobes v6 follows only the straight path. Arguments that the function doesn't name
        count as live, because the function may pass them on.
        """
        live = self.live.get(addr)
        return ALL_REGISTERS & self._relevant | _NEVER_DEAD if live is None else live

    def first_need(self, addr: int, register: int) -> int | None:
        """Return the address of the nearest instruction that may need the value of `register` at `addr`.

        The instruction reads the register, or control leaves the function at the instruction. Return None if
        there is no such instruction.
        """
        ways = deque([(addr, addr)])
        seen = set[int]()
        while ways:
            at, before = ways.popleft()
            effect = self._effects.get(at)
            if effect is None:
                return before
            if at in seen:
                continue
            seen.add(at)
            falls_through, targets, leaves = effect.control or _ON
            if effect.reads >> register & 1:
                return at
            if not effect.keeps >> register & 1:
                continue
            if leaves:
                return at
            if falls_through:
                ways.append((at + self.insns[at].length, at))
            ways += ((at + distance, at) for distance in targets)
        return None

    def at(self, addr: int) -> LiveRegisters:
        """Return the live registers before the instruction at `addr`, by name."""
        return as_live(self.live_mask(addr))

    @property
    def has_idle_register(self) -> bool:
        """Whether some temporary register is free in the whole function, because no instruction names it."""
        return self._relevant & TEMPORARIES != TEMPORARIES

    @cached_property
    def live(self) -> dict[int, int]:
        """Address of each instruction -> its live_mask()."""
        live = solve(self._effects, ALL_REGISTERS)
        relevant = self._relevant
        return {addr: mask & relevant | _NEVER_DEAD for addr, mask in live.items()}

    @cached_property
    def _effects(self) -> dict[int, Effect]:
        """Instruction address -> its effect on registers, and its successors in the flow of control."""
        effects = {addr: insn.effect for addr, insn in self.insns.items()}
        for addr in self.function.exception_entries & effects.keys():
            effects[addr] = _MAY_FAULT
        return effects

    @cached_property
    def _relevant(self) -> int:
        """Mask of the registers that may be live: all except temporaries that the function doesn't name."""
        return reduce(or_, map(_MENTIONED, self.insns.values()), ~TEMPORARIES)


def _never_falls_through(insn: RiscvInsnAttributes) -> bool:
    return insn.opcode in (RiscvOpcode.JAL, RiscvOpcode.JALR) and not insn.is_call


@lru_cache(4096)
def as_live(mask: int) -> LiveRegisters:
    """Convert a mask of registers to LiveRegisters.

    Equal masks share one object, because compiled code is looked up by this object.
    """
    names = (name for number, name in enumerate(REGISTER_NAMES) if mask >> number & 1)
    return LiveRegisters(frozenset(names), flags=False)


ALL_LIVE = as_live(ALL_REGISTERS)
"""All registers: the live registers at addresses about which nothing is known."""
