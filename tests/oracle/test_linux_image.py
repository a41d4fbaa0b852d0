"""A kernel as read from Debian's package, compared with the recording of a booted kernel of nearly the same
version.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.arch.x86.insn import decode_all
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.text_tables import ProbedTables
from kprobefs.measure.coverage_subject import Subject, linux_image, recorded_functions
from tests.image.linux.debian import package
from tests.oracle.recorded import oracle_directory

RECORDED = oracle_directory() / "functions-6.1.json.gz"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RECORDED.exists(), reason=f"no recorded functions in {RECORDED.parent}"),
]


@dataclass(frozen=True)
class Kernels:
    """The recorded kernel, the kernel of the package, and pairs of functions that are compiled alike in
    both.
    """

    recorded: Subject
    ours: Subject
    pairs: list[tuple[Symbol, Symbol]]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    plain, *_, as_linked = linux_image(str(package("linux-image-cloud-amd64")))
    if "6.1." not in plain.title:
        pytest.skip(f"{plain.title} isn't of the recorded version")
    recorded = recorded_functions(RECORDED)
    raw: dict[str, Any] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    names = Counter(symbol.name for symbol in as_linked.symbols)
    by_name = {symbol.name: symbol for symbol in as_linked.symbols if names[symbol.name] == 1}
    pairs = []
    for theirs in recorded.symbols:
        ours, entry = by_name.get(theirs.name), raw[theirs.name]
        on_disk = bytes.fromhex(entry.get("disk_hex", entry["bytes_hex"]))
        if ours and ours.size == theirs.size and lengths(on_disk) == lengths(code(as_linked, ours)):
            pairs.append((theirs, ours))
    return Kernels(recorded, plain, pairs)


def code(subject: Subject, symbol: Symbol) -> bytes:
    return subject.tables.read(symbol.address, symbol.size)


def lengths(code: bytes) -> list[tuple[int, int]]:
    return [(addr, length) for addr, length, _ in decode_all(code, 0)]


def test_tables_agree_for_all_functions_that_are_compiled_alike(kernels: Kernels) -> None:
    recorded, ours = Places(kernels.recorded.tables), Places(kernels.ours.tables)
    assert len(kernels.pairs) > 1000
    for theirs, linked in kernels.pairs:
        assert recorded.inside(theirs) == ours.inside(linked), theirs.name


def test_verdicts_agree_wherever_boot_patched_nothing_else(kernels: Kernels) -> None:
    recorded, ours = verdict(kernels.recorded.tables), verdict(kernels.ours.tables)
    compared = 0
    for theirs, linked in kernels.pairs:
        if opcodes(kernels.recorded, theirs) == opcodes(kernels.ours, linked):
            expected = judged(recorded, theirs)
            assert judged(ours, linked) == expected, theirs.name
            compared += len(expected)
    assert compared > 100_000


def opcodes(subject: Subject, symbol: Symbol) -> list[tuple[int, bytes]]:
    """Return the length and the first byte of each instruction of the function `symbol`.

    At an fentry site that ftrace has not patched yet, return the length and first byte of the nop.
    """
    text, site = code(subject, symbol), symbol.address in subject.tables.mcount
    whole = bytes.fromhex("0f1f440000") + text[5:] if site else text
    return [(length, whole[at : at + 1]) for at, length in lengths(whole)]


def verdict(tables: ProbedTables) -> ProbeChecker[Any]:
    arch = X86_64()
    return arch.probe_checker(tables, arch.strategies["optprobe-linux"], ftrace=True)


def judged(asked: ProbeChecker[Any], symbol: Symbol) -> list[tuple[int, RejectReason | None]]:
    """Return the offset of each instruction of `symbol` and the reason that rejects it, without padding."""
    found = []
    for addr, refused, outcome in asked.check_each_insn(symbol):
        finding = refused or outcome
        found.append((addr - symbol.address, finding.reason if isinstance(finding, Rejection) else None))
    return found


class Places:
    """Addresses that a kernel's tables name, sorted by the kind of table."""

    def __init__(self, tables: ProbedTables) -> None:
        self._places = {
            "fentry": sorted(tables.mcount),
            "exceptions": sorted(insn for insn, _ in tables.ex_table),
            "bugs": sorted(tables.bugs),
            "labels": sorted(label for label, *_ in tables.jump_labels),
            "calls": sorted(site for site, *_ in tables.static_calls),
            "blacklist": sorted({start for start, *_ in tables.blacklist}),
        }

    def inside(self, symbol: Symbol) -> dict[str, list[int]]:
        """Return kind of table -> offsets into a function that the table names."""
        start, end = symbol.address, symbol.address + symbol.size
        return {
            kind: [at - start for at in places[bisect_left(places, start) : bisect_left(places, end)]]
            for kind, places in self._places.items()
        }
