"""Detoured regions of the RISC-V kernels compute the same as in place, from random states.

A part of the regions is tested; KPROBEFS_WHOLE=1 takes all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.riscv import pt_regs
from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I, Riscv
from emulated_kernel.arch.riscv.insn import REGISTER_NAMES, SP, RiscvOpcode, decode_all
from emulated_kernel.arch.riscv.probe_checks import RiscvProbeChecker
from emulated_kernel.image.builtin_image import load_image
from tests.arch.riscv.flat import NAMES, PAGE, Flat
from tests.sample import WHOLE, fewer

PARTS = 240
CODE, BUFFER, DATA = 0x10_0000, 0x1234_0000, 0x40_0000
ARCHS = [RISCV64(), RISCV64I()]
_MEMORY = (RiscvOpcode.LOAD, RiscvOpcode.STORE, RiscvOpcode.AMO)


def regions(arch: Riscv) -> Iterator[tuple[Region, RiscvProbeChecker]]:
    """Yield regions of the image, each with its probe checker."""
    image = load_image(None, arch.name)
    verdict = arch.probe_checker(image, arch.strategies["optprobe-riscv"], ftrace=False)
    (text,) = image.text_ranges
    at, number = text.start, 0
    while at < text.end:
        where = image.kallsyms.lookup(at)
        assert where is not None
        end = min(where.symbol.address + where.symbol.size, text.end)
        for addr in arch.instruction_boundaries(image.read(at, end - at), at):
            region = verdict.optimized_region(addr)
            if isinstance(region, Region):
                number += 1
                if WHOLE or number % PARTS == 0:
                    yield region, verdict
        at = end


def state(region: bytes, rng: random.Random) -> dict[str, int]:
    """Return random registers for a run of a region.

    The base registers of loads and stores are addresses of mapped memory.
    """
    values = {name: rng.getrandbits(64) for name in NAMES} | {"sp": DATA + PAGE}
    for _, insn in decode_all(region, 0, compressed=True):
        if insn.opcode in _MEMORY and insn.rs1 != SP and insn.rs1:
            values[REGISTER_NAMES[insn.rs1]] = DATA + 2 * PAGE + 8 * rng.randrange(64)
    return values


def run(
    areas: dict[int, bytes], values: dict[str, int], arch: Riscv, trap: int, dead: set[str]
) -> Flat | None:
    """Run until the breakpoint after the region. Return the machine, or None after an access to unmapped
    memory.

    At the detour's breakpoint `trap`, the saved values of the registers `dead` are overwritten.
    """
    machine, rng = Flat(areas, values), random.Random(1)

    def on_break(machine: Flat, at: int) -> int | None:
        if at != trap:
            return None
        for name in dead:
            machine.uc.mem_write(machine.get("sp") + pt_regs.OFFSETS[name], rng.randbytes(8))
        return at + len(arch.breakpoint)

    try:
        machine.run(CODE, 0, on_break)
    except KeyError:
        return None
    return machine


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_a_detour_computes_what_its_region_does(arch: Riscv) -> None:
    rng, compared = random.Random(7), 0
    memory = rng.randbytes(4 * PAGE)
    for found, verdict in regions(arch):
        code, addr, length = found.code, found.addr, found.length
        dead = set(NAMES) - verdict.live_at(addr).registers
        live_after = verdict.live_at(found.end).registers
        values = state(code, rng)
        straight = run({CODE: code + arch.breakpoint, DATA: memory}, values, arch, 0, set())
        if straight is None:
            continue
        region = replace(found, addr=CODE)
        detour = arch.detour(region, BUFFER)
        assert detour.trap is not None
        jump = arch.detour_jump(region, BUFFER) + arch.breakpoint
        areas = {CODE: jump, BUFFER: detour.code, DATA: memory}
        detoured = run(areas, values, arch, BUFFER + detour.trap, dead)
        assert detoured is not None, hex(addr)
        assert detoured.at == CODE + length, hex(addr)
        wrong = {name for name in live_after if detoured.get(name) != straight.get(name)}
        assert not wrong, (hex(addr), wrong)
        above = bytes(detoured.uc.mem_read(DATA + PAGE, 3 * PAGE))
        assert above == bytes(straight.uc.mem_read(DATA + PAGE, 3 * PAGE)), hex(addr)
        compared += 1
    assert compared > fewer(2000, PARTS)


def test_what_is_overwritten_in_a_region_is_known() -> None:
    """The instruction tables name all registers that the processor changes in a region."""
    for found, _ in list(regions(ARCHS[0]))[::4]:
        region, kills = found.code, 0
        for _, insn in decode_all(region, 0, compressed=True):
            kills |= insn.writes
        values = state(region, random.Random(3))
        machine = run({CODE: region + ARCHS[0].breakpoint, DATA: bytes(4 * PAGE)}, values, ARCHS[0], 0, set())
        if machine is not None:
            changed = {name for name in NAMES if machine.get(name) != values[name]}
            assert changed <= {REGISTER_NAMES[n] for n in range(32) if kills >> n & 1}
