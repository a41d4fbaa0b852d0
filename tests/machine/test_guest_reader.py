"""GuestReader: lists, tables and strings whose pointers and counts may be wrong."""

from __future__ import annotations

import logging

import pytest

from emulated_kernel.machine.memory.guest_reader import DamageReports, GuestReader
from emulated_kernel.machine.traps.trap import MemoryFault

HEAD = 0x100
NODES = (0x200, 0x300, 0x400)


class Memory:
    """A page with a list of three nodes."""

    word_size = 8

    def __init__(self) -> None:
        self.data = bytearray(0x1000)
        for node, following in zip((HEAD, *NODES), (*NODES, HEAD), strict=True):
            self.put(node, following)

    def put(self, va: int, value: int) -> None:
        self.data[va : va + 8] = value.to_bytes(8, "little")

    def read(self, va: int, size: int) -> bytes:
        if not 0 <= va <= len(self.data) - size:
            raise MemoryFault(va)
        return bytes(self.data[va : va + size])


def reader(memory: Memory, damage: DamageReports | None = None, **bounds: int) -> GuestReader:
    return GuestReader(memory, "list", damage or DamageReports(), **bounds)


def test_a_list() -> None:
    assert tuple(reader(Memory()).nodes(HEAD)) == NODES


@pytest.mark.parametrize("wrong", [NODES[1], NODES[0], NODES[2] + 3, 1 << 20, (1 << 64) - 1, 0])
def test_what_is_before_the_damage_is_listed(wrong: int) -> None:
    """Nodes before a wrong pointer are listed. The pointer makes a circle, is misaligned, unmapped
    or NULL.
    """
    memory = Memory()
    memory.put(NODES[1], wrong)
    found: list[int] = []
    with pytest.raises(MemoryFault):
        found.extend(reader(memory).nodes(HEAD))
    assert tuple(found[:2]) == NODES[:2]
    assert len(found) <= 3


def test_damaged_nodes_are_left_out_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    told: list[str] = []
    damage = DamageReports()
    damage.tell = told.append

    def read(node: int) -> int:
        if node == NODES[1]:
            raise MemoryFault(node)
        return node

    for _ in range(2):
        made = reader(memory, damage)
        assert tuple(made.each(made.nodes(HEAD), read)) == (NODES[0], NODES[2])
    assert len(told) == len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING


def test_bounds() -> None:
    """The limits of a GuestReader hold for all its reads together, and are checked before memory is read."""
    memory = Memory()
    for count in (1 << 64, 1 << 40, 5, -1):
        with pytest.raises(MemoryFault):
            reader(memory, steps=4).table(0, count, 1)
    small = reader(memory, size=16)
    assert small.word(HEAD) == NODES[0]
    assert small.read(0, 8) == bytes(8)
    with pytest.raises(MemoryFault):
        small.read(0, 1)
    with pytest.raises(MemoryFault):
        list(reader(memory, steps=2).nodes(HEAD))
    with pytest.raises(MemoryFault):
        list(reader(memory).nodes(HEAD, limit=2))


def test_strings() -> None:
    memory = Memory()
    memory.data[0xFF8:] = b"abc\0defg"
    made = reader(memory, size=24)
    assert [made.cstring(0xFF8, 8) for _ in range(5)] == [b"abc"] * 5
    assert reader(memory).cstring(0xFFC, 4) == b"defg"
    with pytest.raises(MemoryFault):
        reader(memory).cstring(0xFFC, 8)
