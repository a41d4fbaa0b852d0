"""One hand-made function for each rule of the extended strategy on x86."""

from __future__ import annotations

from typing import Any

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.function import Function, PatchSite, TextLayout
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.analysis.tactic import Tactic
from emulated_kernel.arch.x86.analysis import X86FunctionAnalysis
from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.arch.x86.extended import region
from emulated_kernel.arch.x86.insn_attributes import DecodeCache
from emulated_kernel.util.errors import KernelError

ADDR = 0xFFFF_FFFF_8100_1000
THUNKS = range(ADDR + 0x8000, ADDR + 0x8100)
RETURN_THUNK = THUNKS.start + 0x20
LAYOUT = TextLayout(thunks=THUNKS, return_thunks=frozenset((RETURN_THUNK,)))
MOV, NOP3, RET = "4889e5", "0f1f00", "c3"
CALL, JMP, JMP8, JE8 = "e800100000", "e900100000", "eb40", "7440"


def jump(at: int, target: int) -> str:
    """Return, in hex, a jmp at the offset `at` of the function at ADDR, to the address `target`."""
    return "e9" + (target - (ADDR + at + 5)).to_bytes(4, "little", signed=True).hex()


def found(code: str, offset: int = 0, kept: int = 0, **fields: Any) -> Region | Rejection:
    """Return the strategy's region or rejection at `offset` of a function with this code.

    `kept`: number of bytes at the end of the jump that are not written. `fields`: other attributes of the
    function.
    """
    data = bytes.fromhex(code.replace(" ", ""))
    function = Function("foo", ADDR, fields.pop("size", len(data)), data, **fields)
    return region(X86FunctionAnalysis(function, DecodeCache(64), LAYOUT), ADDR + offset, kept)


def tactics(code: str, offset: int = 0, **fields: Any) -> set[Tactic]:
    allowed = found(code, offset, **fields)
    assert isinstance(allowed, Region), allowed
    return set(allowed.tactics)


def reason(code: str, offset: int = 0, **fields: Any) -> tuple[RejectReason, int]:
    refused = found(code, offset, **fields)
    assert isinstance(refused, Rejection)
    return refused.reason, refused.addr - ADDR


@pytest.mark.parametrize(
    ("code", "needed"),
    [
        (MOV * 2 + JMP + "cc", set()),
        (MOV + CALL + RET, {Tactic.RELOCATED_BRANCH}),
        (MOV + JE8 + MOV * 2 + RET, {Tactic.RELOCATED_BRANCH}),
        (MOV + "ffd0" + RET, {Tactic.RELOCATED_BRANCH}),
        (MOV + "e2f0" + RET * 4, {Tactic.RELOCATED_BRANCH}),
        (MOV + JMP8 + "cccc", {Tactic.RELOCATED_BRANCH}),
        (JMP8 + "cccccc", {Tactic.RELOCATED_BRANCH, Tactic.PADDING}),
        (RET + "cccccccc", {Tactic.PADDING}),
        (RET + "90660f1f840000000000", {Tactic.PADDING}),
        (MOV + "f7d8" + RET, {Tactic.OPCODE}),
        (MOV + "f0ff00" + RET, {Tactic.OPCODE}),
        (MOV * 2 + "ffe0", {Tactic.INDIRECT_JUMP}),
        (MOV * 2 + jump(6, THUNKS.start), {Tactic.INDIRECT_JUMP}),
        (MOV * 2 + jump(6, RETURN_THUNK), {Tactic.RETURN_THUNK}),
        ("bf01000000" + "ebfe", {Tactic.NEXT_BYTE}),
    ],
)
def test_tactics(code: str, needed: set[Tactic]) -> None:
    assert tactics(code) == needed


def test_an_exception_table_forbids_its_own_instructions_only() -> None:
    code = MOV * 2 + "8b00" + MOV * 2 + RET
    entries = {"exception_entries": frozenset((ADDR + 6,))}
    assert tactics(code, **entries) == {Tactic.EXACT_TABLES}
    assert tactics(code, 8, **entries) == {Tactic.EXACT_TABLES}
    assert reason(code, 3, **entries) == (RejectReason.EXCEPTION_ENTRY, 6)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (JE8 + "ebfd" + MOV, (RejectReason.JUMP_INTO_RANGE, 2)),
        ("ffd0" + MOV + RET, (RejectReason.CALL_BEFORE_END, 0)),
        ("ff10" + NOP3 + RET, (RejectReason.CALL_BEFORE_END, 0)),
        (MOV + "ebfb" + RET, (RejectReason.JUMP_TO_START, 3)),
        (JMP8 + MOV + RET, (RejectReason.CODE_AFTER_JUMP, 2)),
        (RET + "f3909090", (RejectReason.CODE_AFTER_JUMP, 1)),
        (MOV + "f4" + MOV, (RejectReason.NOT_BOOSTABLE, 3)),
        (MOV + "0f0b" + MOV, (RejectReason.NOT_BOOSTABLE, 3)),
        (MOV + "0f30" + MOV, (RejectReason.NOT_BOOSTABLE, 3)),
        (MOV + "0f05" + MOV, (RejectReason.NOT_BOOSTABLE, 3)),
        (MOV + "48cf" + MOV, (RejectReason.NOT_BOOSTABLE, 3)),
        (MOV + "ff542408" + MOV, (RejectReason.NOT_BOOSTABLE, 3)),
        (MOV + "66e90000" + MOV, (RejectReason.NOT_BOOSTABLE, 3)),
        (MOV + "90fb" + "f4" + MOV, (RejectReason.DELAYS_INTERRUPTS, 4)),
        (MOV + RET, (RejectReason.REGION_TOO_SHORT, 0)),
    ],
)
def test_refusals(code: str, expected: tuple[RejectReason, int]) -> None:
    assert reason(code) == expected


def test_a_function_that_is_not_decodable_to_its_end() -> None:
    assert reason(MOV * 2, size=8) == (RejectReason.UNDECODABLE, 6)


@pytest.mark.parametrize("sites", ["fentry_sites", "jump_labels", "static_calls"])
def test_text_that_the_kernel_rewrites(sites: str) -> None:
    refused = found(MOV + CALL + RET, **{sites: (PatchSite(ADDR + 3, 5),)})
    assert isinstance(refused, Rejection)
    assert refused.addr == ADDR + 3


@pytest.mark.parametrize(
    "filler", ["8d742600", "8d7600" + "90", "8db600000000", "8db42600000000", "6690" * 2]
)
def test_padding_of_32_bit_code(filler: str) -> None:
    data = bytes.fromhex(RET + filler)
    function = Function("foo", 0xC100_1000, len(data), data)
    allowed = region(X86FunctionAnalysis(function, DecodeCache(32)), function.addr)
    assert isinstance(allowed, Region)
    assert allowed.tactics == (Tactic.PADDING,)
    data = bytes.fromhex(RET + "8d760490")
    other = Function("foo", 0xC100_1000, len(data), data)
    refused = region(X86FunctionAnalysis(other, DecodeCache(32)), other.addr)
    assert refused == Rejection(RejectReason.CODE_AFTER_JUMP, other.addr + 1)


def test_a_load_of_the_stack_segment() -> None:
    assert reason(MOV + "8ed0" + RET) == (RejectReason.NOT_COPYABLE_TO_DETOUR, 3)


def test_padding_is_not_copied() -> None:
    allowed = found(RET + "cccccccc")
    assert isinstance(allowed, Region)
    assert (allowed.length, allowed.padding) == (5, 4)


LOOPS = "75fb"
"""A jne to the instruction before it, which has three bytes."""
ARCH = X86_64()


def punned(code: str, kept: int) -> Region:
    allowed = found(code, 0, kept)
    assert isinstance(allowed, Region), allowed
    return allowed


def test_a_jump_that_keeps_an_instruction_that_is_jumped_to() -> None:
    code = MOV + MOV + LOOPS + RET
    assert reason(code) == (RejectReason.JUMP_INTO_RANGE, 6)
    allowed = punned(code, 2)
    assert (allowed.end, allowed.length, allowed.kept) == (ADDR + 3, 5, 2)
    assert allowed.tactics == (Tactic.PUNNED,)
    starts = ARCH.detour_starts(allowed)
    assert starts is not None
    assert starts == range(ADDR + 5 - 0x76B80000, ADDR + 5 - 0x76B70000)
    for target in (starts.start, starts.stop - 1):
        assert ARCH.detour_jump(allowed, target)[3:] == bytes.fromhex(MOV)[:2]
    with pytest.raises(KernelError):
        ARCH.detour_jump(allowed, starts.stop)
    detour = ARCH.detour(allowed, starts.start).code
    assert detour[-8:] == bytes.fromhex(MOV) + ARCH.relative_jump(starts.start + len(detour) - 5, allowed.end)


def test_a_kept_instruction_may_be_of_any_kind() -> None:
    """A punned jump may keep a call, a trap or an instruction with an exception table entry, because the kept
    instruction is not moved.
    """
    for after in ("ffd0" + NOP3, "0f0b" + NOP3, "f4" + NOP3):
        assert punned(MOV + after + RET, 2).end == ADDR + 3
    allowed = found(MOV + MOV + RET, 0, 2, exception_entries=frozenset((ADDR + 3,)))
    assert isinstance(allowed, Region)


@pytest.mark.parametrize(
    ("code", "kept", "expected"),
    [
        # The jump would lead into the kernel, or into user space.
        (MOV + "0000" + RET, 2, (RejectReason.NO_PUN, 3)),
        (MOV + "ff7f" + RET, 2, (RejectReason.NO_PUN, 3)),
        (MOV + MOV + RET, 1, (RejectReason.NOT_A_BOUNDARY, 4)),
        ("75fe" + "90" + MOV + RET, 2, (RejectReason.JUMP_TO_START, 0)),
        ("ffd0" + "90" + MOV + RET, 2, (RejectReason.CALL_BEFORE_END, 0)),
        ("90fb" + "90" + MOV + RET, 3, (RejectReason.DELAYS_INTERRUPTS, 1)),
        ("4889" + RET, 2, (RejectReason.REGION_TOO_SHORT, 0)),
    ],
)
def test_refusals_of_punned_jumps(code: str, kept: int, expected: tuple[RejectReason, int]) -> None:
    refused = found(code, 0, kept)
    assert isinstance(refused, Rejection), refused
    assert (refused.reason, refused.addr - ADDR) == expected


@pytest.mark.parametrize("sites", ["fentry_sites", "jump_labels", "static_calls"])
def test_kept_bytes_that_the_kernel_rewrites(sites: str) -> None:
    for at in (3, 4):
        refused = found(MOV + CALL + RET, 0, 2, **{sites: (PatchSite(ADDR + at, 5),)})
        assert isinstance(refused, Rejection)
        assert refused.addr == ADDR + at
