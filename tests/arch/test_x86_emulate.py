"""Each emulated instruction, compared with the processor: registers, flags and stack are the same."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.arch.x86.arch import X86_64
from tests.arch.processor import CODE, SIZE, SP, STATUS, Processor, StackMemory
from tests.sample import fewer

ARCH = X86_64()
NAMES = ("ax", "cx", "dx", "bx", "bp", "si", "di", *(f"r{n}" for n in range(8, 16)))
PROCESSOR = Processor(ARCH, NAMES)


def check(code: bytes, values: dict[str, int], flags: int, stack_top: bytes = b"") -> None:
    PROCESSOR.check(code, values, flags, stack_top)


words = st.integers(0, (1 << 64) - 1)
counts = st.one_of(st.sampled_from([0, 1, 2, 1 << 16, 1 << 32, (1 << 32) + 1, (1 << 64) - 1]), words)
flag_sets = st.integers(0, 0xFFF).map(lambda value: value & STATUS)
drawn = settings(max_examples=fewer(40, 2))
CONDITIONS = range(16)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("near", [False, True], ids=["short", "near"])
@drawn
@given(flags=flag_sets, distance=st.integers(-64, 63))
def test_jcc(condition: int, near: bool, flags: int, distance: int) -> None:
    code = (
        b"\x0f" + bytes((0x80 | condition,)) + struct.pack("<i", distance)
        if near
        else bytes((0x70 | condition,)) + struct.pack("<b", distance)
    )
    check(code, {}, flags)


def test_jcc_under_every_combination_of_flags() -> None:
    from emulated_kernel.arch.x86.emulate import condition_holds

    bits = (0x1, 0x4, 0x40, 0x80, 0x800)
    for number in range(32):
        flags = sum(bit for index, bit in enumerate(bits) if number >> index & 1)
        for condition in CONDITIONS:
            assert condition_holds(condition, flags) != condition_holds(condition ^ 1, flags)


@pytest.mark.parametrize("opcode", [0xE0, 0xE1, 0xE2, 0xE3], ids=["loopne", "loope", "loop", "jrcxz"])
@pytest.mark.parametrize("prefix", [b"", b"\x67"], ids=["rcx", "ecx"])
@drawn
@given(cx=counts, flags=flag_sets, distance=st.integers(-64, 63))
def test_loop(opcode: int, prefix: bytes, cx: int, flags: int, distance: int) -> None:
    check(prefix + bytes((opcode,)) + struct.pack("<b", distance), {"cx": cx}, flags)


@pytest.mark.parametrize("code", [b"\xeb", b"\xe9", b"\xe8"], ids=["jmp8", "jmp32", "call"])
@drawn
@given(flags=flag_sets, distance=st.integers(-64, 63))
def test_relative(code: bytes, flags: int, distance: int) -> None:
    check(code + struct.pack("<b" if code == b"\xeb" else "<i", distance), {}, flags)


@pytest.mark.parametrize("register", range(16))
@pytest.mark.parametrize("group", [2, 4], ids=["call", "jmp"])
@pytest.mark.parametrize("rex", [0x40, 0x48], ids=["rex", "rexw"])
def test_indirect(register: int, group: int, rex: int) -> None:
    code = bytes((rex | register >> 3, 0xFF, 0xC0 | group << 3 | register & 7))
    values = {name: CODE + 0x100 + 8 * index for index, name in enumerate(NAMES)}
    check(code, values | {"sp": SP}, 0x202)


@pytest.mark.parametrize("code", [b"\xc3", b"\xf3\xc3", b"\xc2\x18\x00", b"\xc2\xf8\x7f"])
@drawn
@given(target=st.integers(CODE, CODE + SIZE - 1), flags=flag_sets)
def test_ret(code: bytes, target: int, flags: int) -> None:
    check(code, {}, flags, struct.pack("<Q", target))


@pytest.mark.parametrize("code", [b"\xfa", b"\xfb"], ids=["cli", "sti"])
@drawn
@given(flags=flag_sets)
def test_interrupt_flag(code: bytes, flags: int) -> None:
    check(code, {}, flags)


@pytest.mark.parametrize("code", [b"\x9c", b"\x66\x9c"], ids=["pushfq", "pushfw"])
@drawn
@given(flags=flag_sets)
def test_pushf(code: bytes, flags: int) -> None:
    check(code, {}, flags)


@pytest.mark.parametrize("code", [b"\x9d", b"\x66\x9d"], ids=["popfq", "popfw"])
@drawn
@given(flags=flag_sets, value=words.map(lambda value: value & ~(1 << 8 | 1 << 16 | 1 << 17)))
def test_popf(code: bytes, flags: int, value: int) -> None:
    check(code, {}, flags, struct.pack("<Q", value))


@pytest.mark.parametrize(
    ("code", "size"), [(b"\x48\xcb", 8), (b"\xcb", 4), (b"\x48\xca\x10\x00", 8)], ids=["q", "l", "q16"]
)
def test_far_return_pops_target_and_selector(code: bytes, size: int) -> None:
    stack = (CODE + 0x40).to_bytes(size, "little") + (0x10).to_bytes(size, "little")
    regs = SimpleNamespace(sp=SP, ip=CODE, cs=0)
    emulation = ARCH.prepare(code + bytes(15), CODE, CODE + 0x800).emulate
    assert emulation is not None
    emulation.run(regs, StackMemory(bytes(SIZE // 2) + stack + bytes(64)))
    assert (regs.ip, regs.cs) == (CODE + 0x40, 0x10)
    assert regs.sp == SP + 2 * size + (16 if len(code) == 4 else 0)


@pytest.mark.parametrize("code", [b"\xe8\x00\x00\x00\x00", b"\xff\xd0", b"\x9c"])
def test_nothing_changes_if_the_stack_faults(code: bytes) -> None:
    class Faulting:
        def read(self, va: int, size: int) -> bytes:
            raise MemoryError(va, size)

        def write(self, va: int, data: bytes) -> None:
            raise MemoryError(va, data)

    regs = SimpleNamespace(sp=SP, ip=CODE, flags=2, ax=CODE)
    emulation = ARCH.prepare(code + bytes(15), CODE, CODE + 0x800).emulate
    assert emulation is not None
    with pytest.raises(MemoryError):
        emulation.run(regs, Faulting())
    assert regs == SimpleNamespace(sp=SP, ip=CODE, flags=2, ax=CODE)


@drawn
@given(flags=flag_sets, condition=st.sampled_from(CONDITIONS))
def test_operand_size_prefix_on_a_near_branch_is_ignored(flags: int, condition: int) -> None:
    """An emulated near branch ignores an operand size prefix, as on Intel's processors and in Linux.

    The test does not compare with Unicorn, because Unicorn may behave as AMD's processors.
    """
    plain = ARCH.prepare(bytes((0x0F, 0x80 | condition)) + struct.pack("<i", 64), CODE, CODE).emulate
    prefixed = ARCH.prepare(bytes((0x66, 0x0F, 0x80 | condition)) + struct.pack("<i", 63), CODE, CODE).emulate
    assert plain is not None
    assert prefixed is not None
    one = SimpleNamespace(ip=CODE, flags=flags)
    two = SimpleNamespace(ip=CODE, flags=flags)
    plain.run(one, StackMemory(b""))
    prefixed.run(two, StackMemory(b""))
    assert (one.ip, two.ip) in ((CODE + 70, CODE + 70), (CODE + 6, CODE + 7))
