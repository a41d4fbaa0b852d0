"""References into a range of addresses: a search finds the same references as the index of all references."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.arch.analysis.xrefs import CodeXrefs, Reference, XrefIndex
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.arch.x86 import references
from emulated_kernel.image.builtin_image import load_image

TEXT = (0xFFFFFFFF81000000, 0xFFFFFFFF81FFFFFF)
MODULE = (0xFFFFFFFFC0200000, 0xFFFFFFFFC0207FFF)
NEAR = b"\xe8\xe9\x0f\x8d\x05\x84\x74\xeb\x00\x00\x00\xff\xff\xff\x81\xc0\x20\x01"
"""Bytes from which random code is made: those of branches, leas, and addresses in TEXT and MODULE."""
codes = st.lists(st.sampled_from(NEAR) | st.integers(0, 255), max_size=300).map(bytes)
windows = st.builds(
    lambda base, offset, size: range(base + offset, base + offset + size),
    st.sampled_from((TEXT[0], TEXT[0] + 0xFFFF, MODULE[0])),
    st.integers(-0x200, 0x400),
    st.integers(1, 0x4000),
)
SIGN = 0xFFFFFFFF << 32


@pytest.mark.parametrize(
    ("every", "into"),
    [
        (references.branches, references.branches_into),
        (references.rip_relative, references.rip_relative_into),
        (
            partial(references.immediates, SIGN, (TEXT, MODULE)),
            partial(references.immediates_into, SIGN),
        ),
    ],
    ids=["branches", "rip_relative", "immediates"],
)
@given(code=codes, window=windows, data=st.data())
def test_a_search_finds_what_the_pass_over_all_code_finds(
    every: partial[Iterable[Reference]],
    into: partial[Iterable[Reference]],
    code: bytes,
    window: range,
    data: st.DataObject,
) -> None:
    addr = data.draw(st.sampled_from((TEXT[0], MODULE[0], window.start - 300, window.stop)))
    # A four-byte field anywhere in the code that leads into the window.
    at = data.draw(st.integers(0, len(code)))
    target = data.draw(st.sampled_from(window))
    opcode = data.draw(st.sampled_from((b"\xe8", b"\x0f\x85", b"\x8d\x3d", b"\x48\x8d\x05", b"\x68")))
    field = target if opcode == b"\x68" else target - (addr + at + len(opcode) + 4)
    code = code[:at] + opcode + (field & 0xFFFFFFFF).to_bytes(4, "little") + code[at:]
    wanted = sorted(way for way in every(addr, code) if way[0] in window and _in_text(way[0]))
    found = sorted(way for way in into(window, addr, code) if _in_text(way[0]))
    assert found == wanted


def _in_text(address: int) -> bool:
    return any(start <= address < end for start, end in (TEXT, MODULE))


def test_addresses_of_modules_are_among_the_immediates() -> None:
    code = b"\x68" + (MODULE[0] + 0x1234 & 0xFFFFFFFF).to_bytes(4, "little")
    assert (MODULE[0] + 0x1234, 0x1001) in set(references.immediates(SIGN, (TEXT, MODULE), 0x1000, code))


RISCV = b"\x6f\xef\x63\xe3\x17\x97\x13\x67\x01\xa0\xe0\x00\xff\x80"
"""Bytes from which random code is made: those of branches, jal, and auipc with addi."""


@pytest.mark.parametrize("arch", ["riscv64", "riscv64i"])
@given(
    code=st.lists(st.sampled_from(RISCV) | st.integers(0, 255), max_size=200).map(bytes),
    window=windows,
    data=st.data(),
)
def test_a_search_of_riscv_code_finds_what_the_pass_over_all_code_finds(
    arch: str, code: bytes, window: range, data: st.DataObject
) -> None:
    checker = _checker(arch)
    addr = data.draw(st.sampled_from((TEXT[0], window.start - 0x1000, window.stop + 0xFF0)))
    target = data.draw(st.sampled_from(window))
    upper = (target - addr + 0x800) & 0xFFFFF000
    pair = (upper | 0x297, (target - addr & 0xFFF) << 20 | 0x28293)
    code = b"".join(word.to_bytes(4, "little") for word in pair) + code
    for possible in (checker.possible_branches, checker.possible_addresses):
        wanted = sorted(way for way in possible(addr, code, None) if way[0] in window)
        assert sorted(way for way in possible(addr, code, window) if way[0] in window) == wanted
    assert (target, addr) in set(checker.possible_addresses(addr, code, window))


@cache
def _checker(arch: str) -> ProbeChecker[Any]:
    return arch_named(arch).probe_checker(load_image(None, arch), None, ftrace=True)


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64", "riscv64i"])
def test_each_window_of_an_image_has_the_references_that_its_index_has(arch: str) -> None:
    image = load_image(None, arch)
    checker = _checker(arch)
    start, end = next(iter(image.text_ranges))
    regions = [range(at, at + 0x1001) for at in range(start, end, 0x1000)]
    searched, indexed = (
        CodeXrefs(image, checker.bits, checker.possible_branches, checker.possible_addresses, windows=windows)
        for windows in (len(regions), 0)
    )
    total = 0
    for region in regions:
        targets = searched.targets(region)
        assert targets == indexed.targets(region)
        total += len(targets)
        for find in (CodeXrefs.fixup, CodeXrefs.label, CodeXrefs.pointer, CodeXrefs.address):
            assert find(searched, region) == find(indexed, region)
    assert total > 100


def test_only_a_request_for_many_windows_indexes_all_references() -> None:
    windows: list[range | None] = []

    def search(window: range | None) -> Iterable[Reference]:
        windows.append(window)
        return [(target, target + 7) for target in range(0, 1 << 20, 0x800)]

    index = XrefIndex(search, windows=2)
    for target in (0x5000, 0x5000, 0x5800, 0x9000, 0x5000):
        assert index.pairs(range(target, target + 1)) == [(target, target + 7)]
    assert len(windows) == 2
    assert all(window is not None for window in windows)
    for target in (0xD000, 0x5000, 0xF0800, 0xD000):
        assert index.pairs(range(target - 1, target + 1)) == [(target, target + 7)]
    assert windows[2:] == [None]
