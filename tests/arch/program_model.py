"""An interpreter for handler programs on flat memory.

Tests compare the effects of machine code with the interpreter's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, singledispatchmethod
from typing import Protocol

from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir import Arithmetic, Condition


class Unmapped(Exception):
    """Raised by an access outside of all regions."""


class Regions:
    """Memory that consists of separate areas. An access must be within one area."""

    def __init__(self, areas: Mapping[int, bytes]) -> None:
        self.areas = {start: bytearray(data) for start, data in areas.items()}

    def _find(self, address: int, size: int) -> tuple[bytearray, int]:
        for start, data in self.areas.items():
            if start <= address and address + size <= start + len(data):
                return data, address - start
        raise Unmapped(hex(address))

    def read(self, address: int, size: int) -> int:
        data, at = self._find(address, size)
        return int.from_bytes(data[at : at + size], "little")

    def write(self, address: int, value: int, size: int) -> None:
        data, at = self._find(address, size)
        data[at : at + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


_ARITHMETIC: dict[Arithmetic, Callable[[int, int, int], int]] = {
    Arithmetic.ADD: lambda a, b, _: a + b,
    Arithmetic.SUB: lambda a, b, _: a - b,
    Arithmetic.AND: lambda a, b, _: a & b,
    Arithmetic.OR: lambda a, b, _: a | b,
    Arithmetic.XOR: lambda a, b, _: a ^ b,
    Arithmetic.SHL: lambda a, b, _: a << b,
    Arithmetic.SHR: lambda a, b, _: a >> b,
    Arithmetic.SAR: lambda a, b, bits: signed(a, bits) >> b,
}
_UNSIGNED = {
    Condition.EQ: operator.eq,
    Condition.NE: operator.ne,
    Condition.BELOW: operator.lt,
    Condition.BELOW_EQ: operator.le,
    Condition.ABOVE: operator.gt,
    Condition.ABOVE_EQ: operator.ge,
    Condition.ANY_BIT: lambda a, b: a & b != 0,
    Condition.NO_BIT: lambda a, b: a & b == 0,
}
_SIGNED = {
    Condition.LESS: operator.lt,
    Condition.LESS_EQ: operator.le,
    Condition.GREATER: operator.gt,
    Condition.GREATER_EQ: operator.ge,
}


def _immediate(value: int) -> int:
    assert -(1 << 31) <= value < 1 << 31, "no 32 bits with sign"
    return value


def holds(condition: Condition, left: int, right: int, bits: int) -> bool:
    mask = (1 << bits) - 1
    if condition in _UNSIGNED:
        return bool(_UNSIGNED[condition](left & mask, right & mask))
    return bool(_SIGNED[condition](signed(left, bits), signed(right, bits)))


Host = Callable[[int], bool]
"""Function that is called with the number of a host call; it returns whether the program continues."""

MAX_STEPS = 200_000
"""Maximum number of executed ops; a program that executes more counts as looping."""


class ProgramMemory(Protocol):
    """Memory that is accessed as integers of `size` bytes. Raises: Unmapped."""

    def read(self, address: int, size: int, /) -> int: ...

    def write(self, address: int, value: int, size: int, /) -> None: ...


@dataclass
class Interpreter:
    """An interpreter that runs a handler program."""

    bits: int
    registers: dict[str, int]
    memory: ProgramMemory
    per_cpu: int
    """Address of the per-CPU base."""
    host: Host
    vregs: list[int] = field(default_factory=lambda: [0] * ir.NR_VREGS)
    """The virtual registers, which are 0 at first, as in the machine code that is compared."""
    faults: int = 0
    call: Callable[[int], None] | None = None
    """Function that runs the code at an address for CallPerCpu; None if no program calls code."""

    def run(self, program: ir.Program) -> None:
        places = {op.label: at for at, op in enumerate(program) if isinstance(op, ir.Place)}
        at = 0
        for _ in range(MAX_STEPS):
            if at == len(program):
                return
            op = program[at]
            label = _method(type(op))(self, op)
            at = places[label] if label is not None else at + 1
        raise AssertionError("the program loops")

    def _set(self, vreg: int, value: int) -> None:
        self.vregs[vreg] = value & (1 << self.bits) - 1

    def _address(self, base: int, offset: int) -> int:
        return self.vregs[base] + offset & (1 << self.bits) - 1

    @singledispatchmethod
    def _do(self, op: ir.Op) -> ir.Label | None:
        raise NotImplementedError(op)

    @_do.register
    def _(self, op: ir.SetImmediate) -> None:
        self._set(op.dst, op.value)

    @_do.register
    def _(self, op: ir.Move) -> None:
        self._set(op.dst, self.vregs[op.src])

    @_do.register
    def _(self, op: ir.GetRegister) -> None:
        self._set(op.dst, self.registers[op.name])

    @_do.register
    def _(self, op: ir.SetRegister) -> None:
        self.registers[op.name] = self.vregs[op.src]

    @_do.register
    def _(self, op: ir.Load) -> ir.Label | None:
        try:
            value = self.memory.read(self._address(op.base, op.offset), op.size)
        except Unmapped:
            assert op.on_fault is not None
            self.faults += 1
            return op.on_fault
        self._set(op.dst, signed(value, 8 * op.size) if op.is_signed else value)
        return None

    @_do.register
    def _(self, op: ir.Store) -> None:
        self.memory.write(self._address(op.base, op.offset), self.vregs[op.src], op.size)

    @_do.register
    def _(self, op: ir.StoreImmediate) -> None:
        self.memory.write(self._address(op.base, op.offset), op.value, op.size)

    @_do.register
    def _(self, op: ir.LoadAbsolute) -> None:
        self._set(op.dst, self.memory.read(op.address, op.size))

    @_do.register
    def _(self, op: ir.AddToAbsolute) -> None:
        self.memory.write(op.address, self.memory.read(op.address, 8) + op.value, 8)

    @_do.register
    def _(self, op: ir.StorePerCpu) -> None:
        self.memory.write(self.per_cpu + op.offset, self.vregs[op.src], op.size)

    @_do.register
    def _(self, op: ir.AddToPerCpu) -> None:
        address = self.per_cpu + op.offset
        self.memory.write(address, self.memory.read(address, op.size) + op.value, op.size)

    @_do.register
    def _(self, op: ir.IncreasePerCpu) -> None:
        address = self.per_cpu + op.offset
        self.memory.write(address, self.memory.read(address, 8) + self.vregs[op.src], 8)

    @_do.register
    def _(self, op: ir.ComputePerCpu) -> None:
        left = self.vregs[op.dst] | (0 if op.high is None else self.vregs[op.high] << self.bits)
        value = _ARITHMETIC[op.op](left, self.memory.read(self.per_cpu + op.offset, 8), 64)
        self._set_both(op.dst, op.high, value)

    @_do.register
    def _(self, op: ir.AddAndFetch) -> None:
        value = self.memory.read(op.address, 8) + op.value
        self.memory.write(op.address, value, 8)
        self._set_both(op.dst, op.high, value)

    def _set_both(self, dst: int, high: int | None, value: int) -> None:
        self._set(dst, value)
        if high is not None:
            self._set(high, value >> self.bits)

    @_do.register
    def _(self, op: ir.LoadPerCpu) -> None:
        self._set(op.dst, self.memory.read(self.per_cpu + op.offset, op.size))

    @_do.register
    def _(self, op: ir.Compute) -> None:
        self._set(op.dst, _ARITHMETIC[op.op](self.vregs[op.dst], self.vregs[op.src], self.bits))

    @_do.register
    def _(self, op: ir.ComputeImmediate) -> None:
        self._set(op.dst, _ARITHMETIC[op.op](self.vregs[op.dst], _immediate(op.value), self.bits))

    @_do.register
    def _(self, _op: ir.Place) -> None:
        pass

    @_do.register
    def _(self, op: ir.Jump) -> ir.Label:
        return op.label

    @_do.register
    def _(self, op: ir.Branch) -> ir.Label | None:
        taken = holds(op.condition, self.vregs[op.left], self.vregs[op.right], self.bits)
        return op.label if taken else None

    @_do.register
    def _(self, op: ir.BranchImmediate) -> ir.Label | None:
        value = _immediate(op.value)
        return op.label if holds(op.condition, self.vregs[op.left], value, self.bits) else None

    @_do.register
    def _(self, op: ir.BranchPerCpu) -> ir.Label | None:
        value = self.memory.read(self.per_cpu + op.offset, op.size)
        return op.label if holds(op.condition, value, _immediate(op.value), 8 * op.size) else None

    @_do.register
    def _(self, op: ir.CallHost) -> ir.Label | None:
        return None if self.host(op.number) else op.label

    @_do.register
    def _(self, op: ir.CallPerCpu) -> None:
        assert self.call is not None
        self.call(self.memory.read(self.per_cpu + op.offset, self.bits // 8))

    @_do.register
    def _(self, op: ir.Multiply) -> None:
        self._set(op.dst, self.vregs[op.dst] * self.vregs[op.src])

    @_do.register
    def _(self, op: ir.CompareExchange) -> ir.Label | None:
        address, size = self._address(op.base, op.offset), self.bits // 8
        found = self.memory.read(address, size)
        if found != self.vregs[op.expected]:
            self._set(op.expected, found)
            return op.label
        self.memory.write(address, self.vregs[op.new], size)
        return None

    @_do.register
    def _(self, op: ir.FetchAdd) -> None:
        address, size = self._address(op.base, op.offset), self.bits // 8
        found = self.memory.read(address, size)
        self.memory.write(address, found + self.vregs[op.addend], size)
        self._set(op.addend, found)


@cache
def _method(kind: type[ir.Op]) -> Callable[[Interpreter, ir.Op], ir.Label | None]:
    """Return the method that executes ops of a class.

    singledispatchmethod creates a function at each call, which took half of the time of a run.
    """
    dispatcher = vars(Interpreter)["_do"].dispatcher
    found: Callable[[Interpreter, ir.Op], ir.Label | None] = dispatcher.dispatch(kind)
    return found
