"""One hand-made function for each rule of the extended strategy on RISC-V."""

from __future__ import annotations

from typing import Any

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.function import Function, PatchSite
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.analysis.tactic import Tactic
from emulated_kernel.arch.riscv.analysis import RiscvFunctionAnalysis
from emulated_kernel.arch.riscv.encoder import (
    C_NOP,
    EBREAK,
    NOP,
    BranchFunct3,
    addi,
    auipc,
    branch,
    jal,
    jalr,
    jump_register,
    load,
)
from emulated_kernel.arch.riscv.extended import region
from emulated_kernel.arch.riscv.insn import A0, A1, RA, SP, T0, T1, ZERO

ADDR = 0xFFFF_FFFF_8020_1000
TRACED = ADDR + 0x1000
"""Address of a function with an fentry site."""
MOVE = addi(A0, A1, 1)
RET = jump_register(RA)
FENCE = bytes.fromhex("0f00f00f")
WFI = bytes.fromhex("73005010")
READ_STATUS = bytes.fromhex("f3270010")


def found(*insns: bytes, offset: int = 0, **fields: Any) -> Region | Rejection:
    """Return the strategy's region or rejection at `offset` of a function that consists of `insns`."""
    code = b"".join(insns)
    function = Function("foo", ADDR, fields.pop("size", len(code)), code, **fields)
    return region(RiscvFunctionAnalysis(function, compressed=True, fentry={TRACED}), ADDR + offset)


def tactics(*insns: bytes, offset: int = 0, **fields: Any) -> set[Tactic]:
    allowed = found(*insns, offset=offset, **fields)
    assert isinstance(allowed, Region), allowed
    return set(allowed.tactics)


def reason(*insns: bytes, offset: int = 0, **fields: Any) -> tuple[RejectReason, int]:
    refused = found(*insns, offset=offset, **fields)
    assert isinstance(refused, Rejection), refused
    return refused.reason, refused.addr - ADDR


def equal(at: int, target: int) -> bytes:
    return branch(BranchFunct3.EQ, A0, ZERO, target - at)


@pytest.mark.parametrize(
    ("insns", "needed"),
    [
        ((MOVE, MOVE, RET), set()),
        ((MOVE, equal(4, 12), MOVE, MOVE, RET), {Tactic.RELOCATED_BRANCH}),
        ((MOVE, jal(RA, ADDR + 4, TRACED), RET), {Tactic.RELOCATED_BRANCH}),
        ((MOVE, jalr(RA, A1, 0), RET), {Tactic.RELOCATED_BRANCH}),
        ((auipc(RA, 0x1000), jalr(RA, RA, 0), RET), {Tactic.RELOCATED_BRANCH}),
        ((auipc(A0, 0x1000), MOVE, RET), {Tactic.RELOCATED_BRANCH}),
        ((MOVE, RET), {Tactic.RELOCATED_BRANCH}),
        ((RET, NOP), {Tactic.RELOCATED_BRANCH, Tactic.PADDING}),
        ((RET, C_NOP, bytes(2)), {Tactic.RELOCATED_BRANCH, Tactic.PADDING}),
        ((MOVE, FENCE, RET), {Tactic.OPCODE}),
        ((MOVE, READ_STATUS, RET), {Tactic.OPCODE}),
    ],
)
def test_tactics(insns: tuple[bytes, ...], needed: set[Tactic]) -> None:
    assert tactics(*insns) == needed


def test_the_registers_of_a_call_are_free_in_the_callee() -> None:
    """If a region ends with a call, t0 is free at the called function's start only if an fentry site there
    may overwrite t0.
    """
    allowed = found(MOVE, jal(RA, ADDR + 4, TRACED), RET)
    assert isinstance(allowed, Region)
    assert allowed.scratch is not None
    assert allowed.scratch.exit == "t0"
    other = jal(RA, ADDR + 4, TRACED + 0x100)
    assert reason(MOVE, other, RET) == (RejectReason.NO_FREE_REGISTER_AFTER, 8)


def test_an_exception_table_forbids_its_own_instructions_only() -> None:
    insns = (MOVE, MOVE, load(A0, A1, 0, 8), MOVE, MOVE, RET)
    entries = {"exception_entries": frozenset((ADDR + 8,))}
    assert tactics(*insns, **entries) == {Tactic.EXACT_TABLES}
    assert reason(*insns, offset=4, **entries) == (RejectReason.EXCEPTION_ENTRY, 8)


@pytest.mark.parametrize(
    ("insns", "expected"),
    [
        ((MOVE, MOVE, equal(8, 4), RET), (RejectReason.JUMP_INTO_RANGE, 8)),
        ((jal(RA, ADDR, TRACED), MOVE, RET), (RejectReason.CALL_BEFORE_END, 0)),
        ((MOVE, equal(4, 0), RET), (RejectReason.JUMP_TO_START, 4)),
        ((RET, MOVE, RET), (RejectReason.CODE_AFTER_JUMP, 4)),
        ((MOVE, WFI, RET), (RejectReason.NOT_BOOSTABLE, 4)),
        ((MOVE, EBREAK, RET), (RejectReason.NOT_BOOSTABLE, 4)),
        ((MOVE, jal(T0, ADDR + 4, TRACED), RET), (RejectReason.NOT_BOOSTABLE, 4)),
        ((MOVE, MOVE, addi(A0, A1, 0), jump_register(A0)), (RejectReason.INDIRECT_JUMP, 12)),
        ((MOVE,), (RejectReason.REGION_TOO_SHORT, 4)),
        ((MOVE, MOVE), (RejectReason.REGION_TOO_SHORT, 0)),
        ((addi(T1, SP, 0), jalr(RA, RA, 0), RET), (RejectReason.NO_FREE_REGISTER_AFTER, 8)),
    ],
)
def test_refusals(insns: tuple[bytes, ...], expected: tuple[RejectReason, int]) -> None:
    assert reason(*insns) == expected


def test_text_that_the_kernel_rewrites() -> None:
    refused = found(MOVE, MOVE, RET, jump_labels=(PatchSite(ADDR + 4, 4),))
    assert refused == Rejection(RejectReason.RESERVED_BY_JUMP_LABEL, ADDR + 4)
