"""The kernel's symbol table is found at any place and in every layout, and not in other data."""

from __future__ import annotations

import io
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.image.linux.kallsyms_tables import find_symbols
from emulated_kernel.image.linux.vmlinux import Vmlinux
from tests.image.linux import made
from tests.image.linux.made import Addresses, Format
from tests.sample import fewer, share

Wanted = list[tuple[int, str, str]]
LAYOUTS = [(form, count) for form in made.FORMATS for count in (1, 255, 256, 257, 700)]
"""(layout, number of symbols). The numbers are near 256, the distance of two markers, or far from it."""


def symbols(count: int, form: Format, name: str = "vfs_func_{}") -> Wanted:
    """Return `count` symbols in ascending order. Each address has two symbols.

    If the layout can have absolute addresses, per-CPU symbols precede these symbols.
    """
    percpu = [(at, "A", f"percpu_{at}") for at in (0, 0x40, 0x3F000)]
    found = [] if form.addresses in (Addresses.RELATIVE, Addresses.OWN_ENTRY) else percpu
    return found + [
        (made.TEXT + 16 * (number // 2), "tTDb"[number % 4], name.format(number)) for number in range(count)
    ]


def found(wanted: Wanted, form: Format, in_front: bytes = b"", behind: bytes = bytes(64)) -> Wanted:
    in_front += bytes(-len(in_front) % 8)
    data = in_front + made.kallsyms(wanted, form, in_front=len(in_front)) + behind
    image = made.elf([(made.TEXT, bytes(0x1000)), (made.RODATA, data), (made.DATA, bytes(16))])
    return [(symbol.address, symbol.type, symbol.name) for symbol in find_symbols(Vmlinux(io.BytesIO(image)))]


@pytest.mark.parametrize(("form", "count"), share(LAYOUTS, 0, 2), ids=str)
def test_each_layout(form: Format, count: int) -> None:
    wanted = symbols(count, form)
    assert found(wanted, form) == wanted


NEW = made.FORMATS[-1]
"""Layout since Linux 7.0."""


@pytest.mark.parametrize("form", [Format(), NEW], ids=str)
@pytest.mark.parametrize("length", [1, 126, 127, 128, 300, 511])
def test_names_of_each_length(length: int, form: Format) -> None:
    wanted = symbols(300, form)
    wanted[100] = (wanted[100][0], "t", "Q" * length)
    assert found(wanted, form) == wanted


@pytest.mark.parametrize("form", [Format(), NEW], ids=str)
@pytest.mark.parametrize("count", [1, 255, 257, 600])
def test_other_data_around_it(form: Format, count: int) -> None:
    wanted = symbols(count, form)
    noise = random.Random(1).randbytes(50_000)
    decoy = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\x00" * 40
    assert found(wanted, form, noise + decoy, decoy + noise) == wanted


def test_names_that_the_markers_contradict_are_none() -> None:
    form = Format()
    wanted = symbols(600, form)
    tables = bytearray(made.kallsyms(wanted, form))
    names = tables.index(struct.pack("<II", len(wanted), 0)) + 8
    tables[names] += 1
    image = made.elf([(made.TEXT, bytes(16)), (made.RODATA, bytes(tables))])
    assert find_symbols(Vmlinux(io.BytesIO(image))) == []


@settings(max_examples=fewer(60, 3))
@given(st.data())
def test_damage_gives_no_wrong_number_of_names(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(made.FORMATS))
    wanted = symbols(300, form)
    tables = bytearray(made.kallsyms(wanted, form))
    for _ in range(data.draw(st.integers(1, 4))):
        tables[data.draw(st.integers(0, len(tables) - 1))] = data.draw(st.integers(0, 255))
    image = made.elf([(made.TEXT, bytes(0x1000)), (made.RODATA, bytes(tables))])
    assert len(find_symbols(Vmlinux(io.BytesIO(image)))) in (0, len(wanted))


def test_an_image_full_of_beginnings_ends_soon() -> None:
    """A search ends in an image with 200,000 beginnings of tables, which all promise 100 names and lack the
    last one.
    """
    form = Format()
    tables = made.kallsyms(symbols(300, form), form)
    start = tables.index(struct.pack("<II", 303, 0))
    tokens = tables[start:]
    decoys = struct.pack("<II", 100, 0) * 200_000
    image = made.elf([(made.TEXT, bytes(16)), (made.RODATA, decoys + tokens[:-8] + bytes(8))])
    assert find_symbols(Vmlinux(io.BytesIO(image))) == []
