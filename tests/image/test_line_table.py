"""Abbreviation tables of DWARF: a single declaration is the one that pyelftools finds by reading the whole
table.
"""

from __future__ import annotations

import io

import pytest
from elftools.dwarf.abbrevtable import AbbrevTable
from elftools.dwarf.structs import DWARFStructs
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.image.line_table import Declarations

IMPLICIT_CONST = 0x21
STRUCTS = DWARFStructs(little_endian=True, dwarf_format=32, address_size=8, dwarf_version=5)


def leb128(value: int, *, signed: bool = False) -> bytes:
    found = bytearray()
    while True:
        byte = value & 0x7F
        value >>= 7
        if value == (-1 if signed and byte & 0x40 else 0) and not (signed and not value and byte & 0x40):
            return bytes(found) + bytes([byte])
        found.append(byte | 0x80)


ATTRIBUTES = st.lists(
    st.tuples(
        st.sampled_from((0x03, 0x10, 0x1B, 0x2134)),
        st.sampled_from((0x08, 0x0B, 0x17, IMPLICIT_CONST)),
        st.integers(-(1 << 40), 1 << 40) | st.just(0),
    ),
    max_size=4,
)


@given(
    st.dictionaries(st.integers(1, 1 << 16), st.tuples(st.sampled_from((0x11, 0x2E, 0x4109)), ATTRIBUTES)),
    st.binary(max_size=3),
)
def test_declarations_are_those_of_pyelftools(
    declared: dict[int, tuple[int, list[tuple[int, int, int]]]], before: bytes
) -> None:
    table = bytearray(before)
    for code, (tag, attributes) in declared.items():
        table += leb128(code) + leb128(tag) + bytes([code & 1])
        for name, form, value in attributes:
            table += leb128(name) + leb128(form)
            if form == IMPLICIT_CONST:
                table += leb128(value, signed=True)
        table += bytes(2)
    table += bytes(1)
    whole = AbbrevTable(STRUCTS, io.BytesIO(table), len(before))
    found = Declarations(bytes(table), len(before), STRUCTS)
    for code in declared:
        one = found.get_abbrev(code)
        assert one.decl == whole.get_abbrev(code).decl
        assert one.has_children() == whole.get_abbrev(code).has_children()
    with pytest.raises(KeyError):
        found.get_abbrev(1 << 20)
