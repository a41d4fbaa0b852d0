"""i386: instructions that differ from 64 bits, and emulated instructions, compared with the processor."""

from __future__ import annotations

import errno
import random

import pytest

from emulated_kernel.arch.x86.arch import I386
from emulated_kernel.util.errors import KernelError
from tests.arch.decoding import insn_length
from tests.arch.processor import CODE, STATUS, Processor

NAMES = ("ax", "cx", "dx", "bx", "bp", "si", "di")
ARCH = I386()


@pytest.mark.parametrize(
    "code",
    [
        "fa",  # cli
        "fb",  # sti
        "9c",  # pushf
        "669c",  # pushf, 16 bits
        "9d",  # popf
        "c3",  # ret
        "c20800",  # ret $8
        "e810000000",  # call
        "e8f0ffffff",
        "e910000000",  # jmp
        "eb70",
        "66e91000",  # jmp, to a 16-bit target
        "7405",  # je
        "0f8f00010000",  # jg
        "e2f0",  # loop
        "67e2f0",  # loop with cx
        "e0f0",  # loopne
        "e1f0",  # loope
        "e310",  # jecxz
        "67e310",  # jcxz
        "ffd0",  # call *%eax
        "ffe1",  # jmp *%ecx
        "ffd4",  # call *%esp
    ],
)
def test_emulation_is_as_the_processor(code: str) -> None:
    dice = random.Random(code)
    for _ in range(40):
        values = {name: dice.choice((0, 1, 0x10000, dice.randrange(CODE))) for name in NAMES}
        top = dice.choice((0x8D7, 0x202, 0x4000)).to_bytes(4, "little")
        Processor(ARCH, NAMES).check(bytes.fromhex(code), values, dice.getrandbits(12) & STATUS, top)


@pytest.mark.parametrize(
    ("code", "length"),
    [
        ("40", 1),  # inc %eax: a prefix in 64 bits
        ("60", 1),  # pusha
        ("6204c8", 3),  # bound
        ("c401", 2),  # les
        ("a144332211", 5),  # mov 0x11223344, %eax
        ("6766a14433", 5),
        ("9a112233446000", 7),  # call far
        ("d40a", 2),  # aam
        ("0f05", 2),  # syscall
    ],
)
def test_lengths(code: str, length: int) -> None:
    assert insn_length(ARCH, bytes.fromhex(code) + b"\x90" * 8) == length


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("17", errno.EINVAL),  # pop %ss
        ("8ed0", errno.EINVAL),  # mov %eax, %ss
        ("9a112233446000", errno.EOPNOTSUPP),  # call far
        ("ea112233446000", errno.EOPNOTSUPP),  # jmp far
        ("ff20", errno.EOPNOTSUPP),  # jmp *(%eax)
        ("cf", errno.EOPNOTSUPP),  # iret
    ],
)
def test_refused(code: str, error: int) -> None:
    with pytest.raises(KernelError) as refused:
        ARCH.prepare(bytes.fromhex(code), CODE, 0xF000_0000)
    assert refused.value.errno == error


def test_a_copy_has_no_displacement_to_mend() -> None:
    """In 32-bit code, the copy of `mov 0x11223344, %ecx` is identical, because the operand is an absolute
    address.

    In 64-bit code, the operand would be relative to the instruction.
    """
    code = bytes.fromhex("8b0d44332211")
    assert ARCH.prepare(code, CODE, 0xF000_0000).slot_bytes == code + b"\xcc"


def test_registers_are_those_of_struct_pt_regs() -> None:
    assert tuple(ARCH.registers.names) == ARCH.pt_regs
    assert (ARCH.word_size, ARCH.mask, ARCH.registers.arguments) == (4, 0xFFFFFFFF, ("ax", "dx", "cx"))


def test_disassembly() -> None:
    assert ARCH.disassemble(bytes.fromhex("40"), CODE)[0].endswith("incl %eax")
