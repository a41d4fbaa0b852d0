"""EntryTable and AddressSet: tables of addresses in arrays, which behave like tuples with the same
entries.
"""

from __future__ import annotations

from array import array
from itertools import chain

import pytest

from emulated_kernel.image.address_set import AddressSet, EntryTable, firsts_in_order, in_order
from emulated_kernel.image.text_tables import ExTableEntry, JumpLabel

LABELS = (JumpLabel(1, 20, 300), JumpLabel(4, 50, 600), JumpLabel((1 << 64) - 1, 0, 9))


def words(*numbers: int) -> memoryview:
    return memoryview(array("Q", numbers).tobytes())


def test_a_table_has_the_entries_that_were_kept() -> None:
    table = EntryTable(words(*chain.from_iterable(LABELS)), 3, JumpLabel)
    assert tuple(table) == tuple(table) == LABELS
    assert len(table) == 3
    assert [table[at] for at in (0, 2, -1)] == [LABELS[at] for at in (0, 2, -1)]
    assert table[1:] == LABELS[1:]
    assert LABELS[1] in table
    with pytest.raises(IndexError):
        table[3]
    assert not EntryTable(memoryview(b""), 3, JumpLabel)


def test_only_an_access_makes_entries() -> None:
    made = list[tuple[int, ...]]()

    def entry(*numbers: int) -> ExTableEntry:
        made.append(numbers)
        return ExTableEntry(*numbers)

    table = EntryTable(words(1, 2, 3, 4), 2, entry)
    assert [*firsts_in_order(table)] == [1, 3]
    assert made == []
    assert table[1] == (3, 4)
    assert made == [(3, 4)]


def test_addresses_in_order() -> None:
    assert [*in_order(AddressSet((3, 1, 2)))] == in_order({3: "c", 1: "a", 2: "b"}) == [1, 2, 3]
    assert firsts_in_order([ExTableEntry(5, 1), ExTableEntry(2, 7)]) == [2, 5]


@pytest.mark.parametrize("size", [1, 8, 16, 23])
def test_incomplete_entries_are_refused(size: int) -> None:
    with pytest.raises((TypeError, ValueError)):
        EntryTable(memoryview(bytes(size)), 3, JumpLabel)
