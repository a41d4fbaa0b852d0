"""What the emulator leaves behind, where Debian's kernel could meet it: stops, and text in user mode."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest

from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.pc.exception_cells import cpu_state, find_exception_cells
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.interrupts.exceptions import NONE_IN_FLIGHT
from emulated_kernel.machine.traps.trap import GuestFault
from tests.guests.linux.probing import PLAIN, engine

ADDS = b"\xf0\x48\xff\x03\xeb\xfa"
"""lock inc qword [rbx], and back to it."""
CODE, CELL, ROOT = 0x10000, 0x20000, 0x1000


def test_a_run_that_was_stopped_from_outside_does_not_go_on() -> None:
    """Its store in flight may be done again: nobody sees what comes of that."""
    ram = mmap.mmap(-1, 4 << 20)
    ram[ROOT : ROOT + 8] = (0x2003).to_bytes(8, "little")
    ram[0x2000:0x2008] = (0x3003).to_bytes(8, "little")
    ram[0x3000:0x3008] = (0x83).to_bytes(8, "little")
    ram[CODE : CODE + len(ADDS)] = ADDS
    machine = PcMachine(ram, 1, find_exception_cells(), 0.1)
    machine.cpu.power_on(CODE, CODE, ROOT, (0, 8))
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


@pytest.fixture
def guest() -> Iterator[LinuxEngine]:
    found = engine(PLAIN)
    yield found
    found.tasks.machine.close()


def test_text_that_is_patched_while_a_client_stands_in_user_mode(guest: LinuxEngine) -> None:
    """What was translated of it is dropped, and the next page fault is a page fault."""
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
