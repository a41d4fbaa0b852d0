"""Rules of later Linux versions about the places of probes and of jumps on x86."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from emulated_kernel.arch.analysis.probe_rules import PROBE_RULES, ProbeRules
from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.arch.x86.insn_attributes import DecodeCache, InsnAttributes
from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile

OLD = PROBE_RULES["linux-6.1"]
NEW = PROBE_RULES["linux-6.12"]
PREBUILT = Path(load_image().path).parents[1]


def facts(code: str, rules: ProbeRules) -> InsnAttributes:
    (first, *_) = DecodeCache(64, rules).all(bytes.fromhex(code), 0x1000, 2).values()
    return first


@pytest.mark.parametrize("code", ["cc", "cd80", "f1", "0f0b", "0fb9c0", "0fffc0"])
def test_instructions_that_raise_exceptions_are_refused_with_eilseq(code: str) -> None:
    refusal = facts(code, NEW).refusal
    assert refusal is RejectReason.EXCEPTION_INSN
    assert refusal.errno == RejectReason.NOT_A_BOUNDARY.errno
    assert facts(code, OLD).refusal is not RejectReason.EXCEPTION_INSN


@pytest.mark.parametrize("code", ["90", "0f05", "0fa2", "c3", "e800000000"])
def test_other_instructions_are_not(code: str) -> None:
    assert facts(code, NEW).refusal is facts(code, OLD).refusal


@pytest.mark.parametrize(
    ("code", "old", "new"),
    [
        ("c1e003", False, True),
        ("c1f003", False, False),
        ("48d3e8", False, True),
        ("f7d8", False, True),
        ("f7c801000000", False, False),
        ("f7c001000000", False, True),
        ("48f7f9", False, True),
        ("fec0", False, True),
        ("fed0", False, False),
        ("ffc0", False, True),
        ("ffe0", True, True),
        ("ffd0", False, False),
        ("ff30", False, False),
        ("90", True, True),
        ("7400", False, False),
    ],
)
def test_boosted(code: str, old: bool, new: bool) -> None:
    """The same rule decides whether an instruction is boosted and whether it can be copied into a detour.

    Later versions allow more instructions.
    """
    arch = X86_64()
    padded = bytes.fromhex(code).ljust(16, b"\0")
    for rules, expected in ((OLD, old), (NEW, new)):
        assert (facts(code, rules).rejection is None) is expected
        assert arch.prepare(padded, 0x1000, 0x2000, rules=rules).boostable is expected


def hazards(image: str, rules: ProbeRules) -> Counter[RejectReason | None]:
    """Return reason -> number of instructions of an image that cannot become jumps for this reason."""
    arch = X86_64()
    kernel = load_image(PREBUILT / image / "vmlinux")
    checker = arch.probe_checker(kernel, arch.strategies["optprobe-linux"], ftrace=True, rules=rules)
    found: Counter[RejectReason | None] = Counter()
    text, *_ = kernel.text_ranges
    for symbol in kernel.kallsyms.symbols:
        if symbol.is_text and text.start <= symbol.address and symbol.address + symbol.size <= text.end:
            found.update(checker.reasons(symbol).values())
    return found


def test_indirect_jumps_are_no_hazard_where_the_build_has_no_jump_tables() -> None:
    """With later rules, a function's indirect jumps do not prevent optimization in builds with retpolines or
    landing pads.

    In the default image, which has jump tables, indirect jumps still prevent optimization.
    """
    for image in ("x86_64-retpoline", "x86_64-ibt"):
        old = hazards(image, OLD)
        new = hazards(image, NEW)
        assert old[RejectReason.THUNK_JUMP] + old[RejectReason.INDIRECT_JUMP] > 100
        assert new[RejectReason.THUNK_JUMP] + new[RejectReason.INDIRECT_JUMP] == 0
        assert new[None] > old[None]
    assert hazards("x86_64", NEW)[RejectReason.INDIRECT_JUMP] > 100


@pytest.mark.parametrize("preemption", [False, True])
def test_functions_return_the_same_with_probes_on_all_their_instructions(preemption: bool) -> None:
    """Functions return the same results with a probe on each instruction in turn, also if shifts and
    divisions are boosted or detoured.
    """
    outcomes = []
    for rules in ("linux-6.1", "linux-6.12"):
        with Kernel(profile=Profile("made", preemption, probe_rules=rules)) as kernel:
            calls = [("gcd", 84, 36), ("lcm", 12, 18), ("int_sqrt", 1000)]
            plain = [kernel.call(*call) for call in calls]
            modes: Counter[str] = Counter()
            for name in ("gcd", "lcm", "int_sqrt"):
                start = kernel.kallsyms_lookup_name(name)
                where = kernel.image.kallsyms.lookup(start)
                assert where is not None
                for addr in kernel.kprobes.probe_checker.boundaries(where.symbol):
                    if kernel.kprobes.probe_checker.may_probe(addr) is not None:
                        continue
                    kprobe = Kprobe(addr=addr, pre_handler=lambda _kprobe, _regs: None)
                    kernel.register_kprobe(kprobe)
                    kernel.wait_for_kprobe_optimizer()
                    assert [kernel.call(*call) for call in calls] == plain
                    modes[kernel.probe_mode(kprobe)] += 1
                    kernel.unregister_kprobe(kprobe)
            outcomes.append(modes)
    old, new = outcomes
    assert new["optimized"] > old["optimized"] > 0
    assert sum(new.values()) == sum(old.values())
