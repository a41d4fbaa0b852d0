"""A handler program can call other code, and keeps its own values and those of the probed code."""

from __future__ import annotations

import random

import pytest
import unicorn
from unicorn import x86_const as const

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.arm64.arch import Arm64
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir import Program
from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I
from emulated_kernel.arch.x86.arch import I386, X86_64
from tests.arch import engines
from tests.arch.arm64 import flat as arm64_flat
from tests.arch.placed import going_on
from tests.arch.random_programs import CODE, CPU, DATA, PAGE, PROBE, SP, STACK
from tests.arch.riscv import flat as riscv_flat
from tests.arch.test_x86_handler_code import NAMES, register_id

ARCHS = [X86_64(), I386(), RISCV64(), RISCV64I(), Arm64()]
ROUTINE, END = CODE + PAGE, CODE + 2 * PAGE
CELL, COUNTER = 0x100, 0x200
"""Offsets in the CPU's area of the routine's address, and of a word that the routine increments."""
ALWAYS_LIVE = {"sp", "gp", "tp", "t0"}
VALUES = [0xDEAD0000 + number for number in range(ir.NR_VREGS)]


def program(base: int, turns: int) -> Program:
    """Return a program that calls the routine `turns` times, and then stores the virtual registers.

    The first virtual register is not stored. `base`: offset of the CPU's area from the base of per-CPU
    addresses.
    """
    ops: list[ir.Op] = [ir.SetImmediate(number, value) for number, value in enumerate(VALUES)]
    ops += [ir.CallPerCpu(base + CELL)] * turns
    for number in range(1, ir.NR_VREGS):
        ops += [ir.SetImmediate(0, DATA + 8 * number), ir.Store(0, 0, number, 4)]
    return tuple(ops)


def routine(base: int) -> Program:
    """Return a program that overwrites all virtual registers."""
    return (
        *(ir.SetImmediate(number, 7) for number in range(ir.NR_VREGS)),
        ir.IncreasePerCpu(base + COUNTER, 3),
    )


def run(
    arch: Arch, areas: dict[int, bytes], registers: dict[str, int], start: int
) -> tuple[dict[str, int], bytes, bytes]:
    """Run from `start` to END; return the registers, the data, and the CPU's area."""
    if not arch.name.startswith(("x86", "i386")):
        flat = arm64_flat if arch.name == "arm64" else riscv_flat
        machine = flat.Flat(areas, registers)
        assert machine.run(start, END) == END
        uc = machine.uc
        return machine.registers(), bytes(uc.mem_read(DATA, PAGE)), bytes(uc.mem_read(CPU, PAGE))
    mode = unicorn.UC_MODE_64 if arch.bits == 64 else unicorn.UC_MODE_32
    with engines.lent(unicorn.UC_ARCH_X86, mode) as uc:
        for at, data in areas.items():
            uc.mem_map(at, PAGE)
            uc.mem_write(at, data)
        if arch.bits == 64:
            uc.reg_write(const.UC_X86_REG_GS_BASE, CPU)
        for name, value in registers.items():
            uc.reg_write(register_id(name, arch.bits), value)
        uc.emu_start(start, END)
        found = {name: uc.reg_read(register_id(name, arch.bits)) for name in registers}
        return found, bytes(uc.mem_read(DATA, PAGE)), bytes(uc.mem_read(CPU, PAGE))


@pytest.mark.parametrize("saves_all", [False, True])
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_a_call_keeps_all_values(arch: Arch, saves_all: bool) -> None:
    names = {"arm64": arm64_flat.NAMES, "riscv64": riscv_flat.NAMES, "riscv64i": riscv_flat.NAMES}.get(
        arch.name, NAMES[arch.bits]
    )
    base = CPU if arch.name in ("arm64", "i386") else 0
    rng = random.Random(arch.name)
    for _ in range(20):
        registers = {name: rng.getrandbits(arch.bits) for name in names}
        registers["sp"] = SP
        if "gp" in registers:
            registers["gp"] = CPU
        live = LiveRegisters(
            frozenset(rng.sample(names, rng.randrange(len(names)))) | set(names) & ALWAYS_LIVE, False
        )
        whole = LiveRegisters(arch.general_registers - {"ip", "sp", "flags"}, flags=False)
        called = arch.handler_code(routine(base), 0, None if saves_all else whole)
        handler = going_on(
            arch, arch.handler_code(program(base, 2), PROBE, None if saves_all else live), CODE, END
        )
        cpu = bytearray(PAGE)
        cpu[CELL : CELL + arch.word_size] = (ROUTINE + called.entry).to_bytes(arch.word_size, "little")
        areas = {
            CODE: handler.code,
            ROUTINE: called.code + arch.routine_return,
            DATA: bytes(PAGE),
            CPU: bytes(cpu),
            STACK: bytes(PAGE),
            END: bytes(PAGE),
        }
        found, data, cpu_after = run(arch, areas, registers, CODE + handler.entry)
        stored = [int.from_bytes(data[8 * number :][:4], "little") for number in range(1, ir.NR_VREGS)]
        assert stored == VALUES[1:]
        assert cpu_after[COUNTER] == 2 * 7
        kept = names if saves_all else live.registers & set(names)
        assert {name for name in kept if found[name] != registers[name]} == set()
