"""Simulated AArch64 instructions have the same effect as on the processor, and each instruction is handled in
the right way: simulated, copied or refused.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from errno import EINVAL
from types import SimpleNamespace
from typing import Any

import pytest
import unicorn
from unicorn import arm64_const as const

from emulated_kernel.arch.arm64.arch import Arm64
from emulated_kernel.arch.arm64.encoder import BRK
from emulated_kernel.arch.arm64.insn import REGISTER_NAMES, Handling, handling_of
from emulated_kernel.util.errors import KernelError
from tests.arch import engines

CODE = 0x40_0000
SPAN = 2 << 20
"""Bytes of code before and after CODE. The result of an adrp may be outside of them."""
ARCH = Arm64()
NOP = 0xD503201F
IDS = {name: getattr(const, f"UC_ARM64_REG_{name.upper()}") for name in REGISTER_NAMES}


class CodeMemory:
    """Memory that contains the code, from which simulated instructions read their literals."""

    def __init__(self, uc: unicorn.Uc) -> None:
        self._uc = uc

    def read(self, va: int, size: int, /) -> bytes:
        return bytes(self._uc.mem_read(va, size))

    def write(self, _va: int, _data: bytes, /) -> None:
        raise AssertionError


@pytest.fixture(scope="module")
def processor() -> Iterator[unicorn.Uc]:
    uc = engines.take(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    uc.mem_map(CODE - SPAN, 2 * SPAN)
    words = random.Random(5).randbytes(2 * SPAN)
    uc.mem_write(CODE - SPAN, words)
    yield uc
    engines.give_back(uc)


def check(uc: Any, word: int, values: dict[str, int], flags: int) -> None:
    """Check that processor and emulation end in the same state after the instruction `word`."""
    code = struct.pack("<I", word)
    uc.mem_write(CODE, code)
    uc.ctl_flush_tb()
    for name, value in values.items():
        uc.reg_write(IDS[name], value)
    uc.reg_write(const.UC_ARM64_REG_NZCV, flags)
    uc.emu_start(CODE, 0, count=1)
    regs = SimpleNamespace(**values, ip=CODE, flags=flags)
    prepared = ARCH.prepare(code + bytes(4), CODE, 0)
    assert prepared.emulate is not None, hex(word)
    prepared.emulate.run(regs, CodeMemory(uc))
    shown = {name: uc.reg_read(number) for name, number in IDS.items()}
    assert {name: getattr(regs, name) for name in REGISTER_NAMES} == shown, hex(word)
    assert regs.ip == uc.reg_read(const.UC_ARM64_REG_PC), hex(word)


def words(rng: random.Random) -> Iterator[int]:
    """Yield random instructions of each simulated kind. The targets of branches and loads are within the
    code.
    """
    near = rng.randrange(-400, 400)
    register = rng.randrange(32)
    yield 0x14000000 | near & 0x3FFFFFF
    yield 0x94000000 | near & 0x3FFFFFF
    yield 0x54000000 | (near & 0x7FFFF) << 5 | rng.randrange(16)
    yield 0x34000000 | rng.getrandbits(1) << 31 | rng.getrandbits(1) << 24 | (near & 0x7FFFF) << 5 | register
    bit = rng.randrange(64)
    inverted = rng.getrandbits(1) << 24
    yield 0x36000000 | bit >> 5 << 31 | inverted | (bit & 31) << 19 | (near & 0x3FFF) << 5 | register
    yield 0x10000000 | rng.getrandbits(2) << 29 | rng.getrandbits(19) << 5 | register
    yield 0x90000000 | rng.getrandbits(2) << 29 | rng.getrandbits(19) << 5 | register
    yield 0x18000000 | rng.getrandbits(1) << 30 | (near & 0x7FFFF) << 5 | register
    yield 0x98000000 | (near & 0x7FFFF) << 5 | register
    target = rng.choice((7, 30))
    for opcode in (0xD61F0000, 0xD63F0000, 0xD65F0000):
        yield opcode | target << 5


def test_simulated_instructions(processor: unicorn.Uc) -> None:
    rng = random.Random(1)
    for _ in range(60):
        for word in words(rng):
            values = {name: rng.choice((0, 1, 1 << 32, rng.getrandbits(64))) for name in REGISTER_NAMES}
            values["x7"] = CODE + 4 * rng.randrange(100)
            values["x30"] = CODE - 4 * rng.randrange(100)
            check(processor, word, values, rng.getrandbits(4) << 28)


@pytest.mark.parametrize(
    ("word", "handling"),
    [
        (0xD503233F, Handling.COPIED),  # paciasp
        (0xD50323BF, Handling.REJECTED),  # autiasp
        (0xD503207F, Handling.REJECTED),  # wfi
        (NOP, Handling.COPIED),
        (0xD5384100, Handling.COPIED),  # mrs x0, sp_el0
        (0xD53B4220, Handling.REJECTED),  # mrs x0, daif
        (0xD51B4200, Handling.REJECTED),  # msr nzcv, x0
        (0xD50342DF, Handling.REJECTED),  # msr daifset, #2
        (0xD4210000, Handling.REJECTED),  # brk
        (0xD69F03E0, Handling.REJECTED),  # eret
        (0xC85F7C20, Handling.REJECTED),  # ldxr x0, [x1]
        (0xC8027C20, Handling.REJECTED),  # stxr w2, x0, [x1]
        (0xC8DFFC20, Handling.COPIED),  # ldar x0, [x1]
        (0xD8000040, Handling.REJECTED),  # prfm pldl1keep, .+8
        (0x9C000040, Handling.REJECTED),  # ldr q0, .+8
        (0x58000040, Handling.SIMULATED),  # ldr x0, .+8
        (0xF9400020, Handling.COPIED),  # ldr x0, [x1]
        (0xD65F0BFF, Handling.REJECTED),  # retaa
    ],
)
def test_handling(word: int, handling: Handling) -> None:
    assert handling_of(word) is handling


def test_a_copy_ends_in_a_breakpoint() -> None:
    code = struct.pack("<2I", 0xF9400020, NOP)
    prepared = ARCH.prepare(code, CODE, 0)
    assert (prepared.slot_bytes, prepared.emulate, prepared.boostable) == (code[:4] + BRK, None, False)
    with pytest.raises(KernelError) as refused:
        ARCH.prepare(struct.pack("<I", 0xD69F03E0), CODE, 0)
    assert refused.value.errno == EINVAL
