"""Generated code at restricted addresses: single pages, mapped while they are in use."""

from __future__ import annotations

from contextlib import suppress

import pytest

from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE
from tests.machine.guests import boot

SPACE = 0xFFFFFFFF20000000


def test_the_lowest_free_address_in_the_range() -> None:
    text = boot().text
    first, second = (text.alloc_text(100, range(SPACE, SPACE + 256)) for _ in range(2))
    assert (first, second) == (SPACE, SPACE + 100)
    assert text.alloc_text(10, range(SPACE + 50, SPACE + 256)) == SPACE + 200
    assert text.alloc_text(1000, range(SPACE + 255, SPACE + 256)) == SPACE + 255
    with pytest.raises(HardwareError):
        text.alloc_text(60, range(SPACE, SPACE + 256))
    text.free_text(second)
    assert text.alloc_text(90, range(SPACE, SPACE + 256)) == second


def test_code_runs_there_until_it_is_freed() -> None:
    machine = boot()
    border = SPACE + PAGE_SIZE - 2
    at = machine.text.alloc_text(6, range(border, border + 1))
    assert machine.text.current(at, 6) == b"\xcc" * 6
    machine.text.poke(at, b"\xb8\x11\x00\x00\x00\xf4")  # mov eax, 0x11; hlt
    machine.regs.ip = at
    machine.run()
    assert machine.regs.ax == 0x11
    assert machine.text.is_generated(at + 5)
    assert [*machine.text.generated][1:] == [
        range(SPACE, SPACE + PAGE_SIZE),
        range(SPACE + PAGE_SIZE, SPACE + 2 * PAGE_SIZE),
    ]
    used = machine.memory.host_pages.used
    machine.text.free_text(at)
    assert machine.memory.host_pages.used == used - 2 * PAGE_SIZE
    assert not machine.text.is_generated(at)
    with pytest.raises(MemoryFault):
        machine.memory.read(at, 1)
    again = machine.text.alloc_text(6, range(at, at + 1))
    machine.text.poke(again, b"\xb8\x22\x00\x00\x00\xf4")
    machine.regs.ip = again
    machine.run()
    assert machine.regs.ax == 0x22


def test_only_unused_address_space_is_taken() -> None:
    machine = boot()
    used = machine.memory.host_pages.used
    for outside in (0, 0xFFFFFFFF60000000, machine.model.layout.text_space):
        with pytest.raises(HardwareError):
            machine.text.alloc_text(16, range(outside, outside + 256))
    with pytest.raises(HardwareError):
        machine.text.free_text(SPACE)
    assert machine.memory.host_pages.used == used


def test_it_leaves_most_pages_of_the_host_to_others() -> None:
    text = boot().text
    allocated = 0
    with suppress(HardwareError):
        for page in range(SPACE, SPACE + (1 << 28), PAGE_SIZE):
            text.alloc_text(1, range(page, page + 1))
            allocated += 1
    assert 0 < allocated < 1 << 16
    text.free_text(SPACE)
    text.alloc_text(1, range(page, page + 1))
    text.alloc_text(PAGE_SIZE)
