"""Quirks of the emulator that Debian's kernel could meet: stopped runs, repeated stores, changed text."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest

from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.kernel_offsets import FREES_TEXT, POKED, TEXT_POKE
from emulated_kernel.guests.linux.pc import cpu_state as pc_cpu_state
from emulated_kernel.guests.linux.pc.cpu_state import STATE_SIZE, WordSearch, cpu_state
from emulated_kernel.guests.linux.pc.exception_cells import find_exception_cells
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.interrupts.exceptions import NONE_IN_FLIGHT
from emulated_kernel.machine.quirks.harness import own_memory
from emulated_kernel.machine.traps.trap import GuestFault
from tests.guests.linux.probing import PLAIN, engine

ADDS = b"\xf0\x48\xff\x03\xeb\xfa"
"""Code of an endless loop: lock inc qword [rbx], and a jump back."""
CODE, CELL, ROOT = 0x10000, 0x20000, 0x4000


def test_a_run_that_was_stopped_from_outside_does_not_go_on() -> None:
    """A run that was stopped from outside cannot be continued, because a store that had begun could be done
    twice.
    """
    machine, ram = small_machine(ADDS, 0.1)
    machine.regs.bx = CELL
    with pytest.raises(GuestFault, match=r"it ran for too long, and was given up at 0x1000[04]"):
        machine.run()
    counted = ram[CELL : CELL + 8]
    assert any(counted)
    for _ in range(2):
        with pytest.raises(GuestFault, match="it ran for too long"):
            machine.run()
    assert ram[CELL : CELL + 8] == counted
    machine.close()


REP_STOSB = b"\xf3\xaa"
UP, DOWN = 0x2, 0x402
"""Flags with both directions of string instructions."""


def small_machine(code: bytes, budget: float = 1.0) -> tuple[PcMachine, mmap.mmap]:
    """Return a machine that maps its first 2 MiB, with `code` at CODE, and its RAM.

    `budget`: maximum seconds of a run.
    """
    ram = mmap.mmap(-1, 4 << 20)
    for table in (ROOT, ROOT + 0x1000):
        ram[table : table + 8] = (table + 0x1000 | 3).to_bytes(8, "little")
    ram[ROOT + 0x2000 : ROOT + 0x2008] = (0x83).to_bytes(8, "little")
    ram[CODE : CODE + len(code)] = code
    machine = PcMachine(ram, 1, find_exception_cells(), budget)
    machine.cpu.power_on(CODE, CODE, ROOT, (0, 8))
    return machine, ram


def stored(count: int, at: int, flags: int, *, in_host: bool) -> tuple[list[int], bytes, int]:
    """Run a `rep stosb`. Return the registers, the RAM, and how often the CPU reached the instruction.

    `count`: number of stored bytes. `at`: address of the first one. `flags`: the flags register before the
    instruction. `in_host`: let the host do the stores.
    """
    machine, ram = small_machine(REP_STOSB + b"\xf4")
    rounds: list[None] = []
    if in_host:
        machine.store_in_host(CODE)
    machine.call_at(CODE, lambda: rounds.append(None))
    regs = machine.regs
    regs.cx, regs.di, regs.ax, regs.flags = count, at, 0x1234, flags
    with pytest.raises(GuestFault):
        machine.run()
    found = [regs.cx, regs.di, regs.ax, regs.flags, regs.ip], ram[:], len(rounds)
    machine.close()
    return found


@pytest.mark.parametrize(
    ("count", "at", "flags"),
    [
        (0, CELL, UP),
        (1, CELL, UP),
        (3 * 4096 + 5, CELL + 77, UP),
        (5000, CELL + 77, DOWN),
        (5000, (2 << 20) - 4500, UP),
        (1 << 40, (2 << 20) - 4500, UP),
    ],
)
def test_a_store_in_the_host_is_that_of_the_guest(count: int, at: int, flags: int) -> None:
    """A repeated store by the host has the same effects as in the guest.

    The last two cases come to a page that is not mapped. The last case would store more bytes than RAM has.
    """
    in_guest, in_host = (stored(count, at, flags, in_host=value) for value in (False, True))
    assert in_guest[:2] == in_host[:2]
    if flags == UP and count < 1 << 20:
        # The first write of a large page is made by the guest.
        assert in_host[2] <= 3
        assert in_guest[2] >= min(count, 4500)


ALIAS = 0x200000
"""Address at which all memory is mapped a second time, without execution."""
SYNC, POKE, FREE, FUNCTION = 0x11000, 0x12000, 0x13000, 0x14000
RET = b"\xc3"
ROUNDS = 9


def rewriting(told: bytes, *, frees: bool) -> bytes:
    """Return code that changes FUNCTION's result through ALIAS in each round, and adds the results in rbx.

    `told`: code that passes the address and the size to __text_poke(). `frees`: free code in each round.
    """
    code = b"\xb9" + ROUNDS.to_bytes(4, "little")  # mov ecx, ROUNDS
    start = len(code)

    def call(address: int) -> bytes:
        after = CODE + len(code) + 5
        return b"\xe8" + (address - after).to_bytes(4, "little", signed=True)

    code += b"\x88\x0c\x25" + (ALIAS + FUNCTION + 1).to_bytes(4, "little")  # mov [ALIAS + FUNCTION + 1], cl
    if told:
        code += told
        code += call(POKE)
    if frees:
        code += call(FREE)
    code += call(SYNC)
    code += call(FUNCTION)
    code += b"\x01\xc3\xff\xc9\x75"  # add ebx, eax; dec ecx; jnz start
    return code + (start - len(code) - 1).to_bytes(1, "little", signed=True) + b"\xf4"


TOLD = b"\xbe" + FUNCTION.to_bytes(4, "little") + b"\xba\x08\0\0\0"
"""Machine code that passes the address FUNCTION and the size 8: mov esi, FUNCTION; mov edx, 8."""


@pytest.mark.parametrize(
    ("told", "frees", "knows", "flushes"),
    [
        (TOLD, False, True, 1),
        (TOLD, True, True, ROUNDS),
        (TOLD, False, False, ROUNDS),
        (b"", False, True, ROUNDS),
        (TOLD[:-4] + b"\1\x10\0\0", False, True, ROUNDS),
        (b"\xbe\0\0\x60\0" + TOLD[5:], False, True, ROUNDS),
    ],
    ids=["written", "freed", "unknown parameters", "not told", "more than a page", "not mapped"],
)
def test_changed_text_runs(
    monkeypatch: pytest.MonkeyPatch, told: bytes, frees: bool, knows: bool, flushes: int
) -> None:
    """After a change of text, only the written code is translated again, if its place is known and no code
    was freed.
    """
    machine, ram = small_machine(rewriting(told, frees=frees))
    ram[ROOT + 0x2008 : ROOT + 0x2010] = (1 << 63 | 0x83).to_bytes(8, "little")
    for address in (SYNC, POKE, FREE):
        ram[address : address + 1] = RET
    ram[FUNCTION : FUNCTION + 6] = b"\xb8\0\0\0\0" + RET
    symbols = {"do_sync_core": SYNC, TEXT_POKE: POKE, FREES_TEXT[1]: FREE}
    machine.follow_text(symbols, dict(zip(POKED, (1, 2), strict=True)) if knows else {})
    dropped: list[None] = []
    flush = machine.engine.flush_code
    monkeypatch.setattr(machine.engine, "flush_code", lambda: dropped.append(flush()))
    with pytest.raises(GuestFault, match="halted"):
        machine.run()
    assert (machine.regs.bx, len(dropped)) == (sum(range(ROUNDS + 1)), flushes)
    machine.close()


@pytest.fixture
def guest() -> Iterator[LinuxEngine]:
    found = engine(PLAIN)
    yield found
    found.tasks.machine.close()


def test_text_that_is_patched_while_a_client_stands_in_user_mode(guest: LinuxEngine) -> None:
    """If text is patched while a client is in user mode, old translations are dropped, and later page faults
    are handled.
    """
    tasks, calls, hits = guest.tasks, LinuxSyscalls(guest.tasks), list[int]()
    machine = tasks.machine
    in_flight = ctypes.c_int32.from_address(
        cpu_state(machine.engine, machine.model) + find_exception_cells()[1]
    )
    client = tasks.fork(tasks.init, 4001)
    names = ("vfs_write", "handle_mm_fault", "shmem_write_begin")
    places = [guest.kernel.kallsyms.lookup_name(name) for name in names]

    def write(number: int) -> None:
        fd = calls.open(client, f"/scratch/{number}", os.O_RDWR | os.O_CREAT, 0o600)
        assert calls.write(client, fd, bytes([number]) * 9000, None) == 9000
        assert calls.begin_read(client, fd, 9000, 0, may_block=True) == 9000
        assert calls.read_data(client, 9000, 9000) == bytes([number]) * 9000
        calls.close(client, fd)

    with guest.lock:
        write(1)
        for number in range(2, 8):
            probes = [
                Kprobe(addr=place, pre_handler=lambda kprobe, _: hits.append(kprobe.address))
                for place in places
            ]
            assert machine.cpu.privilege == 3
            for probe in probes:
                guest.kprobes.register_kprobe(probe)
            assert in_flight.value == NONE_IN_FLIGHT
            # Memory that this task has never touched.
            write(number)
            assert {places[0], places[2]} <= set(hits)
            hits.clear()
            assert machine.cpu.privilege == 3
            for probe in probes:
                guest.kprobes.unregister_kprobe(probe)
            write(number + 10)
            assert not hits
    assert not guest.machine.text.ledger


def test_a_copy_behind_the_cpu_state_is_no_second_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """WordSearch finds only the word in the CPU's structure, even if reading the CPU's state leaves a copy
    right after it.
    """
    memory = (ctypes.c_uint64 * (2 * STATE_SIZE // 8))()
    state = ctypes.addressof(memory)

    def read_behind(address: int, size: int) -> bytes:
        ctypes.memmove(state + 2048, own_memory(address, size), size)
        return own_memory(address, size)

    monkeypatch.setattr(pc_cpu_state, "own_memory", read_behind)
    search = WordSearch(state)
    for value in (0x12345678, 0x87654321, 0x12345678):
        memory[83] = value
        search.keep(value)
    assert search.offset("the only word that changes") == 8 * 83
