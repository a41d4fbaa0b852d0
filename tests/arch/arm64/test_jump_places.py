"""Places at which a jump may replace an arm64 instruction, in small hand-made kernels."""

from __future__ import annotations

import struct

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.function import Function, PatchSite
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.arm64.probe_checks import Arm64ProbeChecker
from tests.arch.arm64.moved import ARCH
from tests.arch.sample import Sample

START = 0xFFFF_8000_8001_0000
NOP, BTI_C, PACIASP, LDR, BLR, RET = (
    0xD503201F,
    0xD503245F,
    0xD503233F,
    0xF9400020,
    0xD63F0020,
    0xD65F03C0,
)
BODY = (PACIASP, BTI_C, LDR, BLR, LDR, NOP, RET)
"""The instructions after the fentry site. The second load has a fixup, and the nop is a jump label."""


def checker(*entry: int, strategy: str = "optprobe-arm64") -> Arm64ProbeChecker:
    """Return the probe checker of a kernel with one function: `entry`, an fentry site and BODY.

    `strategy`: name of the optimization policy.
    """
    words = (*entry, NOP, *BODY)
    code = struct.pack(f"<{len(words)}I", *words)
    site = START + 4 * len(entry)
    function = Function(
        "function",
        START,
        len(code),
        code,
        fentry_sites=(PatchSite(site, 4),),
        exception_entries=frozenset((site + 20,)),
        jump_labels=(PatchSite(site + 24, 4),),
    )
    text = range(START, START + len(code))
    tables = Sample([function], text, text.stop, {})
    return ARCH.probe_checker(tables, ARCH.strategy([strategy]), ftrace=True)


def outcomes(found: Arm64ProbeChecker) -> list[RejectReason | None]:
    """Return the reasons against jumps in the function.

    Check that the region of a jump is a single instruction.
    """
    (symbol,) = (symbol for symbol in found._symbols.symbols if symbol.name == "function")
    reasons = dict(found.reasons(symbol))
    for addr, refused, outcome in found.check_each_insn(symbol):
        finding = refused or outcome
        assert reasons[addr] == (finding.reason if isinstance(finding, Rejection) else None)
        if refused is None and isinstance(outcome, Region):
            assert (outcome.addr, outcome.end, outcome.scratch, outcome.tactics) == (addr, addr + 4, None, ())
    return [*reasons.values()]


LAST = [None, RejectReason.NOT_COPYABLE_TO_DETOUR, RejectReason.HAS_FIXUP, RejectReason.JUMP_LABEL, None]
"""For each instruction of BODY from the first load on, the reason against a jump, or None."""


@pytest.mark.parametrize("strategy", ["optprobe-arm64", "extended"])
def test_landing_pads_are_kept(strategy: str) -> None:
    """In a kernel with landing pads, no jump replaces a landing pad.

    In a kernel without landing pads, the same instructions can be replaced.
    """
    pad = RejectReason.LANDING_PAD
    site = RejectReason.AT_FENTRY
    assert outcomes(checker(BTI_C, NOP, strategy=strategy)) == [pad, None, site, pad, pad, *LAST]
    assert outcomes(checker(NOP, strategy=strategy)) == [None, site, None, None, *LAST]


def test_without_fentry_sites_each_landing_pad_is_kept() -> None:
    code = struct.pack("<2I", PACIASP, RET)
    text = range(START, START + len(code))
    tables = Sample([Function("function", START, len(code), code)], text, text.stop, {})
    found = ARCH.probe_checker(tables, ARCH.strategy(["optprobe-arm64"]), ftrace=True)
    assert outcomes(found) == [RejectReason.LANDING_PAD, None]


def test_text_of_a_rejection() -> None:
    found = checker(BTI_C, NOP)
    refused = found.optimized_region(START)
    assert isinstance(refused, Rejection)
    assert refused.text.startswith("function+0x0: ") or refused.text.startswith("function: ")
    assert refused.text.endswith(": bti c")
    assert refused.errno == 0
