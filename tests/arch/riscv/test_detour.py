"""Detour buffers and trampolines, run on Unicorn: they preserve the registers of the probed code."""

from __future__ import annotations

import random
from errno import EINVAL, ERANGE

import pytest

from emulated_kernel.arch.analysis.detour_region import Region, ScratchRegisters
from emulated_kernel.arch.arch_hooks import Detour
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir import HandlerCode
from emulated_kernel.arch.riscv import encoder as asm
from emulated_kernel.arch.riscv import pt_regs
from emulated_kernel.arch.riscv.analysis import ALL_LIVE
from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I, Riscv
from emulated_kernel.util.errors import KernelError
from tests.arch.placed import detouring
from tests.arch.riscv.flat import NAMES, PAGE, Flat

CODE, BUFFER, STACK, DATA = 0x10_0000, 0x1234_0000, 0x40_0000, 0x50_0000
SP = STACK + 0x800
ARCHS = [RISCV64(), RISCV64I()]
WIDE = asm.addi(10, 10, 5) + asm.arithmetic(asm.ArithmeticFunct3.XOR, 11, 10, 12)
NARROW = bytes.fromhex("1505 aa95 0145") + asm.addi(13, 12, 1)
"""Machine code of 10 bytes: addi a0, 5; add a1, a0; li a0, 0; and an instruction of 4 bytes."""
ECALL = bytes.fromhex("73000000")
REGIONS = [(ARCHS[0], NARROW), (ARCHS[0], WIDE), (ARCHS[1], WIDE)]


def random_registers(seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    return {name: rng.getrandbits(64) for name in NAMES} | {"sp": SP}


def straight(region: bytes, values: dict[str, int], arch: Riscv) -> dict[str, int]:
    machine = Flat({CODE: region + arch.breakpoint}, values)
    machine.run(CODE, 0)
    return machine.registers()


def probed(arch: Riscv, region: Region, detour: Detour | HandlerCode, values: dict[str, int]) -> Flat:
    """Return a machine with the jump of a probe at CODE and the detour at BUFFER.

    `values`: register -> value at the start.
    """
    jump = arch.detour_jump(region, BUFFER + (detour.entry if isinstance(detour, HandlerCode) else 0))
    assert len(jump) == region.length
    areas = {CODE: jump + arch.breakpoint, BUFFER: detour.code, STACK: bytes(PAGE), DATA: bytes(PAGE)}
    return Flat(areas, values)


def words(machine: Flat, at: int, size: int) -> dict[str, int]:
    data = bytes(machine.uc.mem_read(at, size))
    return {name: int.from_bytes(data[o : o + 8], "little") for name, o in pt_regs.OFFSETS.items()}


@pytest.mark.parametrize(("arch", "region"), REGIONS)
@pytest.mark.parametrize(
    "scratch", [ScratchRegisters("t1", "t1"), ScratchRegisters("ra", "a4"), ScratchRegisters("t0", "s11")]
)
def test_a_hit_is_seen_and_not_felt(arch: Riscv, region: bytes, scratch: ScratchRegisters) -> None:
    values = random_registers(len(region))
    expected = straight(region, values, arch)
    detour = arch.detour(Region(CODE, region, scratch), BUFFER)
    assert len(detour.code) <= arch.max_detour
    machine = probed(arch, Region(CODE, region, scratch), detour, values)
    frames = []

    def on_break(machine: Flat, at: int) -> int | None:
        assert detour.trap is not None
        if at != BUFFER + detour.trap:
            return None
        frames.append(words(machine, machine.get("sp"), pt_regs.SIZE))
        return at + len(arch.breakpoint)

    machine.run(CODE, 0, on_break)
    assert machine.at == CODE + len(region)
    [seen] = frames
    assert {name: seen[name] for name in NAMES if name != scratch.entry} == {
        name: value for name, value in values.items() if name != scratch.entry
    }
    assert (seen["ip"], seen["cause"], seen["orig_a0"]) == (CODE, 3, (1 << 64) - 1)
    lost = {scratch.entry, scratch.exit}
    found = machine.registers()
    assert {name for name in NAMES if found[name] != expected[name]} <= lost


def test_what_a_handler_changes_is_restored() -> None:
    arch, region, scratch = ARCHS[0], WIDE, ScratchRegisters("t1", "t1")
    values = random_registers(9)
    detour = arch.detour(Region(CODE, region, scratch), BUFFER)
    machine = probed(arch, Region(CODE, region, scratch), detour, values)

    def on_break(machine: Flat, at: int) -> int | None:
        if at == CODE + len(region):
            return None
        machine.uc.mem_write(machine.get("sp") + pt_regs.OFFSETS["a0"], (77).to_bytes(8, "little"))
        return at + len(arch.breakpoint)

    machine.run(CODE, 0, on_break)
    assert machine.get("a0") == 82


@pytest.mark.parametrize(("arch", "region"), REGIONS)
def test_a_compiled_handler_in_the_detour(arch: Riscv, region: bytes) -> None:
    scratch = ScratchRegisters("t1", "t1")
    values = random_registers(3)
    program = (
        ir.AddToAbsolute(DATA + 8, 1),
        ir.GetRegister(0, "a2"),
        ir.SetImmediate(1, DATA),
        ir.Store(1, 0, 0, 8),
    )
    expected = straight(region, values, arch)
    for live in (None, ALL_LIVE):
        handler = arch.handler_code(program, CODE, live)
        detour = detouring(arch, handler, BUFFER, Region(CODE, region, scratch))
        assert len(detour.code) - len(handler.code) <= arch.max_copied
        machine = probed(arch, Region(CODE, region, scratch), detour, values)
        assert machine.run(CODE, 0) == CODE + len(region)
        found = machine.registers()
        assert {name for name in NAMES if found[name] != expected[name]} <= {"t1"}
        data = bytes(machine.uc.mem_read(DATA, 16))
        assert data == values["a2"].to_bytes(8, "little") + (1).to_bytes(8, "little")


def test_what_cant_be_moved_or_reached() -> None:
    arch, scratch = ARCHS[0], ScratchRegisters("t1", "t1")
    with pytest.raises(KernelError) as caught:
        arch.detour(Region(CODE, ECALL + asm.NOP, scratch), BUFFER)
    assert caught.value.errno == EINVAL
    region = Region(1 << 33, asm.NOP * 2, scratch)
    for far in (1 << 31, -(1 << 31) - 0x801):
        with pytest.raises(KernelError) as caught:
            arch.detour_jump(region, region.addr + far)
        assert caught.value.errno == ERANGE
    assert arch.detour_jump(region, region.addr + (1 << 31) - 0x801)
    with pytest.raises(KernelError) as caught:
        arch.relative_jump(0, 1 << 20)
    assert caught.value.errno == ERANGE


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_ftraces_trampoline(arch: Riscv) -> None:
    """The trampoline of fentry sites is called with t0 as link register, and continues at the saved ip.

    No other register changes.
    """
    stub = arch.ftrace_trampoline()
    call = arch.relative_call(CODE, BUFFER)
    assert len(call) == arch.call_size
    values = random_registers(4)
    machine = Flat({CODE: call + arch.breakpoint, BUFFER: stub.code, STACK: bytes(PAGE)}, values)
    seen = []

    def on_break(machine: Flat, at: int) -> int | None:
        if at != BUFFER + stub.trap:
            return None
        seen.append(words(machine, machine.get("sp"), pt_regs.SIZE))
        return at + len(arch.breakpoint)

    machine.run(CODE, 0, on_break)
    assert machine.at == CODE + len(call)
    assert seen[0]["ip"] == CODE + len(call)
    assert {name for name in NAMES if seen[0][name] != values[name]} == {"t0"}
    found = machine.registers()
    assert {name for name in NAMES if found[name] != values[name]} == {"t0"}
    assert stub.code[-arch.return_size :] == asm.jump_register(5)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_the_return_trampoline(arch: Riscv) -> None:
    """The return trampoline continues at the address that the handler stores, and ra is this address, as
    after a return.
    """
    stub = arch.return_trampoline(BUFFER)
    values = random_registers(5) | {"ra": BUFFER}
    function = asm.jump_register(1)
    machine = Flat({CODE: function + arch.breakpoint * 8, BUFFER: stub.code, STACK: bytes(PAGE)}, values)
    target = CODE + 8
    seen = []

    def on_break(machine: Flat, at: int) -> int | None:
        if at != BUFFER + stub.trap:
            return None
        seen.append(words(machine, machine.get("sp"), pt_regs.SIZE))
        machine.uc.mem_write(machine.get("sp") + pt_regs.SIZE, target.to_bytes(8, "little"))
        return at + len(arch.breakpoint)

    machine.run(CODE, 0, on_break)
    assert machine.at == target
    assert seen[0]["ip"] == BUFFER
    assert {name: seen[0][name] for name in NAMES} == values
    assert machine.registers() == values | {"ra": target}


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_repetition(arch: Riscv) -> None:
    called = asm.addi(10, 10, 1) + asm.jump_register(1)
    code = arch.repetition(CODE, BUFFER, DATA)
    assert len(code) <= arch.max_repetition
    turns = (7).to_bytes(8, "little")
    areas = {CODE: code, BUFFER: called, STACK: bytes(PAGE), DATA: turns, 0x60_0000: arch.breakpoint}
    machine = Flat(areas, {"sp": SP, "ra": 0x60_0000, "a0": 0})
    machine.run(CODE, 0)
    assert (machine.at, machine.get("a0"), machine.get("sp")) == (0x60_0000, 7, SP)
    assert bytes(machine.uc.mem_read(DATA, 8)) == bytes(8)


def test_numbers_of_all_sizes() -> None:
    rng = random.Random(6)
    numbers = [
        0,
        1,
        -1,
        0x7FF,
        0x800,
        -0x801,
        0x7FFFFFFF,
        0x7FFFF800,
        -(1 << 31),
        1 << 63,
        0xFFFFFFD8_1234_5678,
    ]
    numbers += [rng.getrandbits(rng.randrange(1, 65)) << rng.randrange(40) for _ in range(300)]
    for value in numbers:
        code = asm.set_register(10, value)
        machine = Flat({CODE: code + asm.EBREAK}, {})
        machine.run(CODE, 0)
        assert machine.get("a0") == value & (1 << 64) - 1, hex(value)
        assert len(code) <= 32
