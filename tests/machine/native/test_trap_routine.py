"""The host's routine for traps: on all kinds of hosts, a trap leads to its target in the tables, or to
Python.
"""

from __future__ import annotations

import ctypes
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.machine.cpu.arm64 import BRK_EXCEPTION
from emulated_kernel.machine.native.trap_words import LINKED, LinkWords, TrapTable, TrapWords
from emulated_kernel.util.abi import Vector
from tests.machine.native.host_cpu import (
    BEYOND,
    CALLBACK,
    DATA_AT,
    ERROR_AT,
    FLAGS_AT,
    IP_AT,
    NEEDS_ROUTINE,
    RETURNED,
    STOPPED,
    TABLES_AT,
    TF,
    WORDS_AT,
    HostCpu,
)

pytestmark = NEEDS_ROUTINE


FAMILIES = ("x86", "riscv", "arm64")
ADDRESSES = st.integers(1, 24).map(lambda n: 0xFFFFFFFF81000000 + 16 * n) | st.integers(0, 2**64 - 1)
TARGETS = st.integers(1, 2**64 - 1)
ROUNDS = st.just(None)
"""Strategy for a target that is the trap's own address, written as None."""


@pytest.mark.parametrize("family", FAMILIES)
@given(
    tables=st.tuples(*[st.dictionaries(ADDRESSES.filter(bool), TARGETS | ROUNDS, max_size=40)] * 2),
    trap=st.data(),
    busy=st.sampled_from([(0, 0)] * 4 + [(1, 0), (0, 2)]),
    vector=st.sampled_from([Vector.BREAKPOINT, Vector.DEBUG, BRK_EXCEPTION, Vector.PAGE_FAULT, 0, 2, 0x80]),
    error=st.booleans(),
)
def test_the_routine_does_what_the_tables_say(
    host: HostCpu,
    family: str,
    tables: tuple[dict[int, int | None], dict[int, int | None]],
    trap: st.DataObject,
    busy: tuple[int, int],
    vector: int,
    error: bool,
) -> None:
    uc = host.uc
    native = TrapWords()
    # An odd entry is the address of LinkWords, except on x86; another test has such entries.
    odd = 0 if family == "x86" else LINKED
    targets = [{at: (at if to is None else to) & ~odd or 2 for at, to in table.items()} for table in tables]
    breakpoints, debug_traps = targets
    for words, table in ((native.breakpoints, breakpoints), (native.debug_traps, debug_traps)):
        made = TrapTable(words)
        for at, to in table.items():
            made.put(at, to)
        place = TABLES_AT if table is breakpoints else TABLES_AT + 0x10000
        uc.mem_write(place, bytes(made._entries))
        words.entries = place
    known = debug_traps if vector == Vector.DEBUG and family == "x86" else breakpoints
    address = trap.draw(st.sampled_from(sorted(known)) | ADDRESSES if known else ADDRESSES)
    ahead = int(family == "x86" and vector == Vector.BREAKPOINT)
    native.ip, native.flags, native.callback = IP_AT, FLAGS_AT, CALLBACK
    native.error = ERROR_AT if error else 0
    native.python, native.callers = busy
    native.hits = 41
    ip = address + ahead & 2**64 - 1
    state = ip.to_bytes(8, "little") + (TF | 0x246).to_bytes(8, "little") + (21).to_bytes(8, "little")
    uc.mem_write(DATA_AT, state)
    uc.mem_write(WORDS_AT, bytes(native))
    given_ = (7, WORDS_AT, 9) if family == "riscv" else (7, vector, WORDS_AT)
    host.run(family, given_)
    after = uc.mem_read(DATA_AT, 24)
    is_met = {
        "x86": vector in (Vector.BREAKPOINT, Vector.DEBUG),
        "riscv": error,
        "arm64": vector == BRK_EXCEPTION,
    }[family]
    target = known.get(address) if is_met and not any(busy) else None
    if target is None:
        assert uc.reg_read(host.pc) == CALLBACK
        assert [uc.reg_read(register) for register in host.arguments[:3]] == [*given_]
        assert host.leaves
        assert (bytes(after), bytes(uc.mem_read(WORDS_AT, ctypes.sizeof(native)))) == (state, bytes(native))
        return
    assert uc.reg_read(host.pc) == RETURNED
    native.hits = 42
    assert bytes(uc.mem_read(WORDS_AT, ctypes.sizeof(native))) == bytes(native)
    stepped = family == "x86" and vector == Vector.DEBUG
    flags = 0x246 if stepped and target != address else TF | 0x246
    left = 0 if family == "riscv" else 21
    expected = target.to_bytes(8, "little"), flags, left
    assert (bytes(after[:8]), int.from_bytes(after[8:16], "little"), after[16]) == expected
    if family == "riscv":
        assert uc.reg_read(host.result) & 0xFF == 1


LINK_WORDS_AT, FIRST_AT, SECOND_AT = (DATA_AT + 0x100 * number for number in (2, 3, 4))


@pytest.mark.parametrize("family", ["riscv", "arm64"])
@given(
    registers=st.tuples(TARGETS, TARGETS),
    offset=st.integers(-2048, 2047),
    kept_bits=st.sampled_from([2**64 - 1, 2**64 - 2]),
    link=TARGETS,
    to_itself=st.booleans(),
)
def test_a_jump_with_a_return_address(
    host: HostCpu,
    family: str,
    registers: tuple[int, int],
    offset: int,
    kept_bits: int,
    link: int,
    to_itself: bool,
) -> None:
    uc = host.uc
    native = TrapWords()
    table = TrapTable(native.breakpoints)
    address = 0xFFFFFFFF81000000
    table.put(address, LINK_WORDS_AT | LINKED)
    uc.mem_write(TABLES_AT, bytes(table._entries))
    native.breakpoints.entries = TABLES_AT
    native.ip, native.callback, native.error = IP_AT, CALLBACK, ERROR_AT
    uc.mem_write(DATA_AT, struct.pack("<3Q", address, 0, 21))
    link_at = FIRST_AT if to_itself else SECOND_AT
    words = LinkWords(FIRST_AT, offset & 2**64 - 1, kept_bits, link_at, link)
    uc.mem_write(LINK_WORDS_AT, bytes(words))
    for at, value in zip((FIRST_AT, SECOND_AT), registers, strict=True):
        uc.mem_write(at, struct.pack("<Q", value))
    uc.mem_write(WORDS_AT, bytes(native))
    given_ = (7, WORDS_AT) if family == "riscv" else (7, BRK_EXCEPTION, WORDS_AT)
    host.run(family, given_)
    assert uc.reg_read(host.pc) == RETURNED
    error = 0 if family == "riscv" else 21
    assert struct.unpack("<3Q", uc.mem_read(DATA_AT, 24)) == (registers[0] + offset & kept_bits, 0, error)
    found = [struct.unpack("<Q", uc.mem_read(at, 8))[0] for at in (FIRST_AT, SECOND_AT)]
    assert found == [
        link if at == link_at else value for at, value in zip((FIRST_AT, SECOND_AT), registers, strict=True)
    ]
    assert bytes(uc.mem_read(LINK_WORDS_AT, ctypes.sizeof(words))) == bytes(words)
    native.hits = 1
    assert bytes(uc.mem_read(WORDS_AT, ctypes.sizeof(native))) == bytes(native)


CHARGES = (("charge_intr", "trap_ns", 2), ("charge_invalid", "trap_ns", 1), ("handler_intr", "handler_ns", 2),
           ("handler_invalid", "handler_ns", 1))  # fmt: skip
"""Routine, the word that it adds to the time, and the number of the argument with the words."""


@pytest.mark.parametrize(("name", "ns", "argument"), [("count", "", 3), *CHARGES])
@pytest.mark.parametrize("now", [0, 2**32 - 1, 2**64 - 1])
def test_the_model_clock_is_advanced(host: HostCpu, name: str, ns: str, argument: int, now: int) -> None:
    """The routine `count` adds 1 to the clock's nanoseconds.

    A routine that charges for a trap or a handler adds the nanoseconds in its word. It passes its arguments
    to the next routine.
    """
    uc = host.uc
    uc.mem_write(DATA_AT, now.to_bytes(8, "little"))
    native = TrapWords(time=DATA_AT, trap_ns=200, handler_ns=500)
    target = "routine" if name.startswith("charge") else "handler"
    setattr(native, target, CALLBACK)
    uc.mem_write(WORDS_AT, bytes(native))
    given_ = [7, 8, 9, 10]
    given_[argument] = WORDS_AT if ns else DATA_AT
    host.run(name, given_)
    assert uc.reg_read(host.pc) == (CALLBACK if ns else RETURNED)
    assert bytes(uc.mem_read(WORDS_AT, ctypes.sizeof(native))) == bytes(native)
    passed = getattr(native, ns) if ns else 1
    assert int.from_bytes(uc.mem_read(DATA_AT, 8), "little") == now + passed & 2**64 - 1
    if ns:
        passed_on = 3 if argument == 2 else 2
        assert [uc.reg_read(register) for register in host.arguments[:passed_on]] == given_[:passed_on]
        assert host.leaves


@given(
    vectors=st.sampled_from([(13, 13), (13, 14), (2, 2), (7, 3), (2, 2**64 - 1)]),
    ahead=st.sampled_from([0, 0, 4, 8]),
    reported_ahead=st.sampled_from([0, 4]),
    in_flight=st.booleans(),
)
def test_a_run_ends_where_a_process_waits(
    host: HostCpu, vectors: tuple[int, int], ahead: int, reported_ahead: int, in_flight: bool
) -> None:
    """A run ends at the exception and the address where a process waits.

    Other exceptions go to the routine for traps.
    """
    uc = host.uc
    vector, waits_for = vectors
    start = 0x401000
    native = TrapWords(ip=IP_AT, arrival=start + reported_ahead, arrival_ip=start, arrival_vector=waits_for)
    native.arrivals, native.emu_stop, native.beyond = 41, STOPPED, BEYOND
    native.in_flight = ERROR_AT if in_flight else 0
    ip = start + ahead
    state = struct.pack("<QQII", ip, TF, 21, 22)
    uc.mem_write(DATA_AT, state)
    uc.mem_write(WORDS_AT, bytes(native))
    given_ = (7, vector, WORDS_AT)
    host.run("arrive", given_)
    assert host.leaves
    if vector != waits_for or ahead != reported_ahead:
        assert uc.reg_read(host.pc) == BEYOND
        assert tuple(uc.reg_read(register) for register in host.arguments[:3]) == given_
    else:
        assert uc.reg_read(host.pc) == STOPPED
        assert uc.reg_read(host.arguments[0]) == given_[0]
        native.arrivals = 42
        state = struct.pack("<QQII", start, TF, 2**32 - 1 if in_flight else 21, 22)
    assert bytes(uc.mem_read(DATA_AT, len(state))) == state
    assert bytes(uc.mem_read(WORDS_AT, ctypes.sizeof(native))) == bytes(native)


STUB, CELLS_AT, GATE_AT, SP_AT = 0xFFFFFFFF70000100, DATA_AT + 0x400, DATA_AT + 0x500, DATA_AT + 0x600
PRIVILEGE_AT, STACK_SEGMENT_AT, CODE_SEGMENT_AT, IDT_AT = (SP_AT + 8 * number for number in range(1, 5))
DELIVERED = {
    "by the guest": {},
    "to Python: no stub": {"stub": 0},
    "to Python: from user mode": {"privilege": 0x33B3},
    "to Python: the trap flag": {"flags": 0x346},
    "to Python: a nested task": {"flags": 0x4246},
    "to Python: the resume flag": {"flags": 0x10246},
    "to Python: another table": {"idt": 0xFFFFFE0000001000},
    "to Python: another entry": {"gate_low": 0x8E00_0010_0002},
    "to Python: another upper half": {"gate_high": 0xFFFFFFFE},
    "to Python: a debug trap": {"vector": Vector.DEBUG},
    "to Python: a page fault": {"vector": Vector.PAGE_FAULT},
}


@pytest.mark.parametrize("case", DELIVERED.values(), ids=DELIVERED)
def test_a_breakpoint_that_the_guest_delivers(host: HostCpu, case: dict[str, int]) -> None:
    """The routine stores the words that the stub will push, aligns the stack, and jumps to the stub.

    In all other cases, the routine calls Python and changes nothing.
    """
    uc = host.uc
    native = TrapWords()
    for words in (native.breakpoints, native.debug_traps):
        empty = TrapTable(words)
        uc.mem_write(TABLES_AT, bytes(empty._entries))
        words.entries = TABLES_AT
    native.ip, native.flags, native.callback, native.stub = IP_AT, FLAGS_AT, CALLBACK, case.get("stub", STUB)
    native.sp, native.privilege = SP_AT, PRIVILEGE_AT
    native.stack_segment, native.code_segment, native.idt = STACK_SEGMENT_AT, CODE_SEGMENT_AT, IDT_AT
    native.idt_base, native.cells, native.gate = 0xFFFFFE0000000000, CELLS_AT, GATE_AT
    native.gate_low, native.gate_high = 0x8E00_0010_0001, 0xFFFFFFFF
    ip, sp = 0xFFFFFFFF81349956, 0xFFFFC9000000BEF8
    uc.mem_write(DATA_AT, struct.pack("<3Q", ip, case.get("flags", 0x246), 0))
    idt = case.get("idt", native.idt_base)
    uc.mem_write(SP_AT, struct.pack("<5Q", sp, case.get("privilege", 0x33B0), 0x18, 0x10, idt))
    gate = case.get("gate_low", native.gate_low), case.get("gate_high", native.gate_high)
    uc.mem_write(GATE_AT, struct.pack("<2Q", *gate))
    uc.mem_write(CELLS_AT, bytes(32))
    uc.mem_write(WORDS_AT, bytes(native))
    before = bytes(uc.mem_read(DATA_AT, 0x1000))
    arguments = 7, case.get("vector", Vector.BREAKPOINT), WORDS_AT
    host.run("x86", arguments)
    if case:
        assert uc.reg_read(host.pc) == CALLBACK
        assert [uc.reg_read(register) for register in host.arguments[:3]] == [*arguments]
        assert bytes(uc.mem_read(DATA_AT, 0x1000)) == before
        return
    assert uc.reg_read(host.pc) == RETURNED
    assert struct.unpack("<4Q", uc.mem_read(CELLS_AT, 32)) == (0x18, sp, 0x10, ip)
    assert struct.unpack("<2Q", uc.mem_read(DATA_AT, 16)) == (STUB, 0x246)
    assert struct.unpack("<Q", uc.mem_read(SP_AT, 8)) == (sp & ~15,)
