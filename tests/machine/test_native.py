"""The host's routine for traps: its bytes, its table, and the traps that it takes from Python."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import unicorn
from hypothesis import given
from hypothesis import strategies as st
from unicorn import arm64_const, x86_const

from emulated_kernel.guests.linux.pc.devices import Pc
from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.machine.cpu.arm64 import BRK_EXCEPTION
from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.interrupts.trap_handlers import (
    LinkedJump,
    LinkedRedirect,
    Redirect,
    TrapHandlers,
)
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.native import assemble, host_code
from emulated_kernel.machine.native.copy_words import LONGEST_COPY, CopyRange, CopyWords
from emulated_kernel.machine.native.routines import ROUTINES
from emulated_kernel.machine.native.sum_words import ENTRY_SIZE, SUM, VICTIMS, SumWords
from emulated_kernel.machine.native.trap_words import FACTOR, LINKED, LinkWords, TrapTable, TrapWords
from emulated_kernel.machine.traps.trap import TrapKind
from emulated_kernel.util.abi import Vector
from emulated_kernel.util.config import MachineConfig
from tests.machine.guests import CODE, boot

pytestmark = pytest.mark.skipif(
    host_code.routine_address("x86") is None, reason="there is no routine for this kind of host"
)


def unexpected(_regs: Regs) -> None:
    raise AssertionError("Python got the trap")


# The bytes


def test_the_bytes_are_those_of_the_source() -> None:
    assert assemble.ROUTINES.read_text() == assemble.module_text()


CODE_AT, DATA_AT, TABLES_AT, STACK_AT = 0x10000, 0x20000, 0x30000, 0x50000
IP_AT, FLAGS_AT, ERROR_AT, WORDS_AT = DATA_AT, DATA_AT + 8, DATA_AT + 16, DATA_AT + 64
RETURNED, CALLBACK = 0x60000, 0x70000
TF = 0x100


class X86Host:
    """An emulated x86-64 CPU as the host."""

    name = "x86_64"
    arguments = tuple(getattr(x86_const, f"UC_X86_REG_{name}") for name in ("RDI", "RSI", "RDX", "RCX"))
    result, pc = x86_const.UC_X86_REG_RAX, x86_const.UC_X86_REG_RIP
    kept = tuple(
        getattr(x86_const, f"UC_X86_REG_{name}") for name in ("RBX", "RBP", "R12", "R13", "R14", "R15")
    )

    def __init__(self) -> None:
        self.uc = unicorn.Uc(unicorn.UC_ARCH_X86, unicorn.UC_MODE_64)

    def enter(self) -> None:
        self.uc.mem_write(STACK_AT + 0x800, RETURNED.to_bytes(8, "little"))
        self.uc.reg_write(x86_const.UC_X86_REG_RSP, STACK_AT + 0x800)

    @property
    def leaves(self) -> bool:
        """Whether the stack is that of a function that was jumped to by its caller's caller."""
        return int(self.uc.reg_read(x86_const.UC_X86_REG_RSP)) == STACK_AT + 0x800


class ArmHost:
    """An emulated AArch64 CPU as the host."""

    name = "aarch64"
    arguments = tuple(getattr(arm64_const, f"UC_ARM64_REG_X{number}") for number in range(4))
    result, pc = arm64_const.UC_ARM64_REG_X0, arm64_const.UC_ARM64_REG_PC
    kept = tuple(getattr(arm64_const, f"UC_ARM64_REG_X{number}") for number in range(19, 29))

    def __init__(self) -> None:
        self.uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)

    def enter(self) -> None:
        self.uc.reg_write(arm64_const.UC_ARM64_REG_SP, STACK_AT + 0x800)
        self.uc.reg_write(arm64_const.UC_ARM64_REG_X30, RETURNED)

    @property
    def leaves(self) -> bool:
        return int(self.uc.reg_read(arm64_const.UC_ARM64_REG_X30)) == RETURNED


@pytest.fixture(scope="module", params=[X86Host, ArmHost], ids=["x86_64", "aarch64"])
def host(request: pytest.FixtureRequest) -> X86Host | ArmHost:
    host = request.param()
    for at in (CODE_AT, DATA_AT, STACK_AT, RETURNED, CALLBACK):
        host.uc.mem_map(at, 0x1000)
    host.uc.mem_map(TABLES_AT, 0x20000)
    # The places where a call ends are executed: any instruction will do.
    for at in (RETURNED, CALLBACK):
        host.uc.mem_write(at, b"\x90" * 64 if host.name == "x86_64" else bytes.fromhex("1f2003d5") * 16)
    return host


FAMILIES = ("x86", "riscv", "arm64")
ADDRESSES = st.integers(1, 24).map(lambda n: 0xFFFFFFFF81000000 + 16 * n) | st.integers(0, 2**64 - 1)
TARGETS = st.integers(1, 2**64 - 1)
ROUNDS = st.just(None)
"""A target that is the trap's own address."""


@pytest.mark.parametrize("family", FAMILIES)
@given(
    tables=st.tuples(*[st.dictionaries(ADDRESSES.filter(bool), TARGETS | ROUNDS, max_size=40)] * 2),
    trap=st.data(),
    busy=st.sampled_from([(0, 0)] * 4 + [(1, 0), (0, 2)]),
    vector=st.sampled_from([Vector.BREAKPOINT, Vector.DEBUG, BRK_EXCEPTION, Vector.PAGE_FAULT, 0, 2, 0x80]),
    error=st.booleans(),
)
def test_the_routine_does_what_the_tables_say(
    host: X86Host | ArmHost,
    family: str,
    tables: tuple[dict[int, int | None], dict[int, int | None]],
    trap: st.DataObject,
    busy: tuple[int, int],
    vector: int,
    error: bool,
) -> None:
    uc = host.uc
    native = TrapWords()
    # An odd entry is the address of LinkWords, except on x86; another test has those.
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
    code = ROUTINES[host.name, family]
    uc.mem_write(CODE_AT, code)
    uc.ctl_remove_cache(CODE_AT, CODE_AT + len(code))
    given_ = (7, WORDS_AT, 9) if family == "riscv" else (7, vector, WORDS_AT)
    for register, value in zip(host.arguments, given_, strict=False):
        uc.reg_write(register, value)
    for register in host.kept:
        uc.reg_write(register, register)
    host.enter()
    uc.ctl_exits_enabled(True)
    uc.ctl_set_exits([RETURNED, CALLBACK])
    uc.emu_start(CODE_AT, 0, count=5000)
    assert [uc.reg_read(register) for register in host.kept] == [*host.kept]
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
    host: X86Host | ArmHost,
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
    code = ROUTINES[host.name, family]
    uc.mem_write(CODE_AT, code)
    uc.ctl_remove_cache(CODE_AT, CODE_AT + len(code))
    given_ = (7, WORDS_AT) if family == "riscv" else (7, BRK_EXCEPTION, WORDS_AT)
    for number, value in zip(host.arguments, given_, strict=False):
        uc.reg_write(number, value)
    for number in host.kept:
        uc.reg_write(number, number)
    host.enter()
    uc.ctl_exits_enabled(True)
    uc.ctl_set_exits([RETURNED, CALLBACK])
    uc.emu_start(CODE_AT, 0, count=5000)
    assert uc.reg_read(host.pc) == RETURNED
    assert [uc.reg_read(number) for number in host.kept] == [*host.kept]
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
def test_the_model_clock_is_advanced(
    host: X86Host | ArmHost, name: str, ns: str, argument: int, now: int
) -> None:
    """The counting routine returns, and a charge goes on with the arguments that it got."""
    uc = host.uc
    uc.mem_write(DATA_AT, now.to_bytes(8, "little"))
    native = TrapWords(time=DATA_AT, trap_ns=200, handler_ns=500)
    target = "routine" if name.startswith("charge") else "handler"
    setattr(native, target, CALLBACK)
    uc.mem_write(WORDS_AT, bytes(native))
    code = ROUTINES[host.name, name]
    uc.mem_write(CODE_AT, code)
    uc.ctl_remove_cache(CODE_AT, CODE_AT + len(code))
    given_ = [7, 8, 9, 10]
    given_[argument] = WORDS_AT if ns else DATA_AT
    for register, value in zip(host.arguments, given_, strict=True):
        uc.reg_write(register, value)
    for register in host.kept:
        uc.reg_write(register, register)
    host.enter()
    uc.ctl_exits_enabled(True)
    uc.ctl_set_exits([RETURNED, CALLBACK])
    uc.emu_start(CODE_AT, 0, count=100)
    assert uc.reg_read(host.pc) == (CALLBACK if ns else RETURNED)
    assert [uc.reg_read(register) for register in host.kept] == [*host.kept]
    assert bytes(uc.mem_read(WORDS_AT, ctypes.sizeof(native))) == bytes(native)
    passed = getattr(native, ns) if ns else 1
    assert int.from_bytes(uc.mem_read(DATA_AT, 8), "little") == now + passed & 2**64 - 1
    if ns:
        passed_on = 3 if argument == 2 else 2
        assert [uc.reg_read(register) for register in host.arguments[:passed_on]] == given_[:passed_on]
        assert host.leaves


STOPPED, BEYOND = CALLBACK, CALLBACK + 16


@given(
    vectors=st.sampled_from([(13, 13), (13, 14), (2, 2), (7, 3), (2, 2**64 - 1)]),
    ahead=st.sampled_from([0, 0, 4, 8]),
    reported_ahead=st.sampled_from([0, 4]),
    in_flight=st.booleans(),
)
def test_a_run_ends_where_a_process_waits(
    host: X86Host | ArmHost, vectors: tuple[int, int], ahead: int, reported_ahead: int, in_flight: bool
) -> None:
    """Another exception there, and the same one elsewhere, go on to the routine for traps as they came."""
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
    code = ROUTINES[host.name, "arrive"]
    uc.mem_write(CODE_AT, code)
    uc.ctl_remove_cache(CODE_AT, CODE_AT + len(code))
    given_ = (7, vector, WORDS_AT)
    for register, value in zip(host.arguments, given_, strict=False):
        uc.reg_write(register, value)
    for register in host.kept:
        uc.reg_write(register, register)
    host.enter()
    uc.ctl_exits_enabled(True)
    uc.ctl_set_exits([STOPPED, BEYOND])
    uc.emu_start(CODE_AT, 0, count=100)
    assert [uc.reg_read(register) for register in host.kept] == [*host.kept]
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


@given(tsc=st.integers(0, 2**64 - 1), steps=st.integers(0, 2**64 - 1), followed=st.booleans())
def test_rdtsc_advances_the_time_as_python_does(
    host: X86Host | ArmHost, tsc: int, steps: int, followed: bool
) -> None:
    uc = host.uc
    pc = Pc(steps)
    pc.words.tsc, pc.words.followed, pc.words.read_in_python = tsc, followed, CALLBACK
    pc.words.low, pc.words.high = DATA_AT, DATA_AT + 8
    before = bytes(pc.words)
    uc.mem_write(DATA_AT, bytes(range(16)))
    uc.mem_write(WORDS_AT, before)
    code = ROUTINES[host.name, "rdtsc"]
    uc.mem_write(CODE_AT, code)
    uc.ctl_remove_cache(CODE_AT, CODE_AT + len(code))
    given_ = (7, WORDS_AT)
    for register, value in zip(host.arguments, given_, strict=False):
        uc.reg_write(register, value)
    for register in host.kept:
        uc.reg_write(register, register)
    host.enter()
    uc.ctl_exits_enabled(True)
    uc.ctl_set_exits([RETURNED, CALLBACK])
    uc.emu_start(CODE_AT, 0, count=100)
    assert [uc.reg_read(register) for register in host.kept] == [*host.kept]
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
    host: X86Host | ArmHost,
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
    code = ROUTINES[host.name, routine]
    uc.mem_write(CODE_AT, code)
    uc.ctl_remove_cache(CODE_AT, CODE_AT + len(code))
    for register, value in zip(host.arguments, (7, 8, 4, SUM_AT), strict=True):
        uc.reg_write(register, value)
    for register in host.kept:
        uc.reg_write(register, register)
    host.enter()
    uc.ctl_exits_enabled(True)
    uc.ctl_set_exits([RETURNED])
    uc.emu_start(CODE_AT, 0, count=5000)
    assert uc.reg_read(host.pc) == RETURNED
    assert [uc.reg_read(register) for register in host.kept] == [*host.kept]
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
    host: X86Host | ArmHost,
    unit: int,
    rights: list[str],
    places: tuple[tuple[int, int], tuple[int, int]],
    count: int,
    kept_from: str,
) -> None:
    """Each page is a range of its own, so a copy across pages is left to the guest."""
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
    code = ROUTINES[host.name, "copy"]
    uc.mem_write(CODE_AT, code)
    uc.ctl_remove_cache(CODE_AT, CODE_AT + len(code))
    for register, value in zip(host.arguments, (7, 9, 3, WORDS_AT), strict=True):
        uc.reg_write(register, value)
    for register in host.kept:
        uc.reg_write(register, register)
    host.enter()
    uc.ctl_exits_enabled(True)
    uc.ctl_set_exits([RETURNED, CALLBACK])
    uc.emu_start(CODE_AT, 0, count=50_000)
    assert uc.reg_read(host.pc) == RETURNED
    assert [uc.reg_read(register) for register in host.kept] == [*host.kept]
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
def test_a_breakpoint_that_the_guest_delivers(host: X86Host | ArmHost, case: dict[str, int]) -> None:
    """The routine stores what the stub pushes, aligns the stack, and goes to the stub; or calls Python."""
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
    code = ROUTINES[host.name, "x86"]
    uc.mem_write(CODE_AT, code)
    uc.ctl_remove_cache(CODE_AT, CODE_AT + len(code))
    arguments = 7, case.get("vector", Vector.BREAKPOINT), WORDS_AT
    for register, value in zip(host.arguments, arguments, strict=False):
        uc.reg_write(register, value)
    host.enter()
    uc.ctl_exits_enabled(True)
    uc.ctl_set_exits([RETURNED, CALLBACK])
    uc.emu_start(CODE_AT, 0, count=5000)
    if case:
        assert uc.reg_read(host.pc) == CALLBACK
        assert [uc.reg_read(register) for register in host.arguments[:3]] == [*arguments]
        assert bytes(uc.mem_read(DATA_AT, 0x1000)) == before
        return
    assert uc.reg_read(host.pc) == RETURNED
    assert struct.unpack("<4Q", uc.mem_read(CELLS_AT, 32)) == (0x18, sp, 0x10, ip)
    assert struct.unpack("<2Q", uc.mem_read(DATA_AT, 16)) == (STUB, 0x246)
    assert struct.unpack("<Q", uc.mem_read(SP_AT, 8)) == (sp & ~15,)


# The table


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=600),
    st.sampled_from([1, 2, 16, 4096, pow(FACTOR, -1, 2**64)]),
)
def test_the_table_is_a_dict(changes: list[tuple[bool, int]], stride: int) -> None:
    """The last stride makes all addresses collide."""
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
    """Return what the routine's search finds."""
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


# The machine


@pytest.fixture(params=["x86_64", "i386", "riscv64", "riscv64i"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    image = load_image(arch=request.param)
    with Machine(MachineConfig(arch=request.param), image) as machine:
        yield machine


def counted_loop(machine: Machine, turns: int) -> tuple[int, int, int]:
    """A loop of a breakpoint, then code that the breakpoint must skip; return its place and what is after it.

    The third number is the address of the end.
    """
    text = machine.text
    code = text.alloc_text(64)
    if machine.model.trap_flag:
        # mov ecx, turns; int3; hlt; dec ecx; jnz int3; ret
        dec = b"\xff\xc9"
        body = b"\xb9" + turns.to_bytes(4, "little") + b"\xcc\xf4" + dec + b"\x75\xfa\xc3"
        text.poke(code, body)
        return code + 5, code + 7, code
    # lui a1, turns >> 12; ebreak; wfi; addi a1, a1, -1; bnez a1, ebreak; ret
    assert turns % 4096 == 0
    parts = (turns | 0x5B7, 0x00100073, 0x10500073, 0xFFF58593, 0xFE059AE3, 0x00008067)
    text.poke(code, b"".join(part.to_bytes(4, "little") for part in parts))
    return code + 4, code + 12, code


def test_a_million_redirected_traps_need_no_python(machine: Machine) -> None:
    turns = 1 << 20
    site, behind, code = counted_loop(machine, turns)
    machine.breakpoints[site] = Redirect(behind, unexpected)
    assert machine.hooks.is_native
    before = machine.hooks.native_traps
    machine.call(code)
    assert machine.hooks.native_traps - before == turns


def test_python_gets_the_traps_that_it_must_get(machine: Machine) -> None:
    site, behind, code = counted_loop(machine, 4096)
    met = 0

    def handler(regs: Regs) -> None:
        nonlocal met
        met += 1
        regs.ip = behind
        if met == 1000:
            machine.hooks.python[0] = 0
        if met == 2000:
            machine.breakpoints[site] = Redirect(behind, unexpected)

    route = Redirect(behind, handler)
    machine.breakpoints[site] = route
    machine.hooks.python[0] = 1
    before = machine.hooks.native_traps
    machine.call(code)
    assert (met, machine.hooks.native_traps - before) == (1000, 3096)
    machine.breakpoints[site] = handler
    machine.call(code)
    assert (met, machine.hooks.native_traps - before) == (2000, 3096 + 3096)
    machine.breakpoints[site] = route
    machine.hooks.set_guest_caller(machine, True)
    met = 3000
    machine.call(code)
    assert (met, machine.hooks.native_traps - before) == (3000 + 4096, 3096 + 3096)
    machine.hooks.set_guest_caller(machine, False)
    machine.call(code)
    assert (met, machine.hooks.native_traps - before) == (3000 + 4096, 3096 + 3096 + 4096)


def test_a_step_by_the_trap_flag() -> None:
    """The trap flag is cleared at the target, and kept after a round of a repeated string instruction."""
    machine = boot(
        "mov ecx, 5; mov rdi, rsp; nop; pushf; or byte ptr [rsp + 1], 1; popf; rep stosb; hlt; mov bl, 7; hlt"
    )
    text = machine.text.current(CODE, 40)
    rep = CODE + text.index(b"\xf3")
    end = rep + 2
    machine.debug_traps[rep] = Redirect(rep, unexpected)
    machine.debug_traps[end] = Redirect(end + 1, unexpected)
    machine.regs.sp -= 256
    machine.run()
    assert (machine.regs.bx & 0xFF, machine.regs.cx, machine.regs.flags & TF) == (7, 0, 0)
    assert machine.hooks.native_traps == 5


@pytest.mark.parametrize("why", ["another kind of host", "the environment"])
def test_a_host_without_a_routine(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "the environment":
        monkeypatch.setenv(host_code.PYTHON_TRAPS, "1")
    else:
        monkeypatch.setattr(host_code, "ROUTINES", {})
    machine = boot("int3; hlt; mov ebx, 7; hlt")
    assert not machine.hooks.is_native
    met: list[int] = []

    def handler(regs: Regs) -> None:
        met.append(regs.ip)
        regs.ip = CODE + 2

    machine.breakpoints[CODE] = Redirect(CODE + 2, handler)
    machine.run()
    assert (met, machine.regs.bx, machine.hooks.native_traps) == ([CODE + 1], 7, 0)


def test_slow_registers_leave_traps_to_python() -> None:
    machine = boot("int3; hlt; mov ebx, 7; hlt", fast_registers=False)
    assert not machine.hooks.is_native
    machine.breakpoints[CODE] = Redirect(CODE + 2, lambda regs: regs.set("ip", CODE + 2))
    machine.run()
    assert (machine.regs.bx, machine.hooks.native_traps) == (7, 0)


def test_an_instruction_pointer_of_zero() -> None:
    """A breakpoint at address 0 stays with Python, since 0 marks an empty entry."""
    handlers = TrapHandlers()
    table = TrapTable(TrapWords().breakpoints)
    handlers.use(table)
    handlers[0] = Redirect(8, unexpected)
    assert dict(table.items()) == {}


def interrupt_after(seconds: float, times: int) -> threading.Timer:
    """Send SIGINT to the process, as a terminal does, from another thread."""

    def send() -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    timer = threading.Timer(seconds, send)
    timer.start()
    return timer


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("native", [True, False])
def test_a_second_interrupt_ends_a_run_without_python(native: bool) -> None:
    """The run would take a minute. The machine goes on with the next run."""
    machine = boot("int3; mov ebx, 7; hlt", run_budget=60, fast_registers=native)
    machine.breakpoints[CODE] = Redirect(CODE, lambda regs: regs.set("ip", CODE))
    started = time.monotonic()
    timer = interrupt_after(0.2, 2)
    with pytest.raises(KeyboardInterrupt):
        machine.run()
    timer.join()
    assert time.monotonic() - started < 30
    assert machine.hooks.native_traps > 1000 or not native
    assert machine.regs.ip in (CODE, CODE + 1)
    machine.breakpoints[CODE] = Redirect(CODE + 1, lambda regs: regs.set("ip", CODE + 1))
    machine.regs.ip = CODE
    for _ in range(3):
        machine.regs.ip = CODE
        machine.run()
    assert machine.regs.bx == 7


@pytest.mark.usefixtures("interruptible")
def test_one_interrupt_waits_for_the_end_of_a_run() -> None:
    machine = boot("int3; hlt", run_budget=1)
    machine.breakpoints[CODE] = Redirect(CODE, unexpected)
    timer = interrupt_after(0.1, 1)
    trap = machine.run()
    timer.join()
    assert trap.kind is TrapKind.BUDGET
    assert machine.hooks.engine.is_interrupted
    machine.hooks.engine.is_interrupted = False


@pytest.mark.usefixtures("interruptible")
def test_interrupts_before_a_run_do_not_count() -> None:
    machine = boot("int3; hlt", run_budget=1)
    machine.breakpoints[CODE] = Redirect(CODE, unexpected)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert machine.run().kind is TrapKind.BUDGET
    assert not machine.hooks.engine.is_interrupted
