"""The probe checker returns the same reasons for a whole function as for each of its instructions."""

from __future__ import annotations

import random

import pytest

from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.arch.riscv.analysis import RiscvFunctionAnalysis
from emulated_kernel.arch.riscv.encoder import LONG_JUMP_SIZE
from emulated_kernel.arch.riscv.insn import Handling
from emulated_kernel.arch.riscv.probe_checks import copied_length
from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.image.kallsyms import Symbol
from tests.arch.riscv.test_probe_checks import analysis
from tests.sample import share

NAMES = ("riscv64", "riscv64i")


@pytest.mark.parametrize("ftrace", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_for_the_image(name: str, ftrace: bool) -> None:
    arch, image = arch_named(name), load_image(None, name)
    asked = arch.probe_checker(image, arch.strategy(["optprobe-riscv"]), ftrace=ftrace)

    def one_by_one(symbol: Symbol) -> list[tuple[int, RejectReason | None]]:
        found = []
        for addr, refused, outcome in asked.check_each_insn(symbol):
            finding = refused or outcome
            found.append((addr, finding.reason if isinstance(finding, Rejection) else None))
        return found

    seen: set[RejectReason | None] = set()
    text = [range(*part) for part in image.text_ranges]
    symbols = [
        symbol
        for symbol in image.kallsyms.symbols
        if symbol.size and any(symbol.address in part for part in text)
    ]
    for symbol in share(symbols, NAMES.index(name) + ftrace, 2):
        reasons = list(asked.reasons(symbol).items())
        assert reasons == one_by_one(symbol), symbol.name
        seen |= {reason for _, reason in reasons}
    assert {None, RejectReason.NOT_BOOSTABLE, RejectReason.NOT_COPYABLE, RejectReason.JUMP_INTO_RANGE} <= seen


def _walked(found: RiscvFunctionAnalysis, addr: int) -> int | Rejection:
    """Return the length of the region at `addr`, or the reason why there is none.

    Walk over the instructions, as opt.c:search_copied_insn does.
    """
    at = addr
    while at < addr + LONG_JUMP_SIZE:
        insn = found.insns.get(at)
        if insn is None:
            return Rejection(RejectReason.REGION_TOO_SHORT, addr)
        if insn.handling is not Handling.COPIED:
            return Rejection(RejectReason.NOT_BOOSTABLE, at)
        at += insn.length
    return at - addr


def test_room_is_whole_instructions_up_to_the_first_that_cant_be_moved() -> None:
    rng = random.Random(3)
    rooms = set()
    for _ in range(300):
        found = analysis(rng.randbytes(2 * rng.randrange(1, 40)))
        for addr in found.insns:
            room = copied_length(found, addr)
            assert room == _walked(found, addr)
            rooms.add(room.reason if isinstance(room, Rejection) else room)
    assert rooms == {8, 10, RejectReason.REGION_TOO_SHORT, RejectReason.NOT_BOOSTABLE}
