"""The probe checker returns the same reasons for a whole function as for each of its instructions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.arch.analysis.function import Function, PatchSite
from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.image.kallsyms import Symbol
from tests.arch.sample import Sample
from tests.oracle.recorded import oracle_directory, recording, versions
from tests.sample import fewer, share

TEXT = 0xFFFF_FFFF_8100_0000
NAMES = {
    "__entry_text_start": TEXT + 0x7000,
    "__entry_text_end": TEXT + 0x7100,
    "__indirect_thunk_start": TEXT + 0x1080,
    "__indirect_thunk_end": TEXT + 0x10C0,
}
PIECES = tuple(
    bytes.fromhex(piece)
    for piece in [
        "0f1f440000",
        "4889e5",
        "31c0",
        "c3",
        "cc",
        "90",
        "7404",
        "7402",
        "e902000000",
        "eb01",
        "ffe0",
        "ffd0",
        "e800000000",
        "488d0500000000",
        "0f0b",
        "0f8402000000",
        "8ed0",
        "17",
        "f4",
        "cf",
        "0f01c1",
        "660f1f440000",
        "488b4708",
        "f3a4",
        "64488b042500000000",
        "c4e2f1f7c0",
        "c5f9efc0",
        "0f0b78656e0fa2",
        "26eb00",
        "f30fb8c0",
        "0fc7f0",
        "480f0ba2",
        "0f38f0c0",
        "66900f05",
        "6a01",
        "c8010001",
        "00",
        "0000",
        "cccc",
    ]
)


def verdict(sample: Sample, arch: str) -> ProbeChecker[Any]:
    hooks = arch_named(arch)
    return hooks.probe_checker(sample, hooks.strategies["optprobe-linux"], ftrace=True)


def one_by_one(asked: ProbeChecker[Any], symbol: Symbol) -> list[tuple[int, RejectReason | None]]:
    found = []
    for addr, refused, outcome in asked.check_each_insn(symbol):
        finding = refused or outcome
        found.append((addr, finding.reason if isinstance(finding, Rejection) else None))
    return found


@settings(max_examples=fewer(400, 4))
@given(st.data(), st.sampled_from(("x86_64", "i386")))
def test_the_same_for_any_code_and_tables(data: st.DataObject, arch: str) -> None:
    pieces = st.lists(st.sampled_from(PIECES) | st.binary(min_size=1, max_size=6), min_size=1, max_size=24)
    code = b"".join(data.draw(pieces)) + data.draw(st.sampled_from((b"", b"\xc3", b"\xc3\xcc\xcc", bytes(7))))
    start = data.draw(st.sampled_from((TEXT + 0x1000, TEXT + 0x6FF8, TEXT + 0x7020)))
    some = st.frozensets(st.integers(start, start + len(code) - 1), max_size=2)
    labels, calls = data.draw(some), data.draw(some)
    function = Function(
        name="foo",
        addr=start,
        size=len(code),
        code=code,
        fentry_sites=data.draw(st.sampled_from(((), (PatchSite(start, 5),)))),
        exception_entries=data.draw(some),
        bug_entries=data.draw(some),
        jump_labels=tuple(PatchSite(addr, 5) for addr in labels),
        static_calls=tuple(PatchSite(addr, 5) for addr in calls),
    )
    forbidden = data.draw(st.sampled_from((frozenset[str](), frozenset({"foo"}))))
    text = range(TEXT, TEXT + 0x9000)
    sample = Sample((function,), text, TEXT + 0x20_0000, NAMES, blacklisted=forbidden)
    asked = verdict(sample, arch)
    (symbol,) = (each for each in sample.kallsyms.symbols if each.name == "foo")
    assert list(asked.reasons(symbol).items()) == one_by_one(asked, symbol)


VERSIONS = versions(oracle_directory())


@pytest.mark.slow
@pytest.mark.skipif(not VERSIONS, reason="no recorded functions")
@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_for_a_real_kernel_s_functions(version: str) -> None:
    sample = recording(oracle_directory(), version).sample
    asked = verdict(sample, "x86_64")
    names = {function.name for function in sample.functions if "." not in function.name}
    for symbol in share(sample.kallsyms.symbols, VERSIONS.index(version), 6):
        if symbol.name in names:
            assert list(asked.reasons(symbol).items()) == one_by_one(asked, symbol), symbol.name
