"""Emulated RISC-V instructions, compared with the processor, and copied instructions, which run in a slot."""

from __future__ import annotations

import random
from errno import EINVAL
from types import SimpleNamespace

import pytest

from emulated_kernel.arch.riscv import encoder as asm
from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I
from emulated_kernel.arch.riscv.extension_text import extension_text
from emulated_kernel.arch.riscv.insn import REGISTER_NAMES, Handling, decode_insn
from emulated_kernel.util.errors import KernelError
from tests.arch.riscv.flat import NAMES, PAGE, Flat
from tests.sample import fewer

CODE, SLOT, DATA = 0x10_0000, 0x20_0000, 0x40_0000
ARCH = RISCV64()


class NoMemory:
    """A memory that emulated instructions must not access."""

    def read(self, _va: int, _size: int, /) -> bytes:
        raise AssertionError

    def write(self, _va: int, _data: bytes, /) -> None:
        raise AssertionError


def random_registers(rng: random.Random) -> dict[str, int]:
    values = {name: rng.choice((0, 1, CODE + 64, (1 << 64) - 2, rng.getrandbits(64))) for name in NAMES}
    # Some values are equal, and some are addresses that can be jumped to.
    values["a5"] = values["s1"] = CODE + 2 * rng.randrange(100)
    return values


def check(code: bytes, values: dict[str, int]) -> None:
    machine = Flat({CODE - PAGE: b"\x01\0" * PAGE * 2}, values)
    machine.uc.mem_write(CODE, code)
    ip = machine.step(CODE)
    regs = SimpleNamespace(**values, ip=CODE)
    prepared = ARCH.prepare(code + bytes(8), CODE, SLOT)
    assert prepared.emulate is not None
    assert prepared.length == len(code)
    prepared.emulate.run(regs, NoMemory())
    assert {name: getattr(regs, name) for name in NAMES} == machine.registers(), code.hex()
    assert regs.ip == ip, code.hex()


def emulated_words(rng: random.Random) -> bytes:
    """Return a random auipc, jal, jalr or branch instruction."""
    kind = rng.choice((0x17, 0x6F, 0x67, 0x63))
    word = rng.getrandbits(25) << 7 | kind
    if kind == 0x67:
        # The base registers contain addresses of code; targets are even.
        word = word & 0x00000FFF & ~0x7000 | rng.choice((9, 15)) << 15 | rng.randrange(64) << 20
    elif kind == 0x63:
        word = word & ~0x7000 | rng.choice((0, 1, 4, 5, 6, 7)) << 12
        if rng.random() < 0.3:
            word = word & ~(0x1F << 20) & ~(0x1F << 15) | 9 << 15 | 15 << 20
    return word.to_bytes(4, "little")


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_wide_ones(first: int) -> None:
    for seed in range(first, first + fewer(100, 2)):
        rng = random.Random(seed)
        check(emulated_words(rng), random_registers(rng))


def test_link_and_base_in_one_register() -> None:
    """In `jalr t0, t0`, the base is read before the link is written."""
    check(asm.jalr(5, 5, 4), random_registers(random.Random(1)) | {"t0": CODE + 32})


def test_compressed_ones() -> None:
    rng = random.Random(2)
    seen = 0
    halves = [half for half in range(1 << 16) if half & 3 != 3]
    for half in rng.sample(halves, fewer(12_000, 2)):
        code = half.to_bytes(2, "little")
        insn = decode_insn(code, compressed=True)
        if insn.handling is not Handling.SIMULATED:
            continue
        values = random_registers(rng)
        if insn.opcode == 0x67:
            values[REGISTER_NAMES[insn.rs1]] = CODE + 2 * rng.randrange(100)
        check(code, values)
        seen += 1
    assert seen > fewer(800, 2)


@pytest.mark.parametrize(
    "code", ["73000000", "73001000", "73001010", "73250010", "0f00f00f", "0f100000", "0290", "73005010"]
)
def test_refused(code: str) -> None:
    """System instructions, breakpoints and fences cannot be probed."""
    with pytest.raises(KernelError) as caught:
        ARCH.prepare(bytes.fromhex(code) + bytes(8), CODE, SLOT)
    assert caught.value.errno == EINVAL


def test_a_copy_ends_in_a_breakpoint() -> None:
    short = ARCH.prepare(bytes.fromhex("0145 0146"), CODE, SLOT)
    assert (short.length, short.slot_bytes, short.emulate) == (2, bytes.fromhex("0145 0290"), None)
    wide = RISCV64I().prepare(bytes.fromhex("13050000 13060000"), CODE, SLOT)
    assert (wide.length, wide.slot_bytes) == (4, bytes.fromhex("13050000 73001000"))
    assert not short.boostable


def copied_instructions(rng: random.Random) -> bytes:
    """Return a random integer instruction that does not depend on its address.

    Loads and stores have the base sp, s1 or a5.
    """
    while True:
        if rng.random() < 0.5:
            code = (rng.getrandbits(14) << 2 | rng.randrange(3)).to_bytes(2, "little")
        else:
            opcode = rng.choice((0x03, 0x13, 0x1B, 0x23, 0x33, 0x37, 0x3B))
            code = (rng.getrandbits(25) << 7 | opcode).to_bytes(4, "little")
        insn = decode_insn(code, compressed=True)
        if not insn.word or insn.opcode in (0x07, 0x27) or insn.handling is not Handling.COPIED:
            continue
        if insn.opcode in (0x03, 0x23) and insn.rs1 not in (2, 9, 15):
            continue
        # The emulated CPU lacks the extensions of this table.
        if insn.length == 4 and extension_text(insn.word):
            continue
        lines = ARCH.disassemble(code, 0)
        if len(lines) == 1 and ".byte" not in lines[0]:
            return code


@pytest.mark.parametrize("first", range(0, 1200, 200))
def test_a_copy_computes_the_same(first: int) -> None:
    """A copied instruction has the same effect in a slot as in place.

    The instruction tables name all registers that the instruction reads and changes.
    """
    for seed in range(first, first + fewer(200, 2)):
        rng = random.Random(seed)
        code = copied_instructions(rng)
        memory = rng.randbytes(2 * PAGE)
        values = random_registers(rng) | {"sp": DATA + 2048, "s1": DATA + 2048, "a5": DATA + 2056}
        insn = decode_insn(code, compressed=True)
        reads, kills = insn.reads, insn.writes

        def run(place: int, values: dict[str, int]) -> tuple[dict[str, int], bytes]:
            prepared = ARCH.prepare(code, CODE, place)  # noqa: B023
            machine = Flat({place: prepared.slot_bytes, DATA: memory}, values)  # noqa: B023
            assert machine.run(place, 0) == place + prepared.length
            return machine.registers(), bytes(machine.uc.mem_read(DATA, 2 * PAGE))

        expected, stored = run(CODE, values)
        assert run(SLOT, values) == (expected, stored)
        changed = {name for name in NAMES if expected[name] != values[name]}
        assert changed <= {REGISTER_NAMES[n] for n in range(32) if kills >> n & 1}, code.hex()
        # Registers that the instruction does not read have no effect.
        others = {
            name: value if reads >> REGISTER_NAMES.index(name) & 1 else rng.getrandbits(64)
            for name, value in values.items()
        }
        found, stored_too = run(CODE, others)
        assert stored_too == stored, code.hex()
        for n in range(1, 32):
            if kills >> n & 1:
                assert found[REGISTER_NAMES[n]] == expected[REGISTER_NAMES[n]], code.hex()
