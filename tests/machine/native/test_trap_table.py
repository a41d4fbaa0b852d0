"""The table of a trap's targets, and the handlers that fill it."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.interrupts.trap_handlers import (
    LinkedJump,
    LinkedRedirect,
    Redirect,
    TrapHandlers,
)
from emulated_kernel.machine.native.trap_words import FACTOR, LINKED, LinkWords, TrapTable, TrapWords
from tests.machine.native.host_cpu import NEEDS_ROUTINE

pytestmark = NEEDS_ROUTINE


def unexpected(_regs: Regs) -> None:
    raise AssertionError("Python got the trap")


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=600),
    st.sampled_from([1, 2, 16, 4096, pow(FACTOR, -1, 2**64)]),
)
def test_the_table_is_a_dict(changes: list[tuple[bool, int]], stride: int) -> None:
    """After any changes, a TrapTable has the entries of a dict. With the last stride, all addresses
    collide.
    """
    words = TrapWords()
    table = TrapTable(words.breakpoints)
    model: dict[int, int] = {}
    for number, (put, n) in enumerate(changes):
        address = n * stride % 2**64 or 1
        if put:
            table.put(address, number + 1)
            model[address] = number + 1
        elif address in model:
            table.drop(address)
            del model[address]
    assert dict(table.items()) == model
    assert all(found(words, address) == target for address, target in model.items())
    assert all(
        found(words, n * stride % 2**64) is None for n in range(1, 2001) if n * stride % 2**64 not in model
    )


def found(words: TrapWords, address: int) -> int | None:
    """Return the target that the routine's search finds for `address`, or None."""
    entries = ctypes.cast(words.breakpoints.entries, ctypes.POINTER(ctypes.c_uint64))
    index = (address * FACTOR & 2**64 - 1) >> words.breakpoints.shift
    while entries[2 * index]:
        if entries[2 * index] == address:
            return int(entries[2 * index + 1])
        index += 1
    return None


def test_native_entries_follow_the_handlers() -> None:
    handlers = TrapHandlers()
    handlers[8] = Redirect(80, unexpected)
    table = TrapTable(TrapWords().breakpoints)
    handlers.use(table)
    handlers[16] = Redirect(160, unexpected)
    assert dict(table.items()) == {8: 80, 16: 160}
    handlers[16] = unexpected
    assert dict(table.items()) == {8: 80}
    handlers.update({8: Redirect(81, unexpected), 24: Redirect(240, unexpected)})
    handlers.setdefault(32, Redirect(320, unexpected))
    handlers.setdefault(24, unexpected)
    assert dict(table.items()) == {8: 81, 24: 240, 32: 320}
    del handlers[8]
    assert handlers.pop(24, None) is not None
    assert dict(table.items()) == {32: 320}
    handlers.clear()
    assert (dict(table.items()), len(handlers)) == ({}, 0)


def test_a_linked_redirect_changes_the_registers_in_both_ways() -> None:
    regs = SimpleNamespace(x1=0x1003, x30=5, ip=0)
    regs.get, regs.set = partial(getattr, regs), partial(setattr, regs)
    cells = {name: ctypes.c_uint64(0) for name in ("x1", "x30")}
    handlers = TrapHandlers()
    table = TrapTable(TrapWords().breakpoints)
    handlers.use(table, lambda name: ctypes.addressof(cells[name]))
    handlers[8] = route = LinkedRedirect(LinkedJump("x1", -2, 2**64 - 2, "x30", 0x2000))
    [(address, entry)] = table.items()
    words = LinkWords.from_address(entry - LINKED)
    assert address == 8
    assert words.target_register == ctypes.addressof(cells["x1"])
    assert words.link_register == ctypes.addressof(cells["x30"])
    assert (words.added, words.kept_bits, words.link) == (2**64 - 2, 2**64 - 2, 0x2000)
    route(regs)
    assert (regs.x1, regs.x30, regs.ip) == (0x1003, 0x2000, 0x1000)
    del handlers[8]
    assert len(table) == 0


def test_an_instruction_pointer_of_zero() -> None:
    """A breakpoint at address 0 stays with Python, since 0 marks an empty entry."""
    handlers = TrapHandlers()
    table = TrapTable(TrapWords().breakpoints)
    handlers.use(table)
    handlers[0] = Redirect(8, unexpected)
    assert dict(table.items()) == {}
