"""i386: what it decodes differently, and its emulated instructions against the processor."""

from __future__ import annotations

import errno
import random
from types import SimpleNamespace

import pytest
import unicorn
from unicorn import x86_const as const

from emulated_kernel.arch.x86.arch import I386
from emulated_kernel.arch.x86.detour_32 import PT_REGS
from emulated_kernel.errors import KernelError

CODE, STACK, SIZE = 0x10_0000, 0x20_0000, 0x1000
SP = STACK + SIZE // 2
NAMES = ("ax", "cx", "dx", "bx", "bp", "si", "di")
IDS = {name: getattr(const, f"UC_X86_REG_E{name.upper()}") for name in (*NAMES, "sp", "ip")} | {
    "flags": const.UC_X86_REG_EFLAGS
}
STATUS = 0x8D5 | 0x200 | 0x400
ARCH = I386()


class StackMemory:
    """The guest stack as Python bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def read(self, va: int, size: int) -> bytes:
        return bytes(self.data[va - STACK : va - STACK + size])

    def write(self, va: int, data: bytes) -> None:
        self.data[va - STACK : va - STACK + len(data)] = data


def _on_processor(code: bytes, values: dict[str, int], stack: bytes) -> tuple[dict[str, int], bytes]:
    uc = unicorn.Uc(unicorn.UC_ARCH_X86, unicorn.UC_MODE_32)
    uc.mem_map(0, CODE + SIZE)
    uc.mem_map(STACK, SIZE)
    uc.mem_write(CODE, code)
    uc.mem_write(STACK, stack)
    for name, number in IDS.items():
        uc.reg_write(number, values[name])
    uc.emu_start(CODE, 0, count=1)
    return {name: uc.reg_read(number) for name, number in IDS.items()}, bytes(uc.mem_read(STACK, SIZE))


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
        values |= {"sp": SP, "ip": CODE, "flags": dice.getrandbits(12) & STATUS | 2}
        stack = bytearray(SIZE)
        stack[SIZE // 2 : SIZE // 2 + 4] = dice.choice((0x8D7, 0x202, 0x4000)).to_bytes(4, "little")
        regs, memory = SimpleNamespace(**values, cs=0x60), StackMemory(bytes(stack))
        emulation = ARCH.prepare(bytes.fromhex(code), CODE, 0xF000_0000).emulate
        assert emulation is not None
        ARCH.emulate(emulation, regs, memory)
        expected, expected_stack = _on_processor(bytes.fromhex(code), values, bytes(stack))
        assert {name: getattr(regs, name) for name in IDS} == expected
        assert bytes(memory.data) == expected_stack


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
    assert ARCH.decode_length(bytes.fromhex(code) + b"\x90" * 8, CODE) == length


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
    """mov 0x11223344, %ecx: relative to the instruction in 64 bits."""
    code = bytes.fromhex("8b0d44332211")
    assert ARCH.prepare(code, CODE, 0xF000_0000).slot_bytes == code + b"\xcc"


def test_registers_are_those_of_struct_pt_regs() -> None:
    assert tuple(ARCH.registers.names) == PT_REGS
    assert (ARCH.word_size, ARCH.mask, ARCH.registers.arguments) == (4, 0xFFFFFFFF, ("ax", "dx", "cx"))


def test_disassembly() -> None:
    assert ARCH.disassemble(bytes.fromhex("40"), CODE)[0].endswith("incl %eax")
