"""Compiled handlers have the effects of their programs, and preserve all live registers."""

from __future__ import annotations

import random

import pytest
import unicorn
from unicorn import x86_const as const

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir import Condition, HandlerCode, Label, Program
from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.encoder import Encoder
from emulated_kernel.arch.x86.handler_code import save_all, save_live
from emulated_kernel.arch.x86.pt_regs import FRAME_32, FRAME_64, RegsFrame
from tests.arch import engines
from tests.arch.placed import going_on
from tests.arch.random_programs import (
    CODE,
    CPU,
    END,
    PAGE,
    PROBE,
    SP,
    STACK,
    Case,
    Outcome,
    host_answer,
    interpret,
    make_case,
)
from tests.sample import fewer

STATUS = 0x8D5
FLAGS = 0x246
FRAMES = {64: FRAME_64, 32: FRAME_32}
PER_CPU_BASE = {64: CPU, 32: 0}
"""Word size -> base of per-CPU addresses. In 32 bits it is 0, because Unicorn cannot set the base of fs."""
NAMES = {64: REGISTER_NAMES, 32: REGISTER_NAMES[:8]}


def register_id(name: str, bits: int) -> int:
    prefix = "" if name[1:].isdigit() else "r" if bits == 64 else "e"
    return int(getattr(const, f"UC_X86_REG_{prefix}{name}".upper()))


class Processor:
    """A CPU emulated by Unicorn that runs a stub.

    The class takes the part of the host: after a host call or a fault, the CPU continues where the stub says.
    """

    def __init__(self, uc: unicorn.Uc, case: Case, stub: HandlerCode, frame: RegsFrame | None) -> None:
        self.uc = uc
        self.case = case
        self.frame = frame
        self.stub = stub
        self.calls: list[int] = []
        self.faults = 0
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
        # Unicorn 2.1.3: without page tables, the program counter is not that of the faulting instruction.
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
        uc.reg_write(self.ip, CODE + (call.trap + 1 if behind else call.label))

    def _check_frame(self, frame: RegsFrame) -> None:
        """Check the struct pt_regs at the stack pointer, in which the host finds the registers."""
        word = self.case.bits // 8
        at = self.uc.reg_read(register_id("sp", self.case.bits))
        values = {**self.case.registers, **frame.fixed}
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


def make(rng: random.Random, bits: int) -> Case:
    others = {"flags": FLAGS & ~STATUS | rng.getrandbits(12) & STATUS, "ip": PROBE + 1}
    return make_case(rng, bits, NAMES[bits], others, PER_CPU_BASE[bits])


def check(case: Case, handler: HandlerCode, live: LiveRegisters, frame: RegsFrame | None = None) -> None:
    expected = interpret(case)
    mode = unicorn.UC_MODE_64 if case.bits == 64 else unicorn.UC_MODE_32
    with engines.lent(unicorn.UC_ARCH_X86, mode) as uc:
        found = Processor(uc, case, going_on(X86_64(), handler, CODE, END), frame).run()
    assert found.host_calls == expected.host_calls
    assert found.faults == expected.faults
    for start, data in expected.areas.items():
        # The stack below the stack pointer is free and may differ.
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
    for seed in range(first, first + fewer(100, 2)):
        rng = random.Random(seed)
        case = make(rng, bits)
        share = rng.choice((0, 0.3, 0.7, 1))
        registers = frozenset(name for name in NAMES[bits] if rng.random() < share) | {"sp"}
        live = LiveRegisters(registers, rng.random() < 0.5)
        handler = save_live(case.program, Encoder(bits), live, {"ip": PROBE + 1})
        check(case, handler, live)


@pytest.mark.parametrize("first", SEEDS)
@pytest.mark.parametrize("bits", [64, 32])
def test_programs_in_a_frame(bits: int, first: int) -> None:
    frame = FRAMES[bits]
    for seed in range(first, first + fewer(100, 2)):
        case = make(random.Random(seed), bits)
        handler = save_all(case.program, frame, {"ip": PROBE + 1, **frame.fixed})
        check(case, handler, LiveRegisters(frozenset(NAMES[bits]), True), frame)


CELL = 0x1000
"""Offset of a cell of the programs from the base of per-CPU addresses."""
COUNT = (ir.AddToPerCpu(CELL, 1),)
ALL_REGISTERS = frozenset(REGISTER_NAMES)


def listing(program: Program, live: LiveRegisters | None, start: int | None = None) -> list[str]:
    """Return the mnemonics of a program's code from the offset `start` on, by default from its entry.

    `live`: registers that the code must preserve, as for handler_code().
    """
    arch = X86_64()
    handler = arch.handler_code(program, PROBE, live)
    code = handler.code[handler.entry if start is None else start :]
    return [line.split(":")[1][31:].split()[0] for line in arch.disassemble(code, 0)]


def test_nothing_to_do_is_no_code() -> None:
    assert listing((), LiveRegisters(ALL_REGISTERS, True)) == []


def test_counting_takes_one_instruction_where_flags_are_dead() -> None:
    assert listing(COUNT, LiveRegisters(ALL_REGISTERS, False)) == ["addq"]


def test_counting_leaves_live_flags_alone() -> None:
    """If the flags are live, a counter is incremented by instructions that leave flags unchanged: a load, a
    lea and a store.

    If no register is dead, the register for the sum is pushed and popped.
    """
    assert listing(COUNT, LiveRegisters(ALL_REGISTERS, True)) == ["pushq", "movq", "leaq", "movq", "popq"]
    assert listing(COUNT, LiveRegisters(ALL_REGISTERS - {"r8"}, True)) == ["movq", "leaq", "movq"]


def test_flags_that_are_overwritten_stay_in_a_dead_ax() -> None:
    program = (ir.BranchPerCpu(Condition.NE, CELL, 4, 0, Label(0)), *COUNT, ir.Place(Label(0)))
    saved = ["lahf", "seto", "cmpl", "jne", "addq", "addb", "sahf"]
    assert listing(program, LiveRegisters(ALL_REGISTERS - {"ax"}, True)) == saved
    assert listing(program, LiveRegisters(ALL_REGISTERS, False)) == ["cmpl", "jne", "addq"]


def test_unlikely_parts_stand_before_the_entry() -> None:
    unlikely, end = Label(0), Label(1)
    program = (
        ir.BranchPerCpu(Condition.NE, CELL, 4, 0, unlikely),
        *COUNT,
        ir.Jump(end),
        ir.Place(unlikely),
        ir.CallHost(7, end),
        ir.Place(end),
    )
    live = LiveRegisters(ALL_REGISTERS, False)
    assert listing(program, live) == ["cmpl", "jne", "addq"]
    assert listing(program, live, 0)[:2] == ["int3", "jmp"]
    handler = X86_64().handler_code(program, PROBE, live)
    assert [(call.number, call.trap) for call in handler.host_calls] == [(7, 0)]
    assert handler.host_calls[0].label == len(handler.code)


def test_registers_that_are_asked_for_are_used_last() -> None:
    program = (ir.GetRegister(0, "di"), ir.StorePerCpu(CELL, 0, 8))
    handler = X86_64().handler_code(program, PROBE, LiveRegisters(ALL_REGISTERS - {"di", "r9"}, False))
    assert handler.code.hex() == "4989f9" + "654c890c2500100000"  # mov %rdi, %r9; mov %r9, cell


def test_code_can_stand_anywhere() -> None:
    program = make(random.Random(1), 64).program
    assert X86_64().handler_code(program, PROBE) == X86_64().handler_code(program, PROBE)
