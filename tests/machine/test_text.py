"""Patching of text, and the ledger of patched bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from tests.ledger import ledger_mismatches
from tests.machine import guests
from tests.machine.guests import CODE, DATA, LAYOUT, RODATA, TEXT, asm, boot
from tests.sample import fewer

PAGE = 4096


@pytest.mark.parametrize("sites", [1, 100], ids=["remove", "flush"])
def test_poked_code_runs_at_once(sites: int) -> None:
    machine = boot("again: mov eax, 1; hlt; jmp again")
    for value in (1, 2, 3, 4, 5):
        batch = [(CODE + 0x100 + i, b"\x90") for i in range(sites - 1)]
        machine.text.poke_batch([(CODE + 1, bytes([value])), *batch])
        machine.run()
        assert machine.regs.ax == value


def test_poke_over_a_page_border_is_seen_on_both_sides() -> None:
    machine = boot()
    border = TEXT + 2 * PAGE
    machine.text.poke(border - 2, asm("mov eax, 0x11111111; hlt"))
    machine.regs.ip = border - 2
    machine.run()
    assert machine.regs.ax == 0x11111111
    machine.text.poke(border - 1, b"\x22\x33\x44\x55")
    machine.regs.ip = border - 2
    machine.run()
    assert machine.regs.ax == 0x55443322
    machine.text.poke(border, b"\x99")
    machine.regs.ip = border - 2
    machine.run()
    assert machine.regs.ax == 0x55449922


@pytest.mark.parametrize("va", [RODATA, DATA, TEXT + 4 * PAGE - 1, LAYOUT.text_space + (1 << 20), 0])
def test_only_text_is_poked(va: int) -> None:
    machine = boot()
    with pytest.raises(MemoryFault):
        machine.text.poke(va, b"\xcc\xcc")
    assert machine.text.ledger == {}
    assert ledger_mismatches(machine.text) == []


def test_failed_batch_leaves_a_true_ledger() -> None:
    machine = boot("nop; hlt")
    with pytest.raises(MemoryFault):
        machine.text.poke_batch([(CODE, b"\xcc"), (DATA, b"\xcc"), (CODE + 1, b"\xcc")])
    assert machine.text.ledger == {CODE: 0x90}
    assert ledger_mismatches(machine.text) == []


def test_verify_finds_text_that_was_written_behind_its_back() -> None:
    machine = boot("nop; hlt")
    machine.text.poke(CODE, b"\xcc")
    pa = machine.memory.translate(CODE + 1)
    machine.memory.ram[pa] ^= 0xFF
    assert ledger_mismatches(machine.text) == [CODE + 1]
    machine.memory.ram[pa - 1] = 0x90
    assert ledger_mismatches(machine.text) == [CODE, CODE + 1]


SITES = st.integers(0, 40)
POKES = st.lists(
    st.one_of(
        st.tuples(SITES, st.binary(min_size=1, max_size=9)),
        st.tuples(SITES, st.integers(1, 9)),
    ),
    max_size=25,
)


@pytest.fixture(scope="module")
def patched():  # type: ignore[no-untyped-def]
    machine = boot("nop\n" * 64)
    guests.booted.remove(machine)
    yield machine
    machine.close()


@settings(max_examples=fewer(150, 5))
@given(steps=POKES)
def test_ledger_is_exactly_the_difference(patched, steps: list[tuple[int, bytes | int]]) -> None:  # type: ignore[no-untyped-def]
    """Text, ledger and original agree after each step. A step pokes bytes, or restores a number of bytes."""
    text = patched.text
    start = TEXT + PAGE - 20
    pristine = patched.image.segments[0][1][PAGE - 20 : PAGE + 60]
    model = bytearray(pristine)
    text.poke(start, pristine)
    for offset, what in steps:
        data = what if isinstance(what, bytes) else text.original(start + offset, what)
        model[offset : offset + len(data)] = data
        text.poke(start + offset, data)
        assert text.current(start, 80) == model
        assert text.original(start, 80) == pristine
        assert text.ledger == {start + i: pristine[i] for i in range(80) if model[i] != pristine[i]}
        pieces = [*text.ledger.pieces()]
        assert [(va + i, piece[i]) for va, piece in pieces for i in range(len(piece))] == [
            (address, text.ledger[address]) for address in sorted(text.ledger)
        ]
        assert ledger_mismatches(text) == []


BYTES = st.integers(0, 80)


@settings(max_examples=fewer(150, 5))
@given(
    size=st.integers(1, 9),
    pokes=st.lists(st.tuples(BYTES, st.binary(min_size=1, max_size=20))),
    places=st.lists(BYTES, max_size=50),
)
def test_restored_instructions_are_original_and_all_else_is_as_before(  # type: ignore[no-untyped-def]
    patched, size: int, pokes: list[tuple[int, bytes]], places: list[int]
) -> None:
    text = patched.text
    start = TEXT + PAGE - 40
    pristine = patched.image.segments[0][1][PAGE - 40 : PAGE + 60]
    text.restore_batch([start + at for at in range(100)], 1)
    assert text.ledger == {}
    text.poke_batch((start + at, data) for at, data in pokes)
    model = bytearray(text.current(start, 100))
    for at in places:
        model[at : at + size] = pristine[at : at + size]
    text.restore_batch([start + at for at in places], size)
    assert text.current(start, 100) == model
    assert text.ledger == {start + i: pristine[i] for i in range(100) if model[i] != pristine[i]}
    assert ledger_mismatches(text) == []
    text.restore_batch([start + at for at in range(100)], 1)


def test_restored_code_runs_at_once() -> None:
    for count in (1, 100):
        machine = boot("again: mov eax, 1; hlt; jmp again")
        machine.run()
        machine.text.poke(CODE + 1, b"\7")
        machine.run()
        assert machine.regs.ax == 7
        machine.text.restore_batch([CODE, *(CODE + 0x100 + 8 * at for at in range(count - 1))], 5)
        machine.run()
        assert machine.regs.ax == 1


def test_ledger_takes_an_entry_for_a_word_and_none_for_what_is_as_it_was(patched) -> None:  # type: ignore[no-untyped-def]
    text, start = patched.text, TEXT + PAGE - 20
    text.poke(start, text.original(start, 80))
    pristine = text.original(start, 32)
    text.poke(start, bytes(byte ^ 0xFF for byte in pristine))
    assert len(text.ledger.words) <= 5
    assert [*text.ledger] == [*range(start, start + 32)]
    text.poke(start, pristine)
    assert text.ledger.words == {}


def test_slots_are_int3_executable_and_without_ledger() -> None:
    machine = boot()
    text = machine.text
    one, two = text.alloc_text(20), text.alloc_text(70_000)
    assert one == LAYOUT.text_space
    assert two == one + 32
    assert text.current(two, 70_000) == b"\xcc" * 70_000
    text.poke(one, asm("mov eax, 9; hlt"))
    machine.regs.ip = one
    machine.run()
    assert machine.regs.ax == 9
    assert text.ledger == {}
    with pytest.raises(MemoryFault):
        machine.memory.write(one, b"x")
    text.free_text(one)
    assert text.current(one, 32) == b"\xcc" * 32
    with pytest.raises(HardwareError):
        text.free_text(one)


def test_freed_slots_are_reused_as_late_as_possible() -> None:
    text = boot().text
    first = text.alloc_text(64)
    text.free_text(first)
    assert text.alloc_text(64) != first


def test_text_that_comes_and_goes_takes_no_more_memory_than_a_mebibyte() -> None:
    machine = boot()
    text, used = machine.text, machine.memory.host_pages.used
    for _ in range(5_000):
        text.free_text(text.alloc_text(4096))
    # The limit is 1 MiB and a page table.
    assert machine.memory.host_pages.used - used <= (1 << 20) + 4096
    kept = [text.alloc_text(4096) for _ in range(1_000)]
    assert len(set(kept)) == 1_000


def test_module_text_is_adopted_and_disowned() -> None:
    machine = boot()
    text = machine.text
    va = text.alloc_text(64)
    code = asm("nop; ret", va).ljust(64, b"\xcc")
    text.poke(va, code)
    text.adopt(va, code)
    text.poke(va, b"\xcc")
    text.poke(CODE, b"\x90")
    assert text.ledger == {va: 0x90, CODE: 0xCC}
    assert text.original(va, 2) == code[:2]
    assert ledger_mismatches(text) == []
    text.disown(va)
    assert text.ledger == {CODE: 0xCC}
    with pytest.raises(KeyError):
        text.disown(va)
