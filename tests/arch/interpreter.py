"""An interpreter of handler programs: what an architecture's generated code has to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from emulated_kernel.arch import program as ir
from emulated_kernel.arch.program import Arithmetic, Condition, Label, Program

STEPS = 200_000
"""Ops that a program may take before it counts as looping."""


class InterpretedMemory(Protocol):
    def read(self, address: int, size: int) -> bytes | None:
        """None where a byte isn't mapped."""

    def write(self, address: int, data: bytes) -> None: ...


class Interpreter:
    """Runs programs; `registers` are those at the hit, `actions` what host calls do."""

    def __init__(
        self,
        memory: InterpretedMemory,
        registers: Mapping[str, int],
        per_cpu: int,
        actions: Sequence[Callable[[], bool]] = (),
        bits: int = 64,
    ) -> None:
        self.memory = memory
        self.registers = registers
        self.per_cpu = per_cpu
        self.actions = actions
        self.bits = bits
        self.mask = (1 << bits) - 1
        self.vregs = [0xDEAD0000 + n for n in range(ir.NR_VREGS)]

    def run(self, program: Program) -> int:
        """Returns the ops taken."""
        places = {op.label: at for at, op in enumerate(program) if isinstance(op, ir.Place)}
        at = 0
        for steps in range(STEPS):
            if at == len(program):
                return steps
            target = self._step(program[at])
            at = at + 1 if target is None else places[target]
        raise AssertionError("the program loops")

    def _signed(self, value: int) -> int:
        return value - (1 << self.bits) if value >> (self.bits - 1) else value

    def _fetch(self, address: int, size: int) -> bytes:
        data = self.memory.read(address & self.mask, size)
        assert data is not None, f"{address:#x} can fault, and has no fixup"
        return data

    def _step(self, op: ir.Op) -> Label | None:
        v, mask = self.vregs, self.mask
        match op:
            case ir.SetImmediate():
                v[op.dst] = op.value & mask
            case ir.Move():
                v[op.dst] = v[op.src]
            case ir.GetRegister():
                v[op.dst] = self.registers[op.name]
            case ir.Load():
                return self._load(op)
            case ir.Store():
                self._store(v[op.base] + op.offset, v[op.src], op.size)
            case ir.StoreImmediate():
                self._store(v[op.base] + op.offset, op.value, op.size)
            case ir.LoadCell():
                v[op.dst] = self._number(op.address, op.size)
            case ir.AddToCell():
                self._store(op.address, self._number(op.address) + op.value, 8)
            case ir.LoadPerCpu():
                v[op.dst] = self._number(self.per_cpu + op.offset, op.size)
            case ir.StorePerCpu():
                self._store(self.per_cpu + op.offset, v[op.src], op.size)
            case ir.AddToPerCpu():
                address = self.per_cpu + op.offset
                self._store(address, self._number(address, op.size) + op.value, op.size)
            case ir.IncreasePerCpu():
                address = self.per_cpu + op.offset
                self._store(address, self._number(address) + v[op.src], 8)
            case ir.ComputePerCpu():
                sign = {Arithmetic.ADD: 1, Arithmetic.SUB: -1}[op.op]
                number = self._number(self.per_cpu + op.offset)
                self._set_long(op.dst, op.high, self._long(op.dst, op.high) + sign * number)
            case ir.AddAndFetch():
                self._store(op.address, self._number(op.address) + op.value, 8)
                self._set_long(op.dst, op.high, self._number(op.address))
            case ir.Compute():
                v[op.dst] = self._compute(op.op, v[op.dst], v[op.src])
            case ir.ComputeImmediate():
                v[op.dst] = self._compute(op.op, v[op.dst], _immediate(op.value) & mask)
            case ir.Place():
                pass
            case ir.Jump():
                return op.label
            case ir.Branch():
                return op.label if self._holds(op.condition, v[op.left], v[op.right]) else None
            case ir.BranchImmediate():
                right = _immediate(op.value) & mask
                return op.label if self._holds(op.condition, v[op.left], right) else None
            case ir.BranchPerCpu():
                left = self._number(self.per_cpu + op.offset, op.size)
                return op.label if self._holds(op.condition, left, _immediate(op.value) & mask) else None
            case ir.CallHost():
                return None if self.actions[op.number]() else op.label
        return None

    def _number(self, address: int, size: int = 8) -> int:
        return int.from_bytes(self._fetch(address, size), "little")

    def _long(self, low: int, high: int | None) -> int:
        return self.vregs[low] | (0 if high is None else self.vregs[high] << self.bits)

    def _set_long(self, low: int, high: int | None, value: int) -> None:
        self.vregs[low] = value & self.mask
        if high is not None:
            self.vregs[high] = value >> self.bits & self.mask

    def _load(self, op: ir.Load) -> Label | None:
        data = self.memory.read((self.vregs[op.base] + op.offset) & self.mask, op.size)
        if data is None:
            assert op.on_fault is not None, "a load that can fault has no fixup"
            return op.on_fault
        self.vregs[op.dst] = int.from_bytes(data, "little", signed=op.is_signed) & self.mask
        return None

    def _store(self, address: int, value: int, size: int) -> None:
        self.memory.write(address & self.mask, (value & (1 << 8 * size) - 1).to_bytes(size, "little"))

    def _compute(self, op: Arithmetic, left: int, right: int) -> int:
        match op:
            case Arithmetic.ADD:
                value = left + right
            case Arithmetic.SUB:
                value = left - right
            case Arithmetic.AND:
                value = left & right
            case Arithmetic.OR:
                value = left | right
            case Arithmetic.XOR:
                value = left ^ right
            case Arithmetic.SHL:
                value = left << right
            case Arithmetic.SHR:
                value = left >> right
            case Arithmetic.SAR:
                value = self._signed(left) >> right
        return value & self.mask

    def _holds(self, condition: Condition, left: int, right: int) -> bool:
        signed = self._signed(left), self._signed(right)
        return {
            Condition.EQ: left == right,
            Condition.NE: left != right,
            Condition.BELOW: left < right,
            Condition.BELOW_EQ: left <= right,
            Condition.ABOVE: left > right,
            Condition.ABOVE_EQ: left >= right,
            Condition.LESS: signed[0] < signed[1],
            Condition.LESS_EQ: signed[0] <= signed[1],
            Condition.GREATER: signed[0] > signed[1],
            Condition.GREATER_EQ: signed[0] >= signed[1],
            Condition.ANY_BIT: bool(left & right),
            Condition.NO_BIT: not left & right,
        }[condition]


def _immediate(value: int) -> int:
    assert -(1 << 31) <= value < 1 << 31, "no 32 bits with sign"
    return value
