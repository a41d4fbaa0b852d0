"""Transparency of optimized probes: compiled C has the same results with a detour at each possible place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.function import Function
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.riscv import pt_regs
from emulated_kernel.arch.riscv.analysis import RiscvFunctionAnalysis
from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I, Riscv
from emulated_kernel.arch.riscv.insn import REGISTER_NAMES
from emulated_kernel.arch.riscv.probe_checks import detoured_region
from tests.arch.placed import detouring
from tests.arch.riscv import compiled
from tests.arch.riscv.flat import PAGE, Flat
from tests.sample import fewer, share

pytestmark = pytest.mark.skipif(not compiled.have_compiler(), reason=f"no {compiled.COMPILER}")

STACK, BUFFER, END, COUNT = 0x40_0000, 0x60_0000, 0x70_0000, 0x50_0000
ARCHS = {"riscv64": RISCV64(), "riscv64i": RISCV64I()}
BUILDS = [(name, level) for name in ARCHS for level in ("-O2", "-Os", "-O0")]
ARGUMENTS = (9240, 1071)


@cache
def build(name: str, level: str) -> compiled.Program:
    with TemporaryDirectory() as directory:
        return compiled.build(Path(directory), compressed=ARCHS[name].compressed, optimize=level)


def machine_for(program: compiled.Program, arch: Riscv, buffer: bytes = b"\0") -> Flat:
    stack, end = bytes(4 * PAGE), arch.breakpoint
    areas = {compiled.BASE: program.image, STACK: stack, BUFFER: buffer, END: end, COUNT: bytes(PAGE)}
    registers = {name: 0x1111 * n for n, name in enumerate(REGISTER_NAMES) if n}
    a0, a1 = ARGUMENTS
    return Flat(areas, registers | {"sp": STACK + 3 * PAGE, "ra": END, "a0": a0, "a1": a1})


def outcome(machine: Flat, program: compiled.Program) -> tuple[int, bytes, list[int]]:
    """Return what a caller relies on: the result, the memory, and the registers that a function must
    preserve.
    """
    kept = ["sp", "gp", "tp", "s0", "s1", *(f"s{n}" for n in range(2, 12))]
    return machine.get("a0"), bytes(machine.uc.mem_read(program.cells, 512)), [machine.get(n) for n in kept]


def visits(program: compiled.Program, arch: Riscv) -> dict[int, int]:
    machine = machine_for(program, arch)
    count: dict[int, int] = {}

    def note(_uc: object, address: int, _size: int, _data: object) -> None:
        count[address] = count.get(address, 0) + 1

    import unicorn

    machine.uc.hook_add(unicorn.UC_HOOK_CODE, note)
    machine.run(program.functions["all"].addr, 0)
    return count


def optimizable(function: Function, arch: Riscv) -> Iterator[tuple[Region, RiscvFunctionAnalysis]]:
    analysis = RiscvFunctionAnalysis(function, compressed=arch.compressed)
    for addr in analysis.insns:
        found = detoured_region(analysis, addr)
        if isinstance(found, Region):
            yield found, analysis


@pytest.mark.parametrize(("name", "level"), share(BUILDS, 0, 2))
def test_detours_everywhere(name: str, level: str) -> None:
    """A detour at any place changes no result, although the handler overwrites all registers that are not
    live there.
    """
    program, arch = build(name, level), ARCHS[name]
    expected_machine = machine_for(program, arch)
    expected_machine.run(program.functions["all"].addr, 0)
    expected, visited = outcome(expected_machine, program), visits(program, arch)
    rng, places = random.Random(1), 0
    for function in program.functions.values():
        for region, analysis in share(list(optimizable(function, arch)), 0, 2):
            addr = region.addr
            if not 0 < visited.get(addr, 0) < 100:
                continue
            places += 1
            detour = arch.detour(region, BUFFER)
            machine = machine_for(program, arch, detour.code)
            machine.uc.mem_write(addr, arch.detour_jump(region, BUFFER))
            dead = set(REGISTER_NAMES[1:]) - analysis.at(addr).registers
            hits = []

            def on_break(machine: Flat, at: int) -> int | None:
                if at == END:
                    return None
                hits.append(at)  # noqa: B023
                sp = machine.get("sp")
                for register in dead:  # noqa: B023
                    machine.uc.mem_write(sp + pt_regs.OFFSETS[register], rng.randbytes(8))
                return at + len(arch.breakpoint)

            machine.run(program.functions["all"].addr, 0, on_break)
            assert machine.at == END
            assert outcome(machine, program) == expected, (function.name, hex(addr))
            assert len(hits) == visited[addr], (function.name, hex(addr))
    assert places > fewer(60, 2)


@pytest.mark.parametrize(("name", "level"), share(BUILDS[:4], 1, 2))
def test_counting_in_the_guest(name: str, level: str) -> None:
    """A counting handler in guest code changes no result, whether it computes in dead registers or in a frame
    that saves all registers.
    """
    program, arch = build(name, level), ARCHS[name]
    machine = machine_for(program, arch)
    machine.run(program.functions["all"].addr, 0)
    expected, visited = outcome(machine, program), visits(program, arch)
    handler_program = (ir.AddToAbsolute(COUNT, 1),)
    for function in program.functions.values():
        for region, analysis in share(list(optimizable(function, arch)), 1, 2):
            addr = region.addr
            for live in (analysis.at(addr), None):
                handler = arch.handler_code(handler_program, addr, live)
                detour = detouring(arch, handler, BUFFER, region)
                machine = machine_for(program, arch, detour.code)
                machine.uc.mem_write(addr, arch.detour_jump(region, BUFFER + detour.entry))
                machine.run(program.functions["all"].addr, 0)
                assert machine.at == END
                assert outcome(machine, program) == expected, (function.name, hex(addr))
                hits = int.from_bytes(machine.uc.mem_read(COUNT, 8), "little")
                assert hits == visited.get(addr, 0), (function.name, hex(addr))
