"""The model clock: time is exactly the number of executed instructions, plus charges for traps and
handlers.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

import pytest

from emulated_kernel.guests.linux.pc.board import CountedTime
from emulated_kernel.guests.linux.pc.devices import TSC_KHZ, Pc
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.instruction_time import HANDLER_NS, TRAP_NS
from emulated_kernel.machine.interrupts.trap_handlers import Redirect
from emulated_kernel.machine.native import host_code
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.optimizer.test_in_kernel import ROOT, Files

pytestmark = pytest.mark.skipif(
    host_code.routine_address("count") is None, reason="there is no routine for this kind of host"
)
INSIDE = {"x86_64": 5, "riscv64": 8}
"""Architecture -> offset in gcd of a place that a call passes once, with a breakpoint and a step."""


@pytest.fixture(scope="module", params=INSIDE)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param, clock="model")) as kernel:
        kernel.call("gcd", 12, 18)
        yield kernel


def took(kernel: Kernel, name: str, *arguments: int | bytes) -> int:
    """Return the nanoseconds of a call."""
    before = kernel.machine.clock.now_ns()
    kernel.call(name, *arguments)
    return kernel.machine.clock.now_ns() - before


def test_time_is_the_number_of_instructions(kernel: Kernel) -> None:
    with Kernel(MachineConfig(arch=kernel.config.arch)) as other:
        counted = other.machine.count_instructions()
        for arguments in ((0, b"x" * 10, 10), (0, b"x" * 1000, 1000)):
            for known in (kernel, other):
                known.call("crc32_le", *arguments)
            before = counted.value
            other.call("crc32_le", *arguments)
            assert took(kernel, "crc32_le", *arguments) == counted.value - before + TRAP_NS


def test_a_hit_takes_its_traps_and_its_handler(kernel: Kernel) -> None:
    usual = took(kernel, "gcd", 12, 18)
    if kernel.kprobes.optimizer is not None:
        kernel.allow_optimization(False)
    probe = Kprobe("gcd", offset=INSIDE[kernel.config.arch], pre_handler=lambda _kprobe, _regs: None)
    kernel.register_kprobe(probe)
    try:
        with_handler = {took(kernel, "gcd", 12, 18) - usual for _ in range(3)}
    finally:
        kernel.unregister_kprobe(probe)
    # Two breakpoints are executed: the probe's, and the one at the end of the step.
    assert with_handler == {2 * TRAP_NS + HANDLER_NS + 2}
    assert took(kernel, "gcd", 12, 18) == usual


@pytest.mark.parametrize("kernel", ["x86_64"], indirect=True)
def test_a_trap_without_python_takes_no_handler(kernel: Kernel) -> None:
    machine = kernel.machine
    address = kernel.kallsyms_lookup_name("gcd") + INSIDE[kernel.config.arch]
    original = machine.text.current(address, 4)
    usual = took(kernel, "gcd", 12, 18)
    slot = machine.text.alloc_text(64)
    back = kernel.arch.relative_jump
    insn = kernel.arch.instruction_boundaries(original, address)[1] - address
    with kernel.lock:
        machine.text.poke(slot, original[:insn] + back(slot + insn, address + insn))
        machine.text.poke(address, kernel.arch.breakpoint)
        machine.breakpoints[address] = Redirect(slot, lambda _regs: pytest.fail("Python got the trap"))
    try:
        native = took(kernel, "gcd", 12, 18)
    finally:
        with kernel.lock:
            del machine.breakpoints[address]
            machine.text.poke(address, original)
            machine.text.free_text(slot)
    # The breakpoint and the jump back are executed in addition.
    assert native - usual == TRAP_NS + 2


def test_copies_take_the_time_of_their_words(kernel: Kernel) -> None:
    mount = kernel.mount()
    handle = mount.create(ROOT, "/scratch/copied", 0o644, os.O_RDWR)
    times = []
    for size in (8, 8, 3000):
        before = kernel.machine.clock.now_ns()
        mount.write(ROOT, handle, b"x" * size, 0)
        times.append(kernel.machine.clock.now_ns() - before)
    mount.release(handle)
    assert times[2] - times[1] >= 3000 // 8


def test_the_same_requests_have_the_same_times() -> None:
    texts = []
    for _ in range(2):
        with Kernel(MachineConfig(clock="model", seed=3)) as kernel:
            files = Files(kernel)
            files.write("/kprobe_events", "p:in gcd+5 a=%di\nr:out gcd got=$retval\n")
            files.write("/tracing/events/kprobes/enable", "1")
            for number in range(1, 30):
                kernel.call("gcd", 12 * number, 18)
            texts.append(files.read("/tracing/trace"))
    assert texts[0] == texts[1]
    assert texts[0].count(": out: ") == 29


def test_switched_on_and_off_by_the_file() -> None:
    with Kernel(MachineConfig()) as kernel:
        files = Files(kernel)
        kernel.call("crc32_le", 0, b"x" * 100, 100)
        usual = took(kernel, "crc32_le", 0, b"x" * 100, 100)
        files.write("/machine/clock", "model")
        assert files.read("/machine/clock").startswith("mode model\n")
        assert took(kernel, "crc32_le", 0, b"x" * 100, 100) > usual
        files.write("/machine/clock", "virtual")
        assert took(kernel, "crc32_le", 0, b"x" * 100, 100) == usual


def test_refused_where_it_is_not_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="i386") as caught:
        Kernel(MachineConfig(arch="i386", clock="model"))
    assert caught.value.errno == errno.EOPNOTSUPP
    monkeypatch.setenv(host_code.PYTHON_TRAPS, "1")
    with pytest.raises(KernelError, match="routine") as caught:
        Kernel(MachineConfig(clock="model"))
    assert caught.value.errno == errno.EOPNOTSUPP


def test_a_distributions_kernel_reads_counted_time() -> None:
    """The TSC of a distribution's kernel follows counted nanoseconds and loses no cycle.

    Readings take no time.
    """
    pc = Pc(1)
    counted = CountedTime(TSC_KHZ)
    pc.follower = counted
    pc.counts_instructions = True
    begun = pc.tsc
    cell = ctypes.c_uint64.from_address(counted.host_address)
    for _ in range(1000):
        cell.value += 7
        pc.read_tsc()
    assert pc.tsc - begun == 7000 * TSC_KHZ // 10**6
    assert pc.read_tsc() == pc.read_tsc()
