"""Random handler programs and initial states, and their results in an interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir import Arithmetic, Condition, Label, Program
from tests.arch.program_model import Interpreter, Regions

CODE, DATA, CPU, STACK, END = 0x7700_0000, 0x20_0000, 0x30_0000, 0x6600_0000, 0x5500_0000
"""Addresses of one page each; sums and shifts of random values do not reach code or stack."""
FAR = 0x12_3456_0000
PAGE = 0x1000
SP = STACK + PAGE - 0x100
PROBE = 0x7F_0000
"""Address of the probe, at which nothing is mapped."""
COUNTERS = 0xF00
"""Offset in a CPU's area of the words that end loops; no other op accesses these words."""


@dataclass(frozen=True)
class Case:
    """A program, and the state in which it starts."""

    bits: int
    program: Program
    registers: dict[str, int]
    """Name -> initial value of each register of pt_regs that the program can read."""
    areas: dict[int, bytes]
    per_cpu: int
    """Address of the area that LoadPerCpu reads."""


@dataclass
class Outcome:
    registers: dict[str, int]
    areas: dict[int, bytes]
    host_calls: list[int]
    faults: int


def host_answer(calls: list[int], number: int, write: object) -> bool:
    """Answer a host call: record the call, and let the program continue after about half of the calls.

    `write`: function (address, value) that stores a 32-bit value in the program's memory.
    """
    calls.append(number)
    write((DATA + 8 * (number % 16)), len(calls))  # type: ignore[operator]
    return (number + len(calls)) % 2 == 0


def interpret(case: Case) -> Outcome:
    calls: list[int] = []

    def host(number: int) -> bool:
        return host_answer(calls, number, lambda at, value: memory.write(at, value, 4))

    memory = Regions(case.areas)
    registers = dict(case.registers)
    interpreter = Interpreter(case.bits, registers, memory, case.per_cpu, host)
    interpreter.run(case.program)
    areas = {start: bytes(data) for start, data in memory.areas.items()}
    return Outcome(registers, areas, calls, interpreter.faults)


class Maker:
    """Maker of random programs that end: each loop has a limited number of backward jumps."""

    def __init__(self, rng: random.Random, bits: int, names: Sequence[str], per_cpu: int) -> None:
        self.rng = rng
        self.bits = bits
        self.names = names
        self.per_cpu = per_cpu
        self.vregs = rng.sample(range(ir.NR_VREGS), rng.randint(1, ir.NR_VREGS))
        self.ops: list[ir.Op] = []
        self.placed: list[Label] = []
        self.pending: list[Label] = []
        self.labels = 0
        self.loops = 0

    def make(self) -> Program:
        rng = self.rng
        for vreg in self.vregs:
            if rng.random() < 0.5:
                self.ops.append(ir.GetRegister(vreg, rng.choice(self.names)))
            else:
                self.ops.append(ir.SetImmediate(vreg, self.number()))
        makers = [
            self.plain, self.plain, self.plain, self.memory, self.memory, self.cell, self.cell,
            self.faulting, self.branch, self.branch, self.place, self.jump, self.loop, self.host,
        ]  # fmt: skip
        if rng.random() < 0.2:
            makers = [self.plain, self.memory]
        for _ in range(rng.randint(0, 30)):
            rng.choice(makers)()
        while self.pending:
            self.place()
        return tuple(self.ops)

    def number(self) -> int:
        rng = self.rng
        return rng.choice(
            (0, 1, -1, 0x7F, 0x80, -0x80, 0xFF, 0x7FFFFFFF, -(1 << 31), rng.getrandbits(self.bits))
        )

    def small(self) -> int:
        """Return a signed number of 32 bits, chosen from limits of encodings and other small numbers."""
        rng = self.rng
        return rng.choice((0, 1, -1, 5, 127, 128, -128, -129, 255, 65535, (1 << 31) - 1, -(1 << 31), 1000))

    def vreg(self) -> int:
        return self.rng.choice(self.vregs)

    def size(self) -> int:
        return self.rng.choice((1, 2, 4, 8)[: 4 if self.bits == 64 else 3])

    def label(self) -> Label:
        """Return a label for forward jumps, which is placed later."""
        if not self.pending or self.rng.random() < 0.5:
            self.labels += 1
            self.pending.append(Label(self.labels))
        return self.rng.choice(self.pending)

    def place(self) -> None:
        if not self.pending:
            self.labels += 1
            self.pending.append(Label(self.labels))
        label = self.pending.pop(self.rng.randrange(len(self.pending)))
        self.placed.append(label)
        self.ops.append(ir.Place(label))

    def plain(self) -> None:
        rng = self.rng
        dst, src = self.vreg(), self.vreg()
        op = rng.choice(tuple(Arithmetic))
        shifts = op in (Arithmetic.SHL, Arithmetic.SHR, Arithmetic.SAR)
        kind = rng.randrange(5)
        if kind == 0:
            self.ops.append(ir.SetImmediate(dst, self.number()))
        elif kind == 1:
            self.ops.append(ir.Move(dst, src))
        elif kind == 2:
            self.ops.append(ir.GetRegister(dst, rng.choice(self.names)))
        elif kind == 3:
            value = rng.randrange(self.bits) if shifts else self.small()
            self.ops.append(ir.ComputeImmediate(op, dst, value))
        else:
            if shifts:
                self.ops.append(ir.ComputeImmediate(Arithmetic.AND, src, self.bits - 1))
            self.ops.append(ir.Compute(op, dst, src))

    def memory(self) -> None:
        rng = self.rng
        base, other = self.vreg(), self.vreg()
        start = rng.choice((DATA, FAR) if self.bits == 64 else (DATA,))
        offset = rng.choice((0, 0, 8, 0x7F, -0x80, 0x80, 0x400))
        self.ops.append(ir.SetImmediate(base, start + rng.randrange(0x100, 0x800)))
        kind = rng.randrange(4)
        if kind == 0:
            self.ops.append(ir.Load(other, base, offset, self.size(), rng.random() < 0.5))
        elif kind == 1:
            self.ops.append(ir.Store(base, offset, other, self.size()))
        elif kind == 2:
            size = rng.choice((1, 2, 4, 8))
            self.ops.append(ir.StoreImmediate(base, offset, self.number(), size))
        else:
            self.ops.append(ir.GetRegister(base, "sp"))
            self.ops.append(ir.Load(other, base, 8 * rng.randrange(4), self.size()))
            # A program must not read below the stack pointer.
            self.ops.append(ir.SetImmediate(base, self.number()))

    def cell(self) -> None:
        rng = self.rng
        offset = self.cell_at(rng.randrange(0x800))
        number = rng.choice((1, -1, 24, 127, 128, 1000))
        kind = rng.randrange(8)
        if kind > 4 and (self.bits == 64 or len(self.vregs) > 1):
            self.ops.append(self.sum(kind, offset))
        elif kind == 0:
            self.ops.append(ir.LoadPerCpu(self.vreg(), offset, self.size()))
        elif kind == 1:
            self.ops.append(ir.StorePerCpu(offset, self.vreg(), self.size()))
        elif kind == 2:
            self.ops.append(ir.LoadAbsolute(self.vreg(), self.shared(), self.size()))
        elif kind == 3:
            self.ops.append(ir.AddToAbsolute(self.shared(), number))
        else:
            self.ops.append(ir.AddToPerCpu(offset, number, rng.choice((1, 2, 4, 8))))

    def cell_at(self, at: int) -> int:
        """Return the offset of byte `at` of the CPU's area, relative to the base of per-CPU memory."""
        return CPU - self.per_cpu + at

    def shared(self) -> int:
        """Return the address of a random aligned 8-byte cell that all CPUs share."""
        start = self.rng.choice((DATA, FAR) if self.bits == 64 else (DATA,))
        return start + self.rng.randrange(0x100, 0x800, 8)

    def sum(self, kind: int, offset: int) -> ir.Op:
        """Return an op that adds to or combines with a cell in memory.

        The cell is per CPU, at `offset`, if `kind` is 5 or 6. For other kinds, all CPUs share the cell.
        """
        rng = self.rng
        dst, high = rng.sample(self.vregs, 2) if self.bits == 32 else (self.vreg(), None)
        if kind == 5:
            return ir.IncreasePerCpu(offset, dst)
        if kind == 6:
            high = high if rng.random() < 0.7 else None
            bitwise = () if high is not None else (Arithmetic.OR, Arithmetic.XOR)
            return ir.ComputePerCpu(rng.choice((Arithmetic.ADD, Arithmetic.SUB, *bitwise)), dst, offset, high)
        return ir.AddAndFetch(dst, self.shared(), rng.choice((1, 57, 127, 128, 1000)), high)

    def faulting(self) -> None:
        op = ir.Load(self.vreg(), self.vreg(), self.rng.choice((0, 8, 96)), self.size(), False, self.label())
        self.ops.append(op)

    def branch(self) -> None:
        rng = self.rng
        condition, label = rng.choice(tuple(Condition)), self.label()
        kind = rng.randrange(3)
        if kind == 0:
            self.ops.append(ir.Branch(condition, self.vreg(), self.vreg(), label))
        elif kind == 1:
            self.ops.append(ir.BranchImmediate(condition, self.vreg(), self.small(), label))
        else:
            offset = self.cell_at(rng.randrange(0x800))
            self.ops.append(ir.BranchPerCpu(condition, offset, self.size(), self.small(), label))

    def jump(self) -> None:
        self.ops.append(ir.Jump(self.label()))

    def loop(self) -> None:
        """Emit a loop that is repeated at most three times."""
        if not self.placed or self.loops == 16:
            return
        counter = self.cell_at(COUNTERS + 8 * self.loops)
        self.loops += 1
        self.ops.append(ir.AddToPerCpu(counter, 1, 4))
        back = self.rng.choice(self.placed)
        if self.rng.random() < 0.5:
            self.ops.append(ir.BranchPerCpu(Condition.BELOW, counter, 4, 3, back))
            return
        out = self.label()
        self.ops += [ir.BranchPerCpu(Condition.ABOVE_EQ, counter, 4, 3, out), ir.Jump(back)]

    def host(self) -> None:
        self.ops.append(ir.CallHost(self.rng.randrange(100), self.label()))


class LockedMaker(Maker):
    """Maker of programs that access memory mostly by atomic operations.

    If `link` is not empty, this register holds the return address, and each program ends with a write and a
    read of the return address.
    """

    offsets: Sequence[int] = (0, 8, 0x80, -0x80)
    link = ""

    def make(self) -> Program:
        program = super().make()
        if not self.link:
            return program
        return (*program, ir.SetRegister(self.link, self.vreg()), ir.GetRegister(self.vreg(), self.link))

    def memory(self) -> None:
        rng = self.rng
        if len(self.vregs) < 3 or rng.random() < 0.3:
            super().memory()
            return
        base, expected, new = rng.sample(self.vregs, 3)
        if rng.random() < 0.2:
            self.ops.append(ir.Multiply(expected, new))
        offset = rng.choice(self.offsets)
        self.ops.append(ir.SetImmediate(base, DATA + 0x200 + 8 * rng.randrange(16) - offset))
        if rng.random() < 0.4:
            self.ops.append(ir.FetchAdd(base, offset, new))
            return
        if rng.random() < 0.7:
            self.ops.append(ir.Load(expected, base, offset, self.bits // 8))
        self.ops.append(ir.CompareExchange(base, offset, expected, new, self.label()))


def make_case(
    rng: random.Random, bits: int, registers: Sequence[str], others: dict[str, int], per_cpu: int = CPU
) -> Case:
    """Return a case with a random program.

    `registers` get random values, except sp; `others` are further registers that the program may read, with
    their values. `per_cpu`: base address of per-CPU memory.
    """
    names = [name for name in (*registers, *others) if name != "sp"]
    program = Maker(rng, bits, names, per_cpu).make()
    mapped = (DATA, CPU, STACK, FAR) if bits == 64 else (DATA, CPU, STACK)
    areas = {start: rng.randbytes(PAGE) for start in mapped}
    areas[CPU] = areas[CPU][:COUNTERS] + bytes(0x100)
    interesting = (0, 1, DATA + 0x200, DATA + PAGE - 2, DATA + 0x10, (1 << bits) - 1, PROBE)
    values = {name: rng.choice((*interesting, rng.getrandbits(bits))) for name in registers}
    values["sp"] = SP
    return Case(bits, program, values | others, areas, per_cpu)
