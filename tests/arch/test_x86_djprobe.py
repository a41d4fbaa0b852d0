"""The static checks of djprobe, one test for each."""

from __future__ import annotations

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.function import Function
from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.arch.x86 import djprobe
from emulated_kernel.arch.x86.analysis import X86FunctionAnalysis
from emulated_kernel.arch.x86.insn_attributes import DecodeCache

ADDR = 0xC031_2C3E


def analyse(code: str, offset: int = 0, bits: int = 32, bug_size: int = 2) -> int | RejectReason:
    """Return the length of the region, or the rule that rejects the place.

    `bits`: word size. `bug_size`: size in bytes of a BUG().
    """
    data = bytes.fromhex(code.replace(" ", ""))
    analysis = X86FunctionAnalysis(Function("f", ADDR, len(data), data), DecodeCache(bits), bug_size=bug_size)
    found = djprobe.region(analysis, ADDR + offset)
    return found.length if isinstance(found, Region) else found.reason


def test_terms_of_the_paper() -> None:
    region = Region(ADDR, bytes(7))
    assert (region.end, djprobe.prohibited(region)) == (ADDR + 7, range(ADDR + 1, ADDR + 5))


@pytest.mark.parametrize(
    ("code", "length"), [("89e5 89e5 83ec10 c3", 7), ("b801000000 c3", 5), ("89e5 b801000000 c3", 7)]
)
def test_region_is_whole_instructions(code: str, length: int) -> None:
    assert analyse(code) == length


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("89e5 89e5 89e5", RejectReason.BEYOND_FUNCTION),
        ("89e5 89e5", RejectReason.BEYOND_FUNCTION),
        ("89e5 89e5 c3", 5),
        ("89e5 83c001 ffe0", 5),
        ("89e5 90 ffe0", 5),
        ("90 ff2500000000", 7),
        ("ea 00100000 1000", 7),
        ("89e5 c3", RejectReason.BEYOND_FUNCTION),
    ],
)
def test_function_bottom_and_its_two_exceptions(code: str, expected: int | RejectReason) -> None:
    assert analyse(code) == expected


@pytest.mark.parametrize(("target", "harmful"), [(0, False), (1, True), (2, True), (4, True), (5, False)])
@pytest.mark.parametrize("opcode", ["eb", "74", "e2", "e8", "e9", "0f85"])
def test_jumps_and_calls_into_the_prohibited_region(opcode: str, target: int, harmful: bool) -> None:
    size = 4 if opcode in ("e8", "e9", "0f85") else 1
    distance = target - (8 + len(opcode) // 2 + size)
    code = "89e5 89e5 89e5 89e5" + opcode + distance.to_bytes(size, "little", signed=True).hex()
    assert analyse(code) == (RejectReason.JUMP_INTO_RANGE if harmful else 6)


def test_long_first_instruction_changes_no_boundary() -> None:
    assert analyse("b801000000 ebfa") == 5


@pytest.mark.parametrize(
    ("insn", "expected"),
    [
        ("eb10", RejectReason.RELATIVE_IN_DCR),
        ("7410", RejectReason.RELATIVE_IN_DCR),
        ("e310", RejectReason.RELATIVE_IN_DCR),
        ("e910000000", RejectReason.RELATIVE_IN_DCR),
        ("e810000000", RejectReason.PROHIBITED_IN_DCR),
        ("ffd0", RejectReason.PROHIBITED_IN_DCR),
        ("cd80", RejectReason.PROHIBITED_IN_DCR),
        ("cc", RejectReason.PROHIBITED_IN_DCR),
    ],
)
@pytest.mark.parametrize("before", ["", "40"])
def test_instructions_that_cannot_move(before: str, insn: str, expected: RejectReason) -> None:
    assert analyse(before + insn + "90" * 16) == expected


def test_rip_relative_addressing_cannot_move() -> None:
    assert analyse("488b0500000000 c3", bits=64) is RejectReason.RELATIVE_IN_DCR
    assert analyse("8b0500000000 c3", bits=32) == 6


def test_not_a_boundary() -> None:
    assert analyse("b801000000 89e5 89e5 90", offset=1) is RejectReason.NOT_A_BOUNDARY


def test_decoding_starts_afresh_behind_a_bug() -> None:
    """Decoding continues after the line number and the file name that follow a BUG()'s ud2.

    Otherwise these bytes would swallow the next instruction.
    """
    code = "0f0b 0102 b8b8b8b8 89e5 89e5 40 c3"
    assert analyse(code, offset=8, bug_size=8) == 5
    assert analyse(code, offset=8, bug_size=2) is RejectReason.NOT_A_BOUNDARY
