"""Relocated x86 instructions have the same effect on the processor as the originals: registers, flags and
stack.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Mapping

import pytest
import unicorn
from unicorn import x86_const as const

from emulated_kernel.arch.x86.arch import I386, X86_64
from emulated_kernel.arch.x86.emulate import TF
from emulated_kernel.arch.x86.relocate import relocate
from emulated_kernel.util.errors import KernelError
from tests.arch import engines
from tests.sample import fewer

BASE = 0x100_0000
MODES = {64: unicorn.UC_MODE_64, 32: unicorn.UC_MODE_32}
SIZE = 0x10_0000
DATA, DETOUR = 0x8000, 0x9_0000
"""Offsets of data that branches read, and of the copy."""
MAX_STEPS = 3
POPF = b"\x9d"
NAMES = ("AX", "CX", "DX", "BX", "BP", "SI", "DI")


def run(
    code: bytes, at: int, bits: int, values: Mapping[str, int], flags: int, top: int = 0
) -> tuple[object, ...]:
    """Run code until the CPU leaves it. Return the next address, the registers, the flags and the memory.

    `at`: address of the code. `values`, `flags`: registers and flags at the start. `top`: word at the top of
    the stack.
    """
    prefix = "R" if bits == 64 else "E"
    with engines.lent(unicorn.UC_ARCH_X86, MODES[bits]) as uc:
        uc.mem_map(BASE, SIZE)
        for where in range(BASE + DATA, BASE + DATA + 64, bits // 8):
            uc.mem_write(where, (BASE + 0x4321).to_bytes(bits // 8, "little"))
        uc.mem_write(at, code)
        uc.mem_write(BASE + SIZE // 2, top.to_bytes(bits // 8, "little"))
        numbers = {name: getattr(const, f"UC_X86_REG_{prefix}{name}") for name in (*NAMES, "SP")}
        for name, number in numbers.items():
            uc.reg_write(number, {"SP": BASE + SIZE // 2, **values}[name])
        uc.reg_write(const.UC_X86_REG_EFLAGS, flags)
        ip = at
        for _ in range(MAX_STEPS):
            uc.emu_start(ip, 0, count=1)
            ip = uc.reg_read(const.UC_X86_REG_RIP if bits == 64 else const.UC_X86_REG_EIP)
            if not at <= ip < at + len(code):
                break
        registers = {name: uc.reg_read(number) for name, number in numbers.items()}
        stack = bytes(uc.mem_read(BASE + SIZE // 2 - 64, 128))
        # The CPU leaves the copy at its end if it leaves the original at its end.
        leads_to = "behind" if ip == at + len(code) else ip
        return leads_to, registers, uc.reg_read(const.UC_X86_REG_EFLAGS), stack


@pytest.mark.parametrize(
    ("code", "bits"),
    [
        *((code, bits) for bits in (64, 32) for code in (
            "e810000000", "e8f0ffffff", "2ee810000000", "e910000000", "eb70", "ebf0", "7405", "0f8f00010000",
            "e2f0", "e0f0", "e1f0", "e310", "67e310", "ffd0", "ffe6", "ff10", "ff5308", "89e5", "f7d8",
        )),
        ("41ffd0", 64),
        ("ff15f27f0000", 64),
        ("488d0510000000", 64),
        ("ff148d00800001", 32),
    ],
)  # fmt: skip
def test_as_the_original(code: str, bits: int) -> None:
    dice = random.Random(code)
    insn = bytes.fromhex(code)
    at, to = BASE + 0x2000, BASE + DETOUR
    copy, length = relocate(insn + bytes(15), at, to, bits)
    assert length == len(insn)
    for _ in range(fewer(20, 2)):
        values = {name: dice.choice((0, 1, dice.randrange(1 << 16))) for name in NAMES}
        values |= {"AX": BASE + DATA, "BX": BASE + DATA + 8, "SI": BASE + DATA + 16}
        flags = dice.getrandbits(12) & 0x8D5 | 2
        assert run(copy, to, bits, values, flags) == run(insn, at, bits, values, flags)


@pytest.mark.parametrize("bits", [64, 32])
def test_a_popf_at_the_end_of_a_stub(bits: int) -> None:
    """At the end of a stub, a popf that sets the trap flag is left to Python, with an unchanged stack.

    Any other popf has its original effect.
    """
    arch = X86_64() if bits == 64 else I386()
    dice = random.Random(bits)
    at, to = BASE + 0x2000, BASE + DETOUR
    region = arch.emulated_region(POPF, at)
    assert region is not None
    end = arch.stub_end(region, to)
    assert end.by_python is not None
    assert len(end.code) <= arch.max_copied
    jump_back = end.code.index(arch.relative_jump(end.by_python - arch.jump_size, at + len(POPF)))
    seen = set()
    for _ in range(60):
        values = {name: dice.getrandbits(bits) for name in NAMES}
        flags = dice.getrandbits(12) & 0x8D5 | 2
        top = dice.getrandbits(bits)
        found = run(end.code[:jump_back], to, bits, values, flags, top)
        goes_to, registers, _, stack = found
        seen.add(goes_to)
        if top & TF:
            assert goes_to == end.by_python
            assert registers == {**values, "SP": BASE + SIZE // 2}
        else:
            assert found == run(POPF, at, bits, values, flags, top)
        assert bytes(stack)[64:].startswith(top.to_bytes(bits // 8, "little"))
    assert len(seen) == 2
    places = [arch.original_place(region, to, where).address for where in (to, to + jump_back, end.by_python)]
    assert places == [at, at + len(POPF), at]


def test_an_address_that_cannot_be_pushed() -> None:
    with pytest.raises(KernelError) as caught:
        relocate(bytes.fromhex("e810000000"), 1 << 32, (1 << 32) + 99, 64)
    assert caught.value.errno == errno.ERANGE
