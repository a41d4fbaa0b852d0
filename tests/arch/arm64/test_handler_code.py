"""Compiled handlers have the effects of their programs, and preserve all live registers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.arm64.arch import Arm64
from emulated_kernel.arch.arm64.handler_code import RETURN_ROOM
from emulated_kernel.arch.arm64.pt_regs import OFFSETS
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir import HandlerCode, Label, Program
from tests.arch.arm64.flat import FLAGS, NAMES, Flat
from tests.arch.placed import going_on
from tests.arch.random_programs import (
    CODE,
    CPU,
    PAGE,
    PROBE,
    SP,
    STACK,
    Case,
    LockedMaker,
    Maker,
    host_answer,
    interpret,
    make_case,
)

ARCH = Arm64()
GENERAL = [name for name in NAMES if name != "sp"]
STATE = 0x3C5
"""The processor state without flags: Unicorn starts at EL1h, with all exceptions masked."""
HANDLER = CODE + PAGE
CALLER = CODE + 2 * PAGE
CHOICE = CPU + 0x80
"""Address of the word with the address at which the trampoline's program continues; 0: in Python."""


class Arm64LockedMaker(LockedMaker):
    offsets = (0, 8, 0x80, -0x80, 0x1000, -0x2000)
    link = "x30"


def make(seed: int) -> Case:
    """Return a case with a random program.

    Programs with odd seeds access memory mostly by atomic operations.
    """
    rng = random.Random(seed)
    flags = rng.getrandbits(4) << 28 | STATE
    fixed = {"sp": SP, "ip": PROBE, "flags": flags}
    case = make_case(rng, 64, GENERAL, fixed)
    case = replace(case, per_cpu=0)
    maker = Arm64LockedMaker if seed % 2 else Maker
    return replace(case, program=maker(rng, 64, [*GENERAL, *fixed], 0).make())


def check_frame(machine: Flat, case: Case) -> None:
    """Check the struct user_pt_regs at the stack pointer, in which the host finds the registers."""
    at = machine.get("sp")
    for name, offset in OFFSETS.items():
        found = int.from_bytes(machine.uc.mem_read(at + offset, 8), "little")
        assert found == case.registers[name] or name == "x30", name


def check(case: Case, handler: HandlerCode, live: LiveRegisters | None) -> None:
    expected = interpret(case)
    end = CODE + len(handler.code) + 8
    stub = going_on(ARCH, handler, CODE, end)
    machine = Flat({**case.areas, CODE: stub.code}, case.registers)
    machine.faults = {CODE + fixup.access: CODE + fixup.target for fixup in stub.fixups}
    calls: list[int] = []

    def on_break(machine: Flat, at: int) -> int:
        if live is None:
            check_frame(machine, case)
        call = next(call for call in stub.host_calls if CODE + call.trap == at)
        behind = host_answer(
            calls, call.number, lambda at, value: machine.uc.mem_write(at, value.to_bytes(4, "little"))
        )
        return CODE + (call.trap + len(ARCH.breakpoint) if behind else call.label)

    machine.run(CODE + stub.entry, end, on_break)
    assert calls == expected.host_calls
    assert machine.nr_faults == expected.faults
    for start, data in expected.areas.items():
        # The stack below the stack pointer is free and may differ.
        first = SP - STACK if start == STACK else 0
        assert bytes(machine.uc.mem_read(start, PAGE))[first:] == data[first:], hex(start)
    kept = {*NAMES} if live is None else {*live.registers, "sp"}
    assert not {name for name in kept if machine.get(name) != expected.registers[name]}
    if live is None or live.flags:
        assert machine.get("flags") == expected.registers["flags"]


SEEDS = range(0, 200, 100)


@pytest.mark.parametrize("first", SEEDS)
def test_programs_between_what_is_live(first: int) -> None:
    for seed in range(first, first + 100):
        case = make(seed)
        rng = random.Random(seed)
        share = rng.choice((0, 0.3, 0.7, 1))
        registers = frozenset(name for name in GENERAL if rng.random() < share) | {"sp", "x30"}
        live = LiveRegisters(registers, rng.random() < 0.7)
        check(case, ARCH.handler_code(case.program, PROBE, live), live)


@pytest.mark.parametrize("first", SEEDS)
def test_programs_in_a_frame(first: int) -> None:
    for seed in range(first, first + 100):
        case = make(seed)
        check(case, ARCH.handler_code(case.program, PROBE), None)


# Calls and returns


@pytest.mark.parametrize("live", [None, LiveRegisters(frozenset(GENERAL), flags=True)])
def test_a_called_handler_sees_the_traced_functions_return_address(live: LiveRegisters | None) -> None:
    program = (
        ir.GetRegister(0, "x30"),
        ir.StorePerCpu(CPU, 0, 8),
        ir.GetRegister(0, "x9"),
        ir.StorePerCpu(CPU + 8, 0, 8),
        ir.SetImmediate(0, CALLER),
        ir.SetRegister("x30", 0),
    )
    handler = ARCH.called_code(program, PROBE, live)
    end = CODE + len(handler.code)
    registers = {name: 3 * number for number, name in enumerate(GENERAL)} | {"x9": 1, "x30": 2, "sp": SP}
    machine = Flat({CODE: handler.code, CPU: bytes(PAGE), SP & -PAGE: bytes(PAGE)}, registers)
    machine.run(CODE + handler.entry, end)
    seen = [int.from_bytes(machine.uc.mem_read(CPU + at, 8), "little") for at in (0, 8)]
    assert seen == [1, 2]
    assert machine.registers() == {**registers, "x16": machine.get("x16"), "x9": 2, "x30": CALLER, "flags": 0}


def _dispatch() -> Program:
    """Return a program that continues at the address in the word at CHOICE, or in Python if the word is 0."""
    python = Label(0)
    return (
        ir.LoadPerCpu(0, CHOICE, 8),
        ir.BranchImmediate(ir.Condition.EQ, 0, 0, python),
        ir.BranchImmediate(ir.Condition.BELOW, 0, 5, python),
        ir.JumpTo(0),
        ir.Place(python),
    )


def _returns_to(address: int) -> Program:
    """Return a program that makes the function return to `address`, and stores the function's result and the
    stack pointer.
    """
    return (
        ir.GetRegister(1, "sp"),
        ir.SetImmediate(2, address),
        ir.Store(1, ARCH.returned_at, 2, 8),
        ir.GetRegister(3, "x0"),
        ir.StorePerCpu(CPU, 3, 8),
        ir.StorePerCpu(CPU + 8, 1, 8),
        *(ir.SetImmediate(vreg, -1) for vreg in range(ir.NR_VREGS)),
    )


def _machine(*, saves_all: bool, chosen: bool) -> tuple[Flat, int, int]:
    """Return (machine, address of a trampoline's entry, address of its trap).

    On the machine, a function has just returned to the trampoline. `saves_all`: the trampoline saves all
    registers. `chosen`: the word at CHOICE has the address of a handler; otherwise it is 0.
    """
    made = ARCH.returns.dispatch(_dispatch(), CODE, saves_all=saves_all)
    handler = ARCH.returns.handler(_returns_to(CALLER), saves_all=saves_all)
    finish = made.finish
    placed = handler if finish is None else going_on(ARCH, handler, HANDLER, CODE + finish)
    rng = random.Random(5)
    registers = {name: rng.getrandbits(64) for name in GENERAL}
    registers |= {"sp": SP, "x30": CODE + made.entry, "flags": 0xA << 28}
    areas = {CODE: made.code, HANDLER: placed.code, CALLER: ARCH.breakpoint, CPU: bytes(PAGE)}
    machine = Flat({**areas, SP & -PAGE: bytes(PAGE), (SP & -PAGE) - PAGE: bytes(PAGE)}, registers)
    machine.uc.mem_write(CHOICE, (HANDLER + placed.entry if chosen else 0).to_bytes(8, "little"))
    return machine, CODE + made.entry, CODE + made.trap


@pytest.mark.parametrize("saves_all", [False, True])
def test_a_handler_returns_to_the_caller(saves_all: bool) -> None:
    machine, entry, _ = _machine(saves_all=saves_all, chosen=True)
    before = machine.registers()
    assert machine.run(entry, 0) == CALLER
    after = machine.registers()
    assert after == {**before, "x30": CALLER}
    result, seen_sp = (int.from_bytes(machine.uc.mem_read(CPU + offset, 8), "little") for offset in (0, 8))
    assert (result, seen_sp) == (before["x0"], SP)


@pytest.mark.parametrize("saves_all", [False, True])
def test_without_a_handler_it_asks_python_in_a_frame(saves_all: bool) -> None:
    machine, entry, trap = _machine(saves_all=saves_all, chosen=False)
    before = machine.registers()
    assert machine.run(entry, 0) == trap
    at = machine.get("sp")
    assert at == SP - RETURN_ROOM
    saved = {name: int.from_bytes(machine.uc.mem_read(at + to, 8), "little") for name, to in OFFSETS.items()}
    assert saved == {**before, "ip": entry, "flags": before["flags"] & FLAGS | STATE}
    machine.uc.mem_write(SP + ARCH.trampoline_slot, CALLER.to_bytes(8, "little"))
    assert machine.run(trap + len(ARCH.breakpoint), 0) == CALLER
    assert machine.registers() == {**before, "x30": CALLER}


@pytest.mark.parametrize("changes_ip", [False, True])
def test_the_trampoline_of_fentry_sites(changes_ip: bool) -> None:
    """A called trampoline saves the registers of the traced function, and continues at the saved ip."""
    stub = ARCH.ftrace_trampoline()
    registers = {name: 3 * number for number, name in enumerate(GENERAL)}
    registers |= {"x9": CALLER, "x30": PROBE, "sp": SP, "flags": 5 << 28}
    machine = Flat({CODE: stub.code, PROBE: ARCH.breakpoint * 2, SP & -PAGE: bytes(PAGE)}, registers)
    assert machine.run(CODE, 0) == CODE + stub.trap
    at = machine.get("sp")
    saved = {name: int.from_bytes(machine.uc.mem_read(at + to, 8), "little") for name, to in OFFSETS.items()}
    link = {"ip": PROBE, "x30": CALLER, "x9": PROBE, "flags": 5 << 28 | STATE, "x16": PROBE}
    assert saved == {**registers, **link}
    target = PROBE + (4 if changes_ip else 0)
    machine.uc.mem_write(at + OFFSETS["ip"], target.to_bytes(8, "little"))
    assert machine.run(CODE + stub.trap + 4, 0) == target
    assert machine.registers() == {**registers, "x30": CALLER, "x9": target, "x16": SP}
