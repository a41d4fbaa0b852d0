"""Routines that are called at a guest's instructions: rdtsc, changes of SUM, copies, and quanta."""

from __future__ import annotations

import ctypes
import struct

from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.guests.linux.pc.devices import Pc
from emulated_kernel.machine.native.copy_words import LONGEST_COPY, CopyRange, CopyWords
from emulated_kernel.machine.native.quantum_words import QuantumWords
from emulated_kernel.machine.native.sum_words import ENTRY_SIZE, SUM, VICTIMS, SumWords
from tests.machine.native.host_cpu import (
    CALLBACK,
    DATA_AT,
    FLAGS_AT,
    NEEDS_ROUTINE,
    RETURNED,
    TABLES_AT,
    TF,
    WORDS_AT,
    HostCpu,
)

pytestmark = NEEDS_ROUTINE


@given(tsc=st.integers(0, 2**64 - 1), steps=st.integers(0, 2**64 - 1), followed=st.booleans())
def test_rdtsc_advances_the_time_as_python_does(host: HostCpu, tsc: int, steps: int, followed: bool) -> None:
    uc = host.uc
    pc = Pc(steps)
    pc.words.tsc, pc.words.followed, pc.words.read_in_python = tsc, followed, CALLBACK
    pc.words.low, pc.words.high = DATA_AT, DATA_AT + 8
    before = bytes(pc.words)
    uc.mem_write(DATA_AT, bytes(range(16)))
    uc.mem_write(WORDS_AT, before)
    given_ = (7, WORDS_AT)
    host.run("rdtsc", given_)
    words, result = (bytes(uc.mem_read(at, size)) for at, size in ((WORDS_AT, len(before)), (DATA_AT, 16)))
    if followed:
        assert uc.reg_read(host.pc) == CALLBACK
        assert tuple(uc.reg_read(register) for register in host.arguments[:2]) == given_
        assert host.leaves
        assert (words, result) == (before, bytes(range(16)))
        return
    assert uc.reg_read(host.pc) == RETURNED
    assert uc.reg_read(host.result) & 0xFFFFFFFF == 1
    now = pc.read_tsc()
    assert words == bytes(pc.words)
    assert result == b"".join((half & 0xFFFFFFFF).to_bytes(8, "little") for half in (now, now >> 32))


SUM_AT, TLB_AT, VICTIMS_AT, NONE = WORDS_AT + 0x200, TABLES_AT, TABLES_AT + 0x8000, 2**64 - 1
PAGE_ADDRESSES = st.sampled_from([NONE, NONE, 0xFFFFFFFF80000000, 0xFFFFFFD600000400, 0, 0x600000, 0x600400])
ENTRIES = st.tuples(*[PAGE_ADDRESSES] * 3)


@given(
    routine=st.sampled_from(["set_sum", "clear_sum", "clear_sum"]),
    table=st.lists(ENTRIES, min_size=1, max_size=40),
    victims=st.lists(ENTRIES, min_size=VICTIMS, max_size=VICTIMS),
    patched=st.sampled_from([False] * 4 + [True]),
    operand=st.sampled_from([SUM, SUM | 2, 2, 0]),
    mstatus=st.sampled_from([0x8000000A00000000, 0x8000000A00000000 | SUM]),
)
def test_sum_is_changed_and_user_pages_are_dropped(
    host: HostCpu,
    routine: str,
    table: list[tuple[int, int, int]],
    victims: list[tuple[int, int, int]],
    patched: bool,
    operand: int,
    mstatus: int,
) -> None:
    uc = host.uc

    def packed(entries: list[tuple[int, int, int]]) -> bytes:
        return b"".join(struct.pack("<8Q", *entry, 1, 2, 3, 4, 5) for entry in entries)

    words = SumWords(
        site=DATA_AT + 2,
        insn=0x100FA073,
        operand=DATA_AT + 8,
        mstatus=DATA_AT + 16,
        tlb=DATA_AT + 24,
        victims=VICTIMS_AT,
        used=DATA_AT + 40,
        spared=41,
    )
    insn = 0x9002FA73 if patched else 0x100FA073
    last = ENTRY_SIZE * (len(table) - 1)
    uc.mem_write(DATA_AT, struct.pack("<HIH5Q", 7, insn, 8, operand, mstatus, last, TLB_AT, 1000))
    uc.mem_write(TLB_AT, packed(table) + packed([(1, 1, 1)]))
    uc.mem_write(VICTIMS_AT, packed(victims) + packed([(1, 1, 1)]))
    uc.mem_write(SUM_AT, bytes(words))
    host.run(routine, (7, 8, 4, SUM_AT))
    assert uc.reg_read(host.pc) == RETURNED
    clears = routine == "clear_sum"
    used = 1000
    if not patched and operand & SUM and bool(mstatus & SUM) == clears:
        words.spared = 42
        mstatus ^= SUM
        if clears:
            used -= sum(min(entry) < 2**63 for entry in table)
            table, victims = (
                [(NONE, NONE, NONE) if min(entry) < 2**63 else entry for entry in each]
                for each in (table, victims)
            )
    after = struct.pack("<HIH5Q", 7, insn, 8, operand, mstatus, last, TLB_AT, used)
    assert bytes(uc.mem_read(DATA_AT, len(after))) == after
    assert bytes(uc.mem_read(SUM_AT, ctypes.sizeof(words))) == bytes(words)
    for at, entries in ((TLB_AT, table), (VICTIMS_AT, victims)):
        expected = packed([*entries, (1, 1, 1)])
        assert bytes(uc.mem_read(at, len(expected))) == expected


REGISTERS_AT, MAP_AT, PAGES = DATA_AT + 0x200, DATA_AT + 0x300, 6
REP_MOVS = {8: b"\xf3\x48\xa5", 4: b"\xf3\xa5"}
WHERE = st.tuples(st.integers(0, PAGES - 1), st.integers(-40, 40))


@given(
    unit=st.sampled_from([4, 8]),
    rights=st.lists(st.sampled_from(["", "r", "rw", "rw"]), min_size=PAGES, max_size=PAGES),
    places=st.tuples(WHERE, WHERE),
    count=st.integers(0, 40) | st.sampled_from([512, 1024, LONGEST_COPY + 1]),
    kept_from=st.sampled_from([""] * 5 + ["copies_itself", "patched", "trap flag", "down"]),
)
def test_a_copy_is_made_if_all_of_it_may_be_read_and_written(
    host: HostCpu,
    unit: int,
    rights: list[str],
    places: tuple[tuple[int, int], tuple[int, int]],
    count: int,
    kept_from: str,
) -> None:
    """The host makes a copy only if its source is in one readable range and its target is in one writable
    range.

    Here a page is a range. The host leaves copies across pages to the guest.
    """
    uc = host.uc
    guest = 0xFFFF888000000000 if unit == 8 else 0xC0000000
    source, target = (guest + page * 0x1000 + 0x800 * (at > 0) + at for page, at in places)
    words = CopyWords(
        copies_itself=kept_from == "copies_itself",
        text=DATA_AT + 3,
        code=int.from_bytes(REP_MOVS[unit], "little"),
        code_mask=(1 << 8 * len(REP_MOVS[unit])) - 1,
        stored_flags=FLAGS_AT,
        direction=FLAGS_AT + 8,
        register_mask=(1 << 8 * unit) - 1,
        unit=unit,
        map=MAP_AT,
        copies=41,
        count=REGISTERS_AT,
        source=REGISTERS_AT + 8,
        destination=REGISTERS_AT + 16,
    )
    ranges = b"".join(
        bytes(
            CopyRange(
                first=guest + page * 0x1000,
                past=guest + (page + 1) * 0x1000,
                displacement=TABLES_AT - guest & 2**64 - 1,
                is_writable=each == "rw",
            )
        )
        for page, each in enumerate(rights)
        if each
    )
    memory = bytes(at * 7 % 251 for at in range(PAGES * 0x1000))
    uc.mem_write(TABLES_AT, memory)
    text = b"\xcc" if kept_from == "patched" else REP_MOVS[unit]
    uc.mem_write(DATA_AT + 3, text.ljust(4, b"\x89"))
    uc.mem_write(
        FLAGS_AT, struct.pack("<Qi", 0x46 | TF * (kept_from == "trap flag"), 1 - 2 * (kept_from == "down"))
    )
    registers = (count, source, target)
    uc.mem_write(REGISTERS_AT, struct.pack("<3Q", *registers))
    uc.mem_write(MAP_AT, ranges + bytes(ctypes.sizeof(CopyRange)))
    uc.mem_write(WORDS_AT, bytes(words))
    host.run("copy", (7, 9, 3, WORDS_AT))
    assert uc.reg_read(host.pc) == RETURNED
    size = count * unit

    def is_within(at: int, right: str) -> bool:
        page = (at - guest) // 0x1000
        return page in range(PAGES) and right in rights[page] and at - guest + size <= (page + 1) * 0x1000

    expected = bytearray(memory)
    is_overlapping = 0 <= target - source < size
    if not kept_from and size and is_within(source, "r") and is_within(target, "w") and not is_overlapping:
        words.copies = 42
        registers = (0, source + size, target + size)
        expected[target - guest : target - guest + size] = memory[source - guest : source - guest + size]
    assert struct.unpack("<3Q", uc.mem_read(REGISTERS_AT, 24)) == registers
    assert bytes(uc.mem_read(TABLES_AT, len(memory))) == bytes(expected)
    assert bytes(uc.mem_read(WORDS_AT, ctypes.sizeof(words))) == bytes(words)


PLACE = 0xFFFFFFFF81000000
"""Address of the instruction at which the routine is called."""


@given(
    left=st.sampled_from([0, 1, 2, 1 << 32, (1 << 64) - 1]),
    is_bounded=st.booleans(),
    overdue=st.booleans(),
    end=st.sampled_from([0, PLACE, PLACE + 4]),
)
def test_python_looks_at_the_last_instruction_of_a_quantum(
    host: HostCpu, left: int, is_bounded: bool, overdue: bool, end: int
) -> None:
    words = QuantumWords(left=left, end=end, is_bounded=is_bounded, overdue=overdue, count_in_python=CALLBACK)
    host.uc.mem_write(WORDS_AT, bytes(words))
    arguments = (7, PLACE, 4, WORDS_AT)
    host.run("end_quantum", arguments)
    if is_bounded or overdue or left == 1 or end == PLACE:
        assert host.uc.reg_read(host.pc) == CALLBACK
        assert tuple(host.uc.reg_read(register) for register in host.arguments) == arguments
        assert host.leaves
    else:
        assert host.uc.reg_read(host.pc) == RETURNED
        words.left = max(0, left - 1)
    assert bytes(host.uc.mem_read(WORDS_AT, ctypes.sizeof(words))) == bytes(words)
