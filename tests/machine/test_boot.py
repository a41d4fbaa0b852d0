"""The machine comes up, and its self-test passes in both register modes."""

from __future__ import annotations

import struct

import pytest

from emulated_kernel.machine.cpu.registers import FastRegs
from emulated_kernel.machine.cpu.x86_64 import X86_64Cpu
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.quirks import harness
from emulated_kernel.machine.quirks.harness import find_cpu_state
from emulated_kernel.machine.traps.trap import GuestFault, HardwareError, TrapKind
from emulated_kernel.machine.unicorn_engine import Engine
from emulated_kernel.util.abi import Hypercall
from emulated_kernel.util.config import MachineConfig
from tests.machine.guests import CODE, DATA, LAYOUT, FakeImage, asm, boot


@pytest.mark.parametrize("fast", [True, False])
def test_boots_and_passes_its_self_test(fast: bool) -> None:
    machine = boot(fast_registers=fast)
    results = {test.name: test.outcome.value for test in machine.self_test}
    assert results.pop("find_cpu_state") == ("ok" if fast else "fallback")
    assert set(results.values()) == {"ok"}
    assert len(results) == 9


def test_looking_for_registers_leaves_them_as_they_were() -> None:
    cpu = X86_64Cpu()
    engine = Engine(*cpu.engine_mode)
    engine.reg_write(cpu.registers["r12"], 5)
    assert find_cpu_state(engine, cpu) is not None
    left = {name: engine.reg_read(number) for name, number in cpu.registers.items()}
    engine.close()
    assert left.pop("r12") == 5
    assert set(left.values()) == {0}


def test_registers_that_are_elsewhere_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live registers are found even if they are at another place in the engine than those of the last
    engine.
    """
    cpu = X86_64Cpu()
    for place in ((0, 0), (1, 1 << 62), (2, -8)):
        engine = Engine(*cpu.engine_mode)
        monkeypatch.setitem(harness._REGISTERS, cpu.name, place)
        found = find_cpu_state(engine, cpu)
        assert found is not None
        assert found == find_cpu_state(engine, cpu)
        assert harness._REGISTERS[cpu.name] != place
        engine.close()


def test_hypercall_and_answer() -> None:
    machine = boot("mov eax, 2; mov rdi, 11; mov rsi, 12; mov rdx, 13; mov r10, 14; hlt; mov rbx, rax; hlt")
    trap = machine.run()
    assert (trap.kind, trap.number, trap.args) == (TrapKind.HYPERCALL, Hypercall.USER, (11, 12, 13, 14))
    machine.answer(7, 1, 2, 3, 4, 5, 6)
    regs = machine.regs
    assert (regs.ax, regs.di, regs.si, regs.dx, regs.r10, regs.r8, regs.r9) == (7, 1, 2, 3, 4, 5, 6)
    machine.run()
    assert regs.bx == 7
    assert (regs.cs, regs.ss) == (0x10, 0x18)


@pytest.mark.parametrize("fast", [True, False])
def test_two_machines_do_not_share_registers(fast: bool) -> None:
    one = boot("mov rax, 1; hlt", fast_registers=fast)
    two = boot("mov rax, 2; hlt", fast_registers=fast)
    one.run()
    two.run()
    assert (one.regs.ax, two.regs.ax) == (1, 2)
    one.close()
    assert two.regs.ax == 2
    for use in (lambda: one.regs.ax, lambda: one.regs.flags, one.regs.snapshot):
        with pytest.raises(AttributeError):
            use()


def test_live_registers_are_found_beside_those_of_other_machines() -> None:
    """Live registers are found, although other engines, living and freed, and saved contexts leave similar
    memory.
    """
    for number in range(12):
        machine = boot("nop; hlt")
        assert isinstance(machine.regs, FastRegs)
        if number % 3 == 2:
            machine.close()


def test_kernel_that_does_not_boot_is_a_guest_fault() -> None:
    image = FakeImage(handler=None)
    image.entry = CODE  # int3 bytes
    with pytest.raises(GuestFault, match="vector 3"):
        Machine(MachineConfig(), image)


def test_image_that_does_not_fit_is_refused() -> None:
    with pytest.raises(HardwareError, match="does not fit"):
        Machine(MachineConfig(ram_size=16 << 20), FakeImage())


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(HardwareError, match="no machine for mips"):
        Machine(MachineConfig(arch="mips"), FakeImage(arch="mips"))


def test_boot_parameters_and_registers_at_the_entry() -> None:
    image = FakeImage(asm("mov r15, rsp; mov r14, rdi; mov eax, 5; hlt"))
    image.entry = CODE
    image.abi = {"init_stack.top": DATA + 0x4000, "percpu.base": DATA + 0x3000}
    with Machine(MachineConfig(seed=77, cpus=2), image) as machine:
        regs, memory = machine.regs, machine.memory
        assert regs.r15 == DATA + 0x4000
        assert machine.cpus[0].per_cpu_base == DATA + 0x3000
        fields = struct.unpack("<QQQIIQQ", memory.read(regs.r14, 48))
        assert fields == (0x1009000, memory.host_pages.base, LAYOUT.direct_map, 2, 250, 0, 77)
        assert not regs.flags & 0x200


def test_per_cpu_contexts() -> None:
    machine = boot("mov rax, 1; cmp rax, 2; hlt; mov rax, 9; hlt")
    machine.run()
    (cpu,) = machine.cpus
    cpu.per_cpu_base = 0x1234
    cpu.save()
    state = machine.regs.snapshot()
    machine.run()
    cpu.per_cpu_base = 0x5678
    assert machine.regs.ax == 9
    cpu.restore()
    assert (machine.regs.snapshot(), cpu.per_cpu_base) == (state, 0x1234)


def test_missing_library_is_a_hardware_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulated_kernel.machine.unicorn_engine._library_path", lambda: "no-such-library.so")
    with pytest.raises(HardwareError, match="no unicorn library"):
        boot()
