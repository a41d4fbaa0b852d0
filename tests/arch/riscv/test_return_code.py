"""RISC-V code of return hooks: atomic changes of words in memory, and trampolines, which continue at the
caller or in Python.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir import Label, Program
from emulated_kernel.arch.riscv.arch import Riscv
from emulated_kernel.arch.riscv.detour import RETURN_ROOM
from tests.arch.placed import going_on
from tests.arch.random_programs import CODE, CPU, PAGE, PROBE, SP, Case, LockedMaker
from tests.arch.riscv.flat import NAMES, Flat
from tests.arch.riscv.test_handler_code import ARCHS, FIXED, check, make

HANDLER = CODE + PAGE
CALLER = CODE + 2 * PAGE
CHOICE = CPU + 0x80
"""Address of the word with the address at which the trampoline's program continues; 0: in Python."""


class RiscvLockedMaker(LockedMaker):
    offsets = (0, 8, 0x80, -0x80, 0x1000, -0x2000)
    link = "ra"


def _case(seed: int) -> tuple[random.Random, Case]:
    rng = random.Random(seed)
    names = [*FIXED, "gp", "ip"]
    return rng, replace(make(seed), program=RiscvLockedMaker(rng, 64, names, CPU).make())


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_locked_words_between_what_is_live(arch: Riscv) -> None:
    for seed in range(150):
        rng, case = _case(seed)
        registers = frozenset(name for name in NAMES if rng.random() < 0.5) | {"sp", "gp", "ra"}
        live = LiveRegisters(registers, flags=False)
        check(case, arch, arch.handler_code(case.program, PROBE, live), live)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_locked_words_in_a_frame(arch: Riscv) -> None:
    for seed in range(150):
        _, case = _case(seed)
        check(case, arch, arch.handler_code(case.program, PROBE), None)


# Trampolines


def _dispatch() -> Program:
    """Return a program that continues at the address in the word at CHOICE, or in Python if the word is 0."""
    python = Label(0)
    return (
        ir.LoadPerCpu(0, CHOICE - CPU, 8),
        ir.BranchImmediate(ir.Condition.EQ, 0, 0, python),
        ir.JumpTo(0),
        ir.Place(python),
    )


def _returns_to(arch: Riscv, address: int) -> Program:
    """Return a program that makes the function return to `address`, and stores the function's result and the
    stack pointer.
    """
    return (
        ir.GetRegister(1, "sp"),
        ir.SetImmediate(2, address),
        ir.Store(1, arch.returned_at, 2, 8),
        ir.GetRegister(3, "a0"),
        ir.StorePerCpu(0, 3, 8),
        ir.StorePerCpu(8, 1, 8),
        *(ir.SetImmediate(vreg, -1) for vreg in range(ir.NR_VREGS)),
    )


def _machine(arch: Riscv, *, saves_all: bool, chosen: bool) -> tuple[Flat, int, int]:
    """Return (machine, address of a trampoline's entry, address of its trap).

    On the machine, a function has just returned to the trampoline. `saves_all`: the trampoline saves all
    registers. `chosen`: the word at CHOICE has the address of a handler; otherwise it is 0.
    """
    assert arch.returns is not None
    made = arch.returns.dispatch(_dispatch(), CODE, saves_all=saves_all)
    handler = arch.returns.handler(_returns_to(arch, CALLER), saves_all=saves_all)
    goes_on = made.finish is not None
    placed = going_on(arch, handler, HANDLER, CODE + made.finish) if goes_on else handler
    rng = random.Random(5)
    registers = {name: rng.getrandbits(64) for name in FIXED}
    registers |= {"sp": SP, "gp": CPU, "ra": CODE + made.entry}
    areas = {CODE: made.code, HANDLER: placed.code, CALLER: arch.breakpoint, CPU: bytes(PAGE)}
    machine = Flat({**areas, SP & -PAGE: bytes(PAGE), (SP & -PAGE) - PAGE: bytes(PAGE)}, registers)
    machine.uc.mem_write(CHOICE, (HANDLER + placed.entry if chosen else 0).to_bytes(8, "little"))
    return machine, CODE + made.entry, CODE + made.trap


@pytest.mark.parametrize("saves_all", [False, True])
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_a_handler_returns_to_the_caller(arch: Riscv, saves_all: bool) -> None:
    machine, entry, _ = _machine(arch, saves_all=saves_all, chosen=True)
    before = machine.registers()
    assert machine.run(entry, 0) == CALLER
    after = machine.registers()
    assert after["ra"] == CALLER
    assert arch.returns is not None
    kept = set(NAMES) - {"ra"} if saves_all else arch.returns.live.registers | {"sp", "gp"}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    result, seen_sp = (int.from_bytes(machine.uc.mem_read(CPU + offset, 8), "little") for offset in (0, 8))
    assert (result, seen_sp) == (before["a0"], SP)


@pytest.mark.parametrize("saves_all", [False, True])
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_without_a_handler_it_asks_python_in_a_frame(arch: Riscv, saves_all: bool) -> None:
    machine, entry, trap = _machine(arch, saves_all=saves_all, chosen=False)
    before = machine.registers()
    assert machine.run(entry, 0) == trap
    at = machine.get("sp")
    assert at == SP - RETURN_ROOM

    def saved(number: int) -> int:
        return int.from_bytes(machine.uc.mem_read(at + 8 * number, 8), "little")

    assert arch.returns is not None
    names = NAMES if saves_all else arch.returns.live.registers | {"sp", "gp", "ra"}
    assert {name: saved(arch.pt_regs.index(name)) for name in names} == {name: before[name] for name in names}
    assert saved(0) == entry
    machine.uc.mem_write(SP + arch.trampoline_slot, CALLER.to_bytes(8, "little"))
    assert machine.run(trap + len(arch.breakpoint), 0) == CALLER
    after = machine.registers()
    assert after == {**after, **{name: before[name] for name in set(names) - {"ra"}}, "ra": CALLER}
