"""Which RISC-V probes can be jump-optimized, which rule rejects the others, and which registers the jumps may
overwrite.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.function import Function, PatchSite
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.riscv import encoder as asm
from emulated_kernel.arch.riscv.analysis import RiscvFunctionAnalysis
from emulated_kernel.arch.riscv.arch import RISCV64
from emulated_kernel.arch.riscv.encoder import ArithmeticFunct3, BranchFunct3
from emulated_kernel.arch.riscv.insn import ALL_REGISTERS, REGISTER_NAMES, Handling
from emulated_kernel.arch.riscv.probe_checks import detoured_region
from emulated_kernel.util.errors import KernelError
from tests.arch.decoding import insn_length

ADDR = 0xFFFFFFFF_8000_1000
RA, SP, T0, T1, A0, A1, A4, A5 = (
    REGISTER_NAMES.index(name) for name in ("ra", "sp", "t0", "t1", "a0", "a1", "a4", "a5")
)
RET, STEP = asm.jump_register(RA), asm.addi(A0, A0, 1)
C_ADDI, C_RET = bytes.fromhex("0505"), bytes.fromhex("8280")
ROOT = Path(__file__).resolve().parents[3]


def analysis(code: bytes, **tables: object) -> RiscvFunctionAnalysis:
    return RiscvFunctionAnalysis(Function("f", ADDR, len(code), code, **tables), compressed=True)  # type: ignore[arg-type]


def verdict(
    code: bytes, offset: int = 0, **tables: object
) -> tuple[int, str, str] | tuple[RejectReason, int]:
    """Return the region's length and the registers that the jumps there and back may overwrite.

    If the place is rejected, return the rule and the offset of the instruction that violates the rule.
    """
    found = detoured_region(analysis(code, **tables), ADDR + offset)
    if isinstance(found, Rejection):
        return found.reason, found.addr - ADDR
    assert found.scratch is not None
    return found.length, found.scratch.entry, found.scratch.exit


def test_whole_instructions_of_both_sizes_make_room() -> None:
    assert verdict(STEP * 3 + RET) == (8, "t1", "t1")
    assert verdict(C_ADDI * 5 + C_RET) == (8, "t1", "t1")
    assert verdict(C_ADDI * 3 + STEP + C_ADDI + C_RET) == (10, "t1", "t1")
    assert verdict(C_ADDI + STEP * 2 + C_RET) == (10, "t1", "t1")


def test_what_needs_its_address_isnt_moved() -> None:
    assert verdict(STEP + asm.auipc(A1, 0) + STEP * 2 + RET) == (RejectReason.NOT_BOOSTABLE, 4)
    assert verdict(RET + STEP * 3) == (RejectReason.NOT_BOOSTABLE, 0)
    assert verdict(STEP + bytes.fromhex("0f00f00f") + STEP + RET) == (RejectReason.NOT_BOOSTABLE, 4)


def test_the_function_has_to_go_on_behind() -> None:
    assert verdict(STEP * 2) == (RejectReason.REGION_TOO_SHORT, 0)
    assert verdict(STEP) == (RejectReason.REGION_TOO_SHORT, 0)
    assert verdict(STEP * 3, 2) == (RejectReason.NOT_A_BOUNDARY, 2)


def test_jumps_into_the_region() -> None:
    back = asm.branch(BranchFunct3.NE, A0, A1, -8)
    assert verdict(STEP * 3 + back + RET) == (RejectReason.JUMP_INTO_RANGE, 12)
    assert verdict(STEP * 2 + back + RET) == (8, "t1", "t1")
    assert verdict(STEP * 3 + back + RET, 4) == (8, "t1", "t1")


def test_tables_of_the_kernel() -> None:
    code = STEP * 5 + RET
    assert verdict(code, exception_entries=frozenset([ADDR + 16])) == (RejectReason.EXCEPTION_TABLE, 16)
    label = (PatchSite(ADDR + 4, 4),)
    assert verdict(code, jump_labels=label) == (RejectReason.RESERVED_BY_JUMP_LABEL, 4)
    assert verdict(code, fentry_sites=(PatchSite(ADDR, 8),)) == (RejectReason.RESERVED_BY_FTRACE, 0)
    assert verdict(code, 8, fentry_sites=(PatchSite(ADDR, 8),)) == (8, "t1", "t1")


LOAD_TABLE = asm.auipc(A4, 0x1000) + asm.arithmetic(ArithmeticFunct3.ADD, A5, A5, A4)
JUMP = asm.jump_register(A5)


@pytest.mark.parametrize(
    ("code", "is_tail_call"),
    [
        (asm.load(A5, A0, 16, 8), True),
        (asm.load(A5, A0, 40, 8) + asm.load(A5, A5, 16, 8), True),
        (asm.auipc(A5, 0x1000) + asm.load(A5, A5, 24, 8), True),
        (b"", True),  # its own argument
        (asm.load(A5, SP, 16, 8), False),
        (
            LOAD_TABLE + asm.load(A5, A5, 0, 4, sign=True) + asm.arithmetic(ArithmeticFunct3.ADD, A5, A5, A4),
            False,
        ),
        (LOAD_TABLE + asm.load(A5, A5, 0, 8), False),
        (asm.load(A5, A0, 16, 8) + asm.long_jump(RA, RA, 0, 0x1000), False),  # lost by a call
        (asm.branch(BranchFunct3.EQ, A0, A1, 8) + asm.load(A5, A0, 16, 8) + asm.load(A5, A1, 8, 8), True),
        (asm.branch(BranchFunct3.EQ, A0, A1, 8) + LOAD_TABLE[4:] + asm.addi(A4, A4, 1), False),
    ],
)
def test_indirect_jumps(code: bytes, is_tail_call: bool) -> None:
    """A jump through a table may lead anywhere in the function, and so the place is rejected.

    A tail call leaves the function and is allowed.
    """
    found = verdict(STEP * 2 + code + JUMP)
    at = 8 + len(code)
    assert found == ((8, "t1", "t1") if is_tail_call else (RejectReason.INDIRECT_JUMP, at))


def test_a_long_jump_is_a_direct_one() -> None:
    assert verdict(STEP * 3 + asm.long_jump(0, T1, 0, 0x1_0000)) == (8, "t1", "t1")
    assert verdict(STEP * 3 + asm.long_jump(0, T1, 12, 4)) == (RejectReason.JUMP_INTO_RANGE, 16)


def use_temporaries() -> bytes:
    """Return code that mentions all temporary registers, because a temporary that a function does not mention
    counts as free.
    """
    return b"".join(asm.arithmetic(ArithmeticFunct3.XOR, n, n, n) for n in (5, 6, 7, 28, 29, 30, 31))


def test_a_register_that_is_overwritten_before_it_is_read() -> None:
    """A register is free for the jumps if every path overwrites the register before reading it: here a5, and
    ra before a call.
    """
    head = STEP * 2
    for tail in (
        asm.addi(A5, 0, 1),
        asm.branch(BranchFunct3.EQ, A0, A1, 8) + asm.addi(A5, 0, 1) + asm.addi(A5, 0, 2),
    ):
        assert verdict(head + tail + use_temporaries() + RET) == (8, "a5", "a5")
    call = asm.jal(RA, 0, 0x100)
    assert verdict(STEP * 3 + call + use_temporaries() + RET) == (8, "ra", "ra")


def test_registers_that_arent_free() -> None:
    """A register is not free if one path reads it, or if the function returns without writing it."""
    one_way = asm.branch(BranchFunct3.EQ, A0, A1, 8) + asm.addi(A5, A5, 1) + asm.addi(A5, 0, 2)
    for tail in (one_way, b""):
        code = STEP * 2 + tail + use_temporaries() + RET
        assert verdict(code) == (RejectReason.NO_FREE_REGISTER, 0)


def test_who_needs_a_register() -> None:
    """first_need() returns the nearest instruction on any path that reads the register before a write, or
    leaves the function without a write.
    """
    read, write = asm.addi(A0, T1, 1), asm.addi(T1, 0, 1)
    skip = asm.branch(BranchFunct3.EQ, A0, A1, 8)
    for code, at in (
        (STEP + read + RET, 4),
        (STEP * 2 + RET, 8),
        (STEP + asm.jal(RA, 0, 0x100) + read, 4),
        (skip + write + read + RET, 8),
        (skip + write + STEP + read, 12),
        (asm.branch(BranchFunct3.EQ, A0, A1, 0x100) + write + RET, 0),
        (STEP + asm.branch(BranchFunct3.NE, A0, A1, -4) + write + asm.jal(0, 0, 8) + STEP + read, None),
    ):
        assert analysis(code).first_need(ADDR, T1) == (None if at is None else ADDR + at)
    faults = analysis(write + STEP + RET, exception_entries=frozenset([ADDR]))
    assert faults.first_need(ADDR, T1) == ADDR, "its fixup may read it"


PIECES = (
    STEP,
    RET,
    asm.addi(A0, T1, 1),
    asm.addi(T1, 0, 1),
    asm.addi(A5, T1, 1),
    asm.addi(T1, A5, 1),
    asm.jal(RA, 0, 0x100),
    asm.jal(0, 0, 8),
    asm.branch(BranchFunct3.EQ, A0, A1, 8),
    asm.branch(BranchFunct3.NE, A0, T1, -8),
    asm.branch(BranchFunct3.EQ, A0, A1, 12),
)


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12), st.sets(st.integers(0, 11)))
def test_what_is_live_is_needed(pieces: list[bytes], faulting: set[int]) -> None:
    """A register is live if and only if first_need() finds an instruction that needs it."""
    entries = frozenset(ADDR + 4 * number for number in faulting)
    known = analysis(b"".join(pieces), exception_entries=entries)
    assert entries.isdisjoint(known.insns) or known.hazard is not None
    for addr, live in known.live.items():
        for register in (T1, A5):
            # A temporary register that the function does not mention is never live.
            if live >> register & 1:
                assert known.first_need(addr, register) is not None
            elif known.live_mask(0) >> register & 1:
                assert known.first_need(addr, register) is None


def test_different_registers_for_the_two_jumps() -> None:
    """The jumps use two registers if none is free on both sides: a5 is free only before the region, and a4
    only after it.
    """
    region = asm.addi(A5, A4, 1) + STEP
    behind = asm.addi(A4, 0, 1) + asm.arithmetic(ArithmeticFunct3.ADD, A0, A5, A4)
    assert verdict(region + behind + use_temporaries() + RET) == (8, "a5", "a4")
    both = asm.arithmetic(ArithmeticFunct3.ADD, A0, A0, A5) + asm.arithmetic(ArithmeticFunct3.ADD, A0, A0, A4)
    code = region + both + use_temporaries() + RET
    assert verdict(code) == (RejectReason.NO_FREE_REGISTER_AFTER, 8)


def test_arguments_that_arent_mentioned_may_be_passed_on() -> None:
    live = analysis(STEP * 2 + asm.jal(0, 0, 0x100)).at(ADDR).registers
    assert {"a7", "a1", "ra", "s0", "sp", "gp", "tp"} <= live
    assert not {"t0", "t6"} & live


def _insn(entry: str | list[str]) -> int:
    """Return the instruction's address in an exception table entry, which is recorded alone or with its
    fixup.
    """
    return int(entry if isinstance(entry, str) else entry[0], 16)


def recorded() -> list[Function]:
    """Return functions of a real kernel from the oracle. Skip the test if the record is missing."""
    place = Path(os.environ.get("KPROBEFS_ORACLE") or ROOT.parent / "shared" / "oracle")
    path = place / "functions-riscv-6.1.json.gz"
    if not path.exists():
        pytest.skip(f"no {path}")
    functions = json.loads(gzip.decompress(path.read_bytes()))
    del functions["_meta"]
    return [
        Function(
            name,
            int(entry["addr"], 16),
            entry["size"],
            bytes.fromhex(entry["bytes_hex"]),
            exception_entries=frozenset(map(_insn, entry.get("ex_table", ()))),
        )
        for name, entry in functions.items()
    ]


def test_as_many_as_the_patch_says() -> None:
    """Of all pairs of instructions, 49 to 58 % can be moved and leave registers free; the patch's authors
    found 51 %.

    With instructions of two sizes, the jump covers up to four instructions. Therefore only 38 to 43 % of the
    places have room for the jump.
    """
    pairs = total = optimizable = 0
    for function in recorded()[::40]:
        found = RiscvFunctionAnalysis(function, compressed=True)
        insns = [*found.insns.items(), (function.end, None)]
        for (addr, first), (_, second), (behind, _) in zip(insns, insns[1:], insns[2:], strict=False):
            total += 1
            optimizable += isinstance(detoured_region(found, addr), Region)
            assert first is not None
            moved = second is not None and {first.handling, second.handling} == {Handling.COPIED}
            live = (found.live.get(at, ALL_REGISTERS) for at in (addr, behind))
            pairs += moved and all(mask != ALL_REGISTERS for mask in live)
    assert total > 40_000
    assert 0.49 < pairs / total < 0.58
    assert 0.38 < optimizable / total < 0.43


def test_no_jump_in_a_function_with_an_exception_table() -> None:
    """No place in a recorded function with an exception table can be jump-optimized, although many could
    without the table.
    """
    functions = [function for function in recorded() if function.exception_entries]
    assert len(functions) > 100
    found, without = set(), 0
    for function in functions:
        analysed = RiscvFunctionAnalysis(function, compressed=True)
        plain = RiscvFunctionAnalysis(replace(function, exception_entries=frozenset()), compressed=True)
        for addr in analysed.insns:
            verdict = detoured_region(analysed, addr)
            assert isinstance(verdict, Rejection)
            if isinstance(detoured_region(plain, addr), Region):
                without += 1
                assert verdict.reason is RejectReason.EXCEPTION_TABLE
                assert verdict.addr in function.exception_entries
                found.add(function.name)
    assert without > 5000
    assert len(found) > 90


def test_no_instruction_has_no_length() -> None:
    with pytest.raises(KernelError):
        insn_length(RISCV64(), b"")
