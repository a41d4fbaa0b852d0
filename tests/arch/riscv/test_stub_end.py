"""Emulated instructions at the end of a stub, compared with the processor: all registers, and the next
address.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
import unicorn
from unicorn import riscv_const

from emulated_kernel.arch.riscv import encoder as asm
from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I, Riscv
from emulated_kernel.arch.riscv.encoder import C_EBREAK
from emulated_kernel.arch.riscv.insn import REGISTER_NAMES, Handling, RiscvOpcode, decode_insn
from emulated_kernel.machine.interrupts.trap_handlers import LinkedJump
from emulated_kernel.util.errors import KernelError
from tests.arch.riscv.flat import NAMES, PAGE, Flat
from tests.sample import fewer

CODE, BUFFER = 0x10_0000, 0x1234_0000
ARCHS = [RISCV64(), RISCV64I()]
WORD = (1 << 64) - 1
CONDITIONS = tuple(asm.BranchFunct3)
REGISTERS = range(32)
C_JALR_RA = bytes.fromhex("8290")


def values_of(rng: random.Random) -> dict[str, int]:
    """Return random registers. Many of them are equal, or are addresses that can be jumped to."""
    return {
        name: rng.choice((0, 1, WORD, rng.getrandbits(64), CODE + 4 * rng.randrange(200))) for name in NAMES
    }


def on_processor(code: bytes, values: dict[str, int]) -> tuple[dict[str, int], int]:
    # Breakpoints end the blocks that Unicorn translates, also the block at the next address.
    machine = Flat({CODE - PAGE: C_EBREAK * PAGE}, values)
    machine.uc.mem_write(CODE, code)
    ip = machine.step(CODE)
    return machine.registers(), ip


def at_end_of_stub(arch: Riscv, code: bytes, values: dict[str, int]) -> tuple[dict[str, int], int, int]:
    """Run an emulated instruction at the end of a stub.

    Return the registers, the next address, and the number of breakpoints on the way.
    """
    region = arch.emulated_region(code, CODE)
    assert region is not None
    end = arch.stub_end(region, BUFFER)
    assert len(end.code) <= arch.max_copied
    machine = Flat({BUFFER: end.code}, values)
    error = machine.run_to_fault(BUFFER)
    lead = end.leads.get(machine.at)
    if lead is None:
        assert error == unicorn.UC_ERR_FETCH_UNMAPPED
        return machine.registers(), int(machine.uc.reg_read(riscv_const.UC_RISCV_REG_PC)), 0
    if not isinstance(lead, LinkedJump):
        return machine.registers(), lead, 1
    target = machine.get(lead.register) + lead.offset & lead.kept_bits
    machine.set(lead.link_register, lead.link)
    return machine.registers(), target, 1


def check(arch: Riscv, code: bytes, values: dict[str, int]) -> int:
    """Check that stub and processor agree. Return the number of breakpoints at the end of the stub."""
    expected = on_processor(code, values)
    registers, ip, breakpoints = at_end_of_stub(arch, code, values)
    assert (registers, ip) == expected, arch.disassemble(code, CODE)
    return breakpoints


def wide(rng: random.Random) -> Iterator[bytes]:
    for rd in REGISTERS:
        yield asm.auipc(rd, rng.getrandbits(20) << 12 & 0x3FFFF000)
        yield asm.jal(rd, CODE, CODE + 4 * rng.randrange(-(1 << 18), 1 << 18))
    for condition, left in product(CONDITIONS, REGISTERS):
        for right in (left, rng.randrange(32), rng.randrange(32)):
            yield asm.branch(condition, left, right, 4 * rng.randrange(-1024, 1024))


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_all_registers_of_addresses_jumps_and_branches(arch: Riscv) -> None:
    rng = random.Random(1)
    assert {check(arch, code, values_of(rng)) for code in wide(rng)} == {1}


@pytest.mark.parametrize("link", REGISTERS)
def test_all_registers_of_indirect_jumps(link: int) -> None:
    """At the end of a stub, an indirect jump needs a breakpoint only if its base is also its link
    register.
    """
    rng = random.Random(link)
    for base in REGISTERS:
        values = {name: CODE + 4 * rng.randrange(200) + rng.randrange(2) for name in NAMES}
        breakpoints = check(ARCHS[0], asm.jalr(link, base, 4 * rng.randrange(-512, 512)), values)
        assert breakpoints == (link == base != 0), (link, base)


def test_compressed_ones() -> None:
    rng = random.Random(3)
    seen = 0
    halves = [half for half in range(1 << 16) if half & 3 != 3]
    for half in rng.sample(halves, fewer(12_000, 2)):
        insn = decode_insn(half.to_bytes(2, "little"), compressed=True)
        if insn.handling is Handling.SIMULATED:
            values = values_of(rng)
            if insn.opcode == RiscvOpcode.JALR:
                values[REGISTER_NAMES[insn.rs1]] = CODE + 2 * rng.randrange(200)
            check(ARCHS[0], half.to_bytes(2, "little"), values)
            seen += 1
    assert seen > fewer(800, 2)
    assert check(ARCHS[0], C_JALR_RA, dict.fromkeys(NAMES, CODE + 40)) == 1


def test_an_address_out_of_reach_is_left_to_python() -> None:
    arch = ARCHS[0]
    region = arch.emulated_region(asm.auipc(10, 0x7FFFF000), CODE + (1 << 30))
    assert region is not None
    with pytest.raises(KernelError):
        arch.stub_end(region, CODE)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_where_a_task_is(arch: Riscv) -> None:
    """A task is at the probed instruction until the instruction's effect is complete.

    At the last jump of a call, the return address is already set.
    """
    cases = {
        asm.auipc(10, 0x5000): [(CODE, False), (CODE, False), (CODE + 4, False)],
        asm.jal(1, CODE, CODE + 64): [(CODE, False), (CODE, False), (CODE, True)],
        asm.jal(5, CODE, CODE + 64): [(CODE, False), (CODE, False), (CODE, False)],
        asm.jalr(1, 15, 4): [(CODE, False), (CODE, False), (CODE, True)],
        asm.jalr(1, 1, 4): [(CODE, False)],
        asm.branch(asm.BranchFunct3.EQ, 10, 11, 64): [(CODE, False), (CODE, False), (CODE + 4, False)],
    }
    for code, expected in cases.items():
        region = arch.emulated_region(code, CODE)
        assert region is not None
        end = arch.stub_end(region, BUFFER).code
        insns = [at for at in arch.instruction_boundaries(end, BUFFER) if at < BUFFER + len(end)]
        places = [arch.original_place(region, BUFFER, at) for at in insns]
        assert [(place.address, place.is_calling) for place in places] == expected, code.hex()
        assert not any(place.pushed for place in places)
