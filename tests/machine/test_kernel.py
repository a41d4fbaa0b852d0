"""The machine with the real kernel: it boots, idles, runs functions and survives their faults."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.traps.trap import GuestFault, Trap, TrapKind
from emulated_kernel.util.abi import PARK, Hypercall, Vector
from emulated_kernel.util.config import MachineConfig
from tests.ledger import ledger_mismatches

AT_FDCWD = -100 & 0xFFFFFFFF


@pytest.fixture(scope="module", params=["x86_64", "i386", "riscv64", "riscv64i"])
def image(request: pytest.FixtureRequest) -> Any:
    return load_image(None, request.param)


@pytest.fixture(params=[True, False], ids=["fast", "api"])
def machine(request: pytest.FixtureRequest, image: Any) -> Iterator[Machine]:
    with Machine(MachineConfig(arch=image.arch, fast_registers=request.param), image) as machine:
        yield machine


def _number(machine: Machine, name: str) -> int:
    return machine.image.abi[f"nr.{name}"]


def _address(machine: Machine, name: str) -> int:
    address = machine.image.kallsyms.lookup_name(name)
    assert address is not None
    return address


def _idle(machine: Machine) -> Trap:
    """Park each task that asks for its next system call, until nothing is runnable."""
    trap = machine.run()
    while trap.number == Hypercall.USER:
        machine.answer(PARK, 0)
        trap = machine.run()
    assert (trap.kind, trap.number) == (TrapKind.HYPERCALL, Hypercall.IDLE)
    return trap


def test_boots_to_idle(machine: Machine) -> None:
    _idle(machine)
    assert machine.interrupts_enabled
    assert ledger_mismatches(machine.text) == []


def test_system_call_and_its_fault(machine: Machine) -> None:
    """getpid works in init; write(2) from an unmapped user address ends in EFAULT by the exception table."""
    assert machine.run().number == Hypercall.USER
    machine.answer(_number(machine, "getpid"))
    trap = machine.run()
    assert (trap.number, trap.args[0]) == (Hypercall.USER, 1)
    path = machine.user_buffers.alloc(64)
    machine.memory.write(path, b"/scratch/file\0")
    machine.answer(_number(machine, "openat"), AT_FDCWD, path, 0o102, 0o644)
    descriptor = machine.run().args[0]
    assert descriptor < 1024
    machine.answer(_number(machine, "write"), descriptor, path, 13)
    assert machine.run().args[0] == 13
    unmapped = machine.model.layout.user_buffers // 2
    for _ in range(3):
        machine.answer(_number(machine, "write"), descriptor, unmapped, 8)
        assert machine.run().args[0] == (1 << machine.model.bits) - 14
    assert _idle(machine).kind is TrapKind.HYPERCALL


def test_timer_interrupts_return_to_idle(machine: Machine) -> None:
    _idle(machine)
    before = machine.regs.sp
    for _ in range(20):
        machine.deliver(Vector.TIMER)
        assert machine.run().number == Hypercall.IDLE
    assert machine.regs.sp == before


def test_calls_functions(machine: Machine) -> None:
    _idle(machine)
    text = machine.alloc_pages(64)
    machine.memory.write(text, b"kprobes\0")
    assert machine.call(_address(machine, "strlen"), text) == 7
    with pytest.raises(GuestFault) as caught:
        machine.call(_address(machine, "strlen"), 0x1000)
    assert (caught.value.trap.vector, caught.value.trap.cr2) == (Vector.PAGE_FAULT, 0x1000)
    assert machine.run().number == Hypercall.IDLE


def test_arguments_on_the_stack(machine: Machine) -> None:
    """Arguments are passed on the stack if i386 has too few registers for them, or if the function is
    variadic.
    """
    _idle(machine)
    page = machine.alloc_pages(64)
    machine.memory.write(page, b"%d %d %d\0")
    length = machine.call(_address(machine, "snprintf"), page + 32, 20, page, 1, 22, 333, variadic=True)
    assert (length, machine.memory.read(page + 32, 9)) == (8, b"1 22 333\0")
    numbers = (7, 3, 9, 1, 8)
    machine.memory.write(page, struct.pack("<5i", *numbers))
    machine.call(_address(machine, "sort"), page, len(numbers), 4, _address(machine, "cmpint"), 0)
    assert struct.unpack("<5i", machine.memory.read(page, 20)) == tuple(sorted(numbers))
    with pytest.raises(TypeError):
        machine.call(_address(machine, "strlen"), *range(7))


def test_breakpoint_on_a_function(machine: Machine) -> None:
    _idle(machine)
    text = machine.alloc_pages(64)
    strlen = _address(machine, "strlen")
    hits = []

    def hit(regs: Any) -> None:
        hits.append(regs.get(machine.model.arguments[0]))
        if "ra" in machine.model.registers:
            regs.ip = regs.ra
        else:
            regs.ip = machine.memory.read_word(regs.sp)
            regs.sp += machine.memory.word_size
        regs.set(machine.model.result, 99)

    machine.breakpoints[strlen] = hit
    machine.text.poke(strlen, machine.model.filler)
    assert machine.call(strlen, text) == 99
    machine.text.poke(strlen, machine.text.original(strlen, len(machine.model.filler)))
    assert machine.call(strlen, text) == 0
    assert hits == [text]
    assert machine.text.ledger == {}
