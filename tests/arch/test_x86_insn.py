"""Linux's view of x86 instructions: lengths, compared with iced-x86; fields; and copies for the slot."""

from __future__ import annotations

from errno import EINVAL, ENOSPC, EOPNOTSUPP, ERANGE

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.arch.x86.insn import LEGACY_PREFIXES, decode_all, decode_insn, iced_decoder
from emulated_kernel.util.errors import KernelError
from tests.oracle.recorded import oracle_directory, recordings
from tests.sample import fewer

ARCH = X86_64()
ADDR, SLOT = 0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_A000_0000
# Few of all byte strings are instructions.
drawn = settings(
    max_examples=fewer(800, 8),
    suppress_health_check=[*settings().suppress_health_check, HealthCheck.filter_too_much],
)


def length_for_linux(code: bytes, bits: int) -> int:
    try:
        return decode_insn(code, bits).length
    except KernelError:
        return 0


def parts_with_the_processor(code: bytes) -> bool:
    """Return True for byte strings that no assembler produces, and for which Linux is known to find another
    length than the processor.
    """
    at = 0
    while at < len(code) and code[at] in LEGACY_PREFIXES:
        at += 1
    rex_then_prefix = code[at] & 0xF0 == 0x40 and (
        code[at + 1] in LEGACY_PREFIXES or code[at + 1] & 0xF0 == 0x40 or code[at + 1] in (0x62, 0xC4, 0xC5)
    )
    at += code[at] & 0xF0 == 0x40
    odd_two_byte = code[at] == 0x0F and code[at + 1] in (
        *range(0x19, 0x1E),  # reserved nops
        *range(0x20, 0x28),  # moves of control registers ignore mod
        *(0x78, 0xA6, 0xA7, 0xB8, 0xFF),  # extrq, insertq, padlock, jmpe, ud0
    )
    too_many_prefixes = len(set(code[:at])) > 4
    return rex_then_prefix or odd_two_byte or too_many_prefixes


@drawn
@given(code=st.binary(min_size=15, max_size=15))
@pytest.mark.parametrize("prefix", [b"", b"\x0f", b"\x48", b"\x66", b"\xf3\x0f", b"\x67", b"\xc5"])
def test_lengths_agree_with_iced_on_random_bytes(prefix: bytes, code: bytes) -> None:
    code = (prefix + code)[:15]
    insn = iced_decoder(code, 0, 64).decode()
    assume(bool(insn) and not parts_with_the_processor(code))
    assert length_for_linux(code, 64) == insn.len


def test_lengths_agree_on_a_real_kernel() -> None:
    recorded = next(recordings(oracle_directory()), None)
    if recorded is None:
        pytest.skip(f"no recorded functions in {oracle_directory()}")
    for function in recorded.sample.functions[::7]:
        for addr, length, insn in decode_all(function.code, function.addr):
            if insn is not None and addr + length <= function.end:
                assert decode_insn(function.code[addr - function.addr :]).length == length, hex(addr)


@pytest.mark.parametrize(
    ("code", "opcode", "immediate", "displacement"),
    [
        ("e8fcffffff", "e8", -4, 0),
        ("ebfe", "eb", -2, 0),
        ("660f84f0ffffff", "0f84", -16, 0),
        ("488b05f0ffffff", "8b", 0, -16),
        ("48b8ffffffffffffffff", "b8", -1, 0),
        ("c7450401000000", "c7", 1, 4),
        ("c5f970c01b", "70", 0x1B, 0),
        ("c8100001", "c8", 16, 0),
        ("a1ffffffffffffff7f", "a1", 0x7FFF_FFFF_FFFF_FFFF, 0),
        ("f6450801", "f6", 1, 8),
        ("f75508", "f7", 0, 8),
        ("c4e2fbf7c1", "f7", 0, 0),
    ],
)
def test_fields(code: str, opcode: str, immediate: int, displacement: int) -> None:
    insn = decode_insn(bytes.fromhex(code) + bytes(8))
    assert (insn.length, insn.opcode.hex()) == (len(code) // 2, opcode)
    assert (insn.immediate, insn.displacement) == (immediate, displacement)


@pytest.mark.parametrize("code", ["", "48", "e800", "48b8", "0f", "c4e2", "ea0000"])
def test_incomplete(code: str) -> None:
    with pytest.raises(KernelError) as caught:
        decode_insn(bytes.fromhex(code))
    assert caught.value.errno == EINVAL


def test_boundaries_end_at_what_no_decoder_takes() -> None:
    code = bytes.fromhex("4889e5 06 90 c4e2ffff00 90")
    assert ARCH.instruction_boundaries(code, ADDR) == (ADDR, ADDR + 3, ADDR + 4)


def test_copy_is_followed_by_a_breakpoint() -> None:
    prepared = ARCH.prepare(bytes.fromhex("4889e5 90 90"), ADDR, SLOT)
    assert (prepared.length, prepared.slot_bytes.hex()) == (3, "4889e5cc")
    assert prepared.boostable
    assert prepared.emulate is None


def test_equal_instructions_share_what_works_anywhere() -> None:
    plain = bytes.fromhex("4889e5")
    assert ARCH.prepare(plain, ADDR, SLOT) is ARCH.prepare(plain, ADDR + 64, SLOT + 16)
    # A jump's target, and the operand of the other instruction, depend on the address.
    for code in ("eb10", "488b0500000000"):
        one, other = (ARCH.prepare(bytes.fromhex(code), ADDR + at, SLOT) for at in (0, 64))
        assert (one.emulate, one.slot_bytes) != (other.emulate, other.slot_bytes)


@given(
    displacement=st.integers(-(1 << 31), (1 << 31) - 1),
    distance=st.integers(-(1 << 31), (1 << 31) - 1),
)
@drawn
def test_rip_relative_copy_names_the_same_address(displacement: int, distance: int) -> None:
    code = b"\x48\x8b\x05" + displacement.to_bytes(4, "little", signed=True)
    slot = ADDR + distance
    if -(1 << 31) <= displacement - distance < 1 << 31:
        copied = ARCH.prepare(code, ADDR, slot).slot_bytes
        moved = int.from_bytes(copied[3:7], "little", signed=True)
        assert slot + 7 + moved == ADDR + 7 + displacement
    else:
        with pytest.raises(KernelError) as caught:
            ARCH.prepare(code, ADDR, slot)
        assert caught.value.errno == EINVAL


def test_displacement_in_front_of_an_immediate_is_found() -> None:
    code = bytes.fromhex("c70510000000efbeadde")
    assert ARCH.prepare(code, ADDR, ADDR + 16).slot_bytes.hex() == "c70500000000efbeaddecc"


@pytest.mark.parametrize(
    ("code", "boostable"),
    [
        ("4889e5", True),
        ("48b80000000000000000", True),
        ("66c70425000000000100", True),
        ("4881842400010000efbeadde", False),
        ("e800000000", False),
        ("d1e0", False),
        ("f4", False),
    ],
)
def test_boostable(code: str, boostable: bool) -> None:
    assert ARCH.prepare(bytes.fromhex(code) + bytes(5), ADDR, SLOT).boostable is boostable


def test_instruction_with_a_fixup_is_not_boostable() -> None:
    assert not ARCH.prepare(b"\x8b\x07", ADDR, SLOT, may_fault=True).boostable


@pytest.mark.parametrize(
    ("code", "errno"),
    [
        ("cc", EINVAL),
        ("8ed0", EINVAL),
        ("0f0b78656e89c0", EINVAL),
        ("cf", EOPNOTSUPP),
        ("ff20", EOPNOTSUPP),
        ("ff2c24", EOPNOTSUPP),
        ("0f01c1", EOPNOTSUPP),
        ("3e3e3e3e4881842400010000efbeadde"[2:], ENOSPC),
    ],
)
def test_refused(code: str, errno: int) -> None:
    with pytest.raises(KernelError) as caught:
        ARCH.prepare(bytes.fromhex(code), ADDR, SLOT)
    assert caught.value.errno == errno


def test_relative_jump() -> None:
    assert ARCH.relative_jump(ADDR, ADDR + 5) == b"\xe9\0\0\0\0"
    assert ARCH.relative_jump(ADDR, ADDR).hex() == "e9fbffffff"
    with pytest.raises(KernelError) as caught:
        ARCH.relative_jump(ADDR, ADDR + (1 << 31) + 5)
    assert caught.value.errno == ERANGE


def test_relative_calls_are_encoded_like_single_ones() -> None:
    targets = {ADDR: ADDR + 5, ADDR + 16: ADDR, ADDR + 32: ADDR + (1 << 31) - 1}
    single = [(source, ARCH.relative_call(source, target)) for source, target in targets.items()]
    assert [*ARCH.relative_calls(targets)] == single
    with pytest.raises(KernelError) as caught:
        list(ARCH.relative_calls({**targets, ADDR + 48: ADDR + 53 + (1 << 31)}))
    assert caught.value.errno == ERANGE


def test_disassembly_names_address_bytes_and_operands() -> None:
    lines = ARCH.disassemble(bytes.fromhex("4889e5c3"), ADDR)
    assert [" ".join(line.split()) for line in lines] == [
        "0xffffffff81000000: 48 89 e5 movq %rsp, %rbp",
        "0xffffffff81000003: c3 retq",
    ]
