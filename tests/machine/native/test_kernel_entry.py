"""The host's routine for system calls of a guest, which enters the guest's kernel.

If all words of a table of checks match, a table of moves changes the CPU's state.
"""

from __future__ import annotations

import ctypes
import struct

from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.machine.native.entry_words import Check, Move
from emulated_kernel.machine.native.routines import ROUTINES
from emulated_kernel.machine.native.trap_words import TrapWords
from tests.machine.native.host_cpu import BEYOND, CODE_AT, DATA_AT, NEEDS_ROUTINE, RETURNED, WORDS_AT, HostCpu

pytestmark = NEEDS_ROUTINE

ENTER_AT, MOVES_AT, CHECKS_AT, CELLS = CODE_AT + 0x800, DATA_AT + 0x800, DATA_AT + 0x600, 8
WORDS = st.sampled_from([0, 1, 0x1000, 2**32 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
CELL = st.integers(0, CELLS - 1)


@given(
    cells=st.lists(WORDS, min_size=CELLS, max_size=CELLS),
    checks=st.lists(st.tuples(CELL, WORDS, st.just(None) | WORDS), max_size=3),
    moves=st.lists(st.tuples(CELL, CELL, WORDS, WORDS, WORDS, WORDS), max_size=6),
    vectors=st.sampled_from([(2, 2), (2, 2), (8, 8), (0, 0), (2, 8), (0, 1)]),
    is_insn=st.booleans(),
)
def test_a_call_enters_the_kernel_by_moves(
    host: HostCpu,
    cells: list[int],
    checks: list[tuple[int, int, int | None]],
    moves: list[tuple[int, int, int, int, int, int]],
    vectors: tuple[int, int],
    is_insn: bool,
) -> None:
    """If all checks hold, the moves are made.

    If a check fails, or another exception was raised, nothing changes, and the next routine is called.
    """
    uc = host.uc
    vector, waits_for = vectors
    held = [(at, mask, cells[at] & mask if value is None else value) for at, mask, value in checks]
    enters = (0 if is_insn else vector) == waits_for and all(
        cells[at] & mask == value for at, mask, value in held
    )
    native = TrapWords(entry_vector=waits_for, checks=CHECKS_AT, moves=MOVES_AT, refused=BEYOND)
    native.routine = ENTER_AT
    table = [Move(DATA_AT + 8 * to, DATA_AT + 8 * of, *rest) for to, of, *rest in moves]
    uc.mem_write(DATA_AT, struct.pack(f"<{CELLS}Q", *cells))
    uc.mem_write(CHECKS_AT, b"".join(bytes(Check(DATA_AT + 8 * at, *rest)) for at, *rest in held) + bytes(8))
    uc.mem_write(MOVES_AT, b"".join(map(bytes, table)) + bytes(8))
    uc.mem_write(WORDS_AT, bytes(native))
    uc.mem_write(ENTER_AT, ROUTINES[host.name, "enter"])
    given_ = (7, WORDS_AT) if is_insn else (7, vector, WORDS_AT)
    host.run("enter_insn" if is_insn else "enter", given_)
    assert uc.reg_read(host.pc) == (RETURNED if enters else BEYOND)
    if enters:
        for to, of, mask, factor, added, kept in moves:
            value = (cells[of] & mask) * factor + added & 2**64 - 1
            cells[to] = cells[to] & kept | value
    else:
        assert host.leaves
        assert uc.reg_read(host.arguments[0]) == 7
        if not is_insn:
            assert tuple(uc.reg_read(register) for register in host.arguments[:3]) == given_
    assert bytes(uc.mem_read(DATA_AT, 8 * CELLS)) == struct.pack(f"<{CELLS}Q", *cells)
    assert bytes(uc.mem_read(WORDS_AT, ctypes.sizeof(native))) == bytes(native)
