"""Compiled handlers do what their programs say, and leave what is live as it was."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import unicorn
from unicorn import x86_const as const

from emulated_kernel.arch import program as ir
from emulated_kernel.arch.base import Detour, Live
from emulated_kernel.arch.program import Arithmetic, Condition, HandlerCode, Label, Program
from emulated_kernel.arch.x86 import detour as detours
from emulated_kernel.arch.x86 import detour_32 as detours_32
from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.arch.x86.assemble import Encoder
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.frame import Frame
from emulated_kernel.arch.x86.handler_code import save_all, save_live
from tests.arch.program_model import Interpreter, Regions

CODE, DATA, CPU, STACK, END = 0x7700_0000, 0x20_0000, 0x30_0000, 0x6600_0000, 0x5500_0000
"""Of one page each; sums and shifts of random values don't meet code or stack."""
FAR = 0x12_3456_0000
PAGE = 0x1000
SP = STACK + PAGE - 0x100
PROBE = 0x7F_0000
"""Where the probe would be; nothing is mapped there."""
COUNTERS = DATA + 0xF00
"""Cells that end loops, which no other op touches."""
STATUS = 0x8D5
FLAGS = 0x246
PT_REGS = {
    64: detours.PT_REGS,
    32: detours_32.PT_REGS,
}
FIXED = {64: detours.FIXED_REGISTERS, 32: detours_32.FIXED_REGISTERS}
PER_CPU_BASE = {64: CPU, 32: 0}
"""Unicorn has no way to set fs in a flat 32-bit mode."""
NAMES = {64: REGISTER_NAMES, 32: REGISTER_NAMES[:8]}


def register_id(name: str, bits: int) -> int:
    prefix = "" if name[1:].isdigit() else "r" if bits == 64 else "e"
    return int(getattr(const, f"UC_X86_REG_{prefix}{name}".upper()))


@dataclass(frozen=True)
class Case:
    """A program, and the state that it meets."""

    bits: int
    program: Program
    registers: dict[str, int]
    """All of pt_regs that a program can ask for."""
    areas: dict[int, bytes]


@dataclass
class Outcome:
    registers: dict[str, int]
    areas: dict[int, bytes]
    host_calls: list[int]
    faults: int


def host_answer(calls: list[int], number: int, write: object) -> bool:
    """The host as both sides see it: notes the call, and goes on behind every second time."""
    calls.append(number)
    write((DATA + 8 * (number % 16)), len(calls))  # type: ignore[operator]
    return (number + len(calls)) % 2 == 0


def interpret(case: Case) -> Outcome:
    calls: list[int] = []

    def host(number: int, memory: Regions) -> bool:
        return host_answer(calls, number, lambda at, value: memory.write(at, value, 4))

    memory = Regions(case.areas)
    interpreter = Interpreter(case.bits, case.registers, memory, PER_CPU_BASE[case.bits], host)
    interpreter.run(case.program)
    areas = {start: bytes(data) for start, data in memory.areas.items()}
    return Outcome(dict(case.registers), areas, calls, interpreter.faults)


class Processor:
    """Runs a stub on Unicorn as the host of a probe would: host calls and faults go where it says."""

    def __init__(self, case: Case, stub: Detour, frame: Frame | None) -> None:
        self.case = case
        self.frame = frame
        self.stub = stub
        self.calls: list[int] = []
        self.faults = 0
        mode = unicorn.UC_MODE_64 if case.bits == 64 else unicorn.UC_MODE_32
        self.uc = uc = unicorn.Uc(unicorn.UC_ARCH_X86, mode)
        self.ip = register_id("ip", case.bits)
        for start in (CODE, END):
            uc.mem_map(start, PAGE)
        for start, data in case.areas.items():
            uc.mem_map(start, PAGE)
            uc.mem_write(start, data)
        uc.mem_write(CODE, stub.code)
        if case.bits == 64:
            uc.reg_write(const.UC_X86_REG_GS_BASE, CPU)
        for name in NAMES[case.bits]:
            uc.reg_write(register_id(name, case.bits), case.registers[name])
        uc.reg_write(const.UC_X86_REG_EFLAGS, case.registers["flags"])
        uc.hook_add(unicorn.UC_HOOK_INTR, self._trap)
        # Unicorn: without page tables 2.1.3 doesn't say which instruction it was that found no memory.
        self.at = 0
        uc.hook_add(unicorn.UC_HOOK_CODE, self._note)

    def _note(self, _uc: unicorn.Uc, address: int, _size: int, _data: object) -> None:
        self.at = address

    def _trap(self, uc: unicorn.Uc, vector: int, _data: object) -> None:
        assert vector == 3
        if self.frame is not None:
            self._check_frame(self.frame)
        at = uc.reg_read(self.ip) - 1 - CODE
        call = next(call for call in self.stub.host_calls if call.trap == at)
        behind = host_answer(
            self.calls, call.number, lambda at, value: uc.mem_write(at, value.to_bytes(4, "little"))
        )
        uc.reg_write(self.ip, CODE + (call.behind if behind else call.label))

    def _check_frame(self, frame: Frame) -> None:
        """What the host finds in a struct pt_regs at the stack pointer."""
        word = self.case.bits // 8
        at = self.uc.reg_read(register_id("sp", self.case.bits))
        values = {**self.case.registers, **FIXED[self.case.bits]}
        for name, offset in frame.offsets.items():
            found = int.from_bytes(self.uc.mem_read(at + offset, word), "little")
            assert found == values[name] & (1 << 8 * word) - 1, name

    def run(self) -> Outcome:
        uc, bits = self.uc, self.case.bits
        targets = {CODE + fixup.access: CODE + fixup.target for fixup in self.stub.fixups}
        ip = CODE + self.stub.entry
        while True:
            try:
                uc.emu_start(ip, END)
                break
            except unicorn.UcError:
                self.faults += 1
                ip = targets[self.at]
        registers = {name: uc.reg_read(register_id(name, bits)) for name in NAMES[bits]}
        registers["flags"] = uc.reg_read(const.UC_X86_REG_EFLAGS)
        areas = {start: bytes(uc.mem_read(start, PAGE)) for start in self.case.areas}
        return Outcome(registers, areas, self.calls, self.faults)


class Maker:
    """Makes random programs that end: backward jumps count their rounds."""

    def __init__(self, rng: random.Random, bits: int) -> None:
        self.rng = rng
        self.bits = bits
        self.vregs = rng.sample(range(ir.NR_VREGS), rng.randint(1, ir.NR_VREGS))
        self.ops: list[ir.Op] = []
        self.placed: list[Label] = []
        self.pending: list[Label] = []
        self.labels = 0
        self.loops = 0
        self.names = [name for name in (*NAMES[bits], "flags", "ip") if name != "sp"]

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
        """What 32 bits hold signed."""
        rng = self.rng
        return rng.choice((0, 1, -1, 5, 127, 128, -128, -129, 255, 65535, (1 << 31) - 1, -(1 << 31), 1000))

    def vreg(self) -> int:
        return self.rng.choice(self.vregs)

    def size(self) -> int:
        return self.rng.choice((1, 2, 4, 8)[: 4 if self.bits == 64 else 3])

    def label(self) -> Label:
        """One to go to forwards, placed later."""
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
            # Nothing below the stack pointer is to be looked at.
            self.ops.append(ir.SetImmediate(base, self.number()))

    def cell(self) -> None:
        rng = self.rng
        start = rng.choice((DATA, FAR) if self.bits == 64 else (DATA,))
        address = start + rng.randrange(0x100, 0x800)
        kind = rng.randrange(4)
        if kind == 0:
            self.ops.append(ir.LoadCell(self.vreg(), address, self.size()))
        elif kind == 1:
            self.ops.append(ir.StoreCell(address, self.vreg(), self.size()))
        elif kind == 2:
            size = rng.choice((1, 2, 4, 8))
            self.ops.append(ir.AddToCell(address, rng.choice((1, -1, 24, 127, 128, 1000)), size))
        else:
            offset = CPU - PER_CPU_BASE[self.bits] + rng.randrange(0x800)
            self.ops.append(ir.LoadPerCpu(self.vreg(), offset, self.size()))

    def faulting(self) -> None:
        op = ir.Load(self.vreg(), self.vreg(), self.rng.choice((0, 8, 96)), self.size(), False, self.label())
        self.ops.append(op)

    def branch(self) -> None:
        rng = self.rng
        condition, label, unlikely = rng.choice(tuple(Condition)), self.label(), rng.random() < 0.5
        kind = rng.randrange(3)
        if kind == 0:
            self.ops.append(ir.Branch(condition, self.vreg(), self.vreg(), label, unlikely))
        elif kind == 1:
            self.ops.append(ir.BranchImmediate(condition, self.vreg(), self.small(), label, unlikely))
        else:
            start = rng.choice((DATA, FAR) if self.bits == 64 else (DATA,))
            address = start + rng.randrange(0x100, 0x800)
            self.ops.append(ir.BranchCell(condition, address, self.size(), self.small(), label, unlikely))

    def jump(self) -> None:
        self.ops.append(ir.Jump(self.label()))

    def loop(self) -> None:
        """Back to a label, three times at most."""
        if not self.placed or self.loops == 16:
            return
        counter = COUNTERS + 8 * self.loops
        self.loops += 1
        self.ops.append(ir.AddToCell(counter, 1, 4))
        back = self.rng.choice(self.placed)
        if self.rng.random() < 0.5:
            self.ops.append(ir.BranchCell(Condition.BELOW, counter, 4, 3, back))
            return
        out = self.label()
        self.ops += [ir.BranchCell(Condition.ABOVE_EQ, counter, 4, 3, out), ir.Jump(back)]

    def host(self) -> None:
        self.ops.append(ir.CallHost(self.rng.randrange(100), self.label()))


def make_case(rng: random.Random, bits: int) -> Case:
    program = Maker(rng, bits).make()
    mapped = (DATA, CPU, STACK, FAR) if bits == 64 else (DATA, CPU, STACK)
    areas = {start: rng.randbytes(PAGE) for start in mapped}
    areas[DATA] = areas[DATA][:0xF00] + bytes(0x100)
    interesting = (0, 1, DATA + 0x200, DATA + PAGE - 2, DATA + 0x10, (1 << bits) - 1, PROBE)
    registers = {name: rng.choice((*interesting, rng.getrandbits(bits))) for name in NAMES[bits]}
    registers["sp"] = SP
    registers["flags"] = FLAGS & ~STATUS | rng.getrandbits(12) & STATUS
    registers["ip"] = PROBE + 1
    return Case(bits, program, registers, areas)


def check(case: Case, handler: HandlerCode, live: Live, frame: Frame | None = None) -> None:
    expected = interpret(case)
    found = Processor(case, detours.handler_stub(handler, CODE, END), frame).run()
    assert found.host_calls == expected.host_calls
    assert found.faults == expected.faults
    for start, data in expected.areas.items():
        # Below the stack pointer is nobody's.
        first = SP - STACK if start == STACK else 0
        assert found.areas[start][first:] == data[first:], hex(start)
    kept = live.registers & set(NAMES[case.bits])
    wrong = {name for name in kept if found.registers[name] != case.registers[name]}
    assert not wrong
    if live.flags:
        assert found.registers["flags"] == case.registers["flags"]


SEEDS = range(0, 800, 100)


@pytest.mark.parametrize("first", SEEDS)
@pytest.mark.parametrize("bits", [64, 32])
def test_programs_between_what_is_live(bits: int, first: int) -> None:
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        case = make_case(rng, bits)
        share = rng.choice((0, 0.3, 0.7, 1))
        registers = frozenset(name for name in NAMES[bits] if rng.random() < share) | {"sp"}
        live = Live(registers, rng.random() < 0.5)
        handler = save_live(case.program, Encoder(bits), live, {"ip": PROBE + 1})
        check(case, handler, live)


@pytest.mark.parametrize("first", SEEDS)
@pytest.mark.parametrize("bits", [64, 32])
def test_programs_in_a_frame(bits: int, first: int) -> None:
    frame = Frame(Encoder(bits), PT_REGS[bits])
    for seed in range(first, first + 100):
        case = make_case(random.Random(seed), bits)
        handler = save_all(case.program, Encoder(bits), frame, {"ip": PROBE + 1, **FIXED[bits]})
        check(case, handler, Live(frozenset(NAMES[bits]), True), frame)


CELL = -0x1000_0000
"""In reach of 32 bits, at the top of the address space."""
COUNT = (ir.AddToCell(CELL, 1),)
ALL_REGISTERS = frozenset(REGISTER_NAMES)


def listing(program: Program, live: Live | None, start: int | None = None) -> list[str]:
    """The mnemonics of the code, by default from its entry on."""
    arch = X86_64()
    handler = arch.handler_code(program, PROBE, live)
    code = handler.code[handler.entry if start is None else start :]
    return [line.split(":")[1][31:].split()[0] for line in arch.disassemble(code, 0)]


def test_nothing_to_do_is_no_code() -> None:
    assert listing((), Live(ALL_REGISTERS, True)) == []


def test_counting_takes_one_instruction_where_flags_are_dead() -> None:
    assert listing(COUNT, Live(ALL_REGISTERS, False)) == ["addq"]


def test_counting_leaves_live_flags_alone() -> None:
    """A load, a sum and a store, in a register that is pushed unless one is dead."""
    assert listing(COUNT, Live(ALL_REGISTERS, True)) == ["pushq", "movq", "leaq", "movq", "popq"]
    assert listing(COUNT, Live(ALL_REGISTERS - {"r8"}, True)) == ["movq", "leaq", "movq"]


def test_flags_that_are_overwritten_stay_in_a_dead_ax() -> None:
    program = (ir.BranchCell(Condition.NE, CELL, 4, 0, Label(0), True), *COUNT, ir.Place(Label(0)))
    saved = ["lahf", "seto", "cmpl", "jne", "addq", "addb", "sahf"]
    assert listing(program, Live(ALL_REGISTERS - {"ax"}, True)) == saved
    assert listing(program, Live(ALL_REGISTERS, False)) == ["cmpl", "jne", "addq"]


def test_unlikely_parts_stand_before_the_entry() -> None:
    unlikely, end = Label(0), Label(1)
    program = (
        ir.BranchCell(Condition.NE, CELL, 4, 0, unlikely, True),
        *COUNT,
        ir.Jump(end),
        ir.Place(unlikely),
        ir.CallHost(7, end),
        ir.Place(end),
    )
    live = Live(ALL_REGISTERS, False)
    assert listing(program, live) == ["cmpl", "jne", "addq"]
    assert listing(program, live, 0)[:2] == ["int3", "jmp"]
    handler = X86_64().handler_code(program, PROBE, live)
    assert [(call.number, call.trap, call.behind) for call in handler.host_calls] == [(7, 0, 1)]
    assert handler.host_calls[0].label == len(handler.code)


def test_registers_that_are_asked_for_are_used_last() -> None:
    program = (ir.GetRegister(0, "di"), ir.StoreCell(CELL, 0, 8))
    handler = X86_64().handler_code(program, PROBE, Live(ALL_REGISTERS - {"di", "r9"}, False))
    assert handler.code.hex() == "4989f9" + "4c890c25000000f0"  # mov %rdi, %r9; mov %r9, cell


def test_code_can_stand_anywhere() -> None:
    program = make_case(random.Random(1), 64).program
    assert X86_64().handler_code(program, PROBE) == X86_64().handler_code(program, PROBE)
    handler = X86_64().handler_code(program, PROBE)
    for buffer in (CODE, CODE + 0x123):
        stub = X86_64().handler_stub(handler, buffer, END)
        assert stub.code[: len(handler.code)] == handler.code
        assert stub.trap is None
        assert stub.copied == len(handler.code)
