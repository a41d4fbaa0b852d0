"""Compiled handlers have the effects of their programs, and preserve all live registers."""

from __future__ import annotations

import random

import pytest

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.program.ir import HandlerCode
from emulated_kernel.arch.riscv import pt_regs
from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I, Riscv
from tests.arch.placed import going_on
from tests.arch.random_programs import (
    CODE,
    CPU,
    PAGE,
    PROBE,
    SP,
    STACK,
    Case,
    host_answer,
    interpret,
    make_case,
)
from tests.arch.riscv.flat import NAMES, Flat
from tests.sample import fewer

ARCHS = [RISCV64(), RISCV64I()]
FIXED = [name for name in NAMES if name not in ("gp", "sp")]
"""Registers that get random values: all except gp, the base of per-CPU memory, and the stack pointer."""


def make(seed: int) -> Case:
    return make_case(random.Random(seed), 64, FIXED, {"sp": SP, "gp": CPU, "ip": PROBE})


def check_frame(machine: Flat, case: Case) -> None:
    """Check the struct pt_regs at the stack pointer, in which the host finds the registers."""
    values = {**case.registers, **pt_regs.FIXED_REGISTERS}
    at = machine.get("sp")
    for name, offset in pt_regs.OFFSETS.items():
        found = int.from_bytes(machine.uc.mem_read(at + offset, 8), "little")
        assert name == "status" or found == values[name] & (1 << 64) - 1, name


def check(case: Case, arch: Riscv, handler: HandlerCode, live: LiveRegisters | None) -> None:
    expected = interpret(case)
    # The end is too far for a jump.
    stub = going_on(arch, handler, CODE, CODE + len(handler.code) + arch.jump_size)
    machine = Flat({**case.areas, CODE: stub.code + arch.breakpoint}, case.registers)
    machine.faults = {CODE + fixup.access: CODE + fixup.target for fixup in stub.fixups}
    calls: list[int] = []

    def on_break(machine: Flat, at: int) -> int:
        if live is None:
            check_frame(machine, case)
        call = next(call for call in stub.host_calls if CODE + call.trap == at)
        behind = host_answer(
            calls, call.number, lambda at, value: machine.uc.mem_write(at, value.to_bytes(4, "little"))
        )
        return CODE + (call.trap + len(arch.breakpoint) if behind else call.label)

    machine.run(CODE + stub.entry, CODE + len(stub.code), on_break)
    assert calls == expected.host_calls
    assert machine.nr_faults == expected.faults
    for start, data in expected.areas.items():
        # The stack below the stack pointer is free and may differ.
        first = SP - STACK if start == STACK else 0
        assert bytes(machine.uc.mem_read(start, PAGE))[first:] == data[first:], hex(start)
    kept = NAMES if live is None else live.registers
    assert not {name for name in kept if machine.get(name) != expected.registers[name]}


SEEDS = range(0, 800, 100)


@pytest.mark.parametrize("first", SEEDS)
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_programs_between_what_is_live(arch: Riscv, first: int) -> None:
    for seed in range(first, first + fewer(100, 2)):
        case = make(seed)
        rng = random.Random(seed)
        share = rng.choice((0, 0.3, 0.7, 1))
        live = LiveRegisters(
            frozenset(name for name in NAMES if rng.random() < share) | {"sp", "gp", "tp", "t0"}, False
        )
        check(case, arch, arch.handler_code(case.program, PROBE, live), live)


@pytest.mark.parametrize("first", SEEDS)
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_programs_in_a_frame(arch: Riscv, first: int) -> None:
    for seed in range(first, first + fewer(100, 2)):
        case = make(seed)
        check(case, arch, arch.handler_code(case.program, PROBE), None)
