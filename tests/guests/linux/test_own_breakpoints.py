"""The host's routine that delivers breakpoints of the kernel's own kprobes: the guest cannot notice the
routine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import pytest

from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.initramfs import BUFFER
from emulated_kernel.guests.linux.pc.linux_cpu import PcCpu
from emulated_kernel.machine.native import host_code
from emulated_kernel.machine.traps.trap import GuestFault, TrapKind
from emulated_kernel.util.errors import KernelError
from tests.guests.linux import debian_kernel

pytestmark = pytest.mark.skipif(
    host_code.routine_address("x86") is None, reason="there is no routine for this kind of host"
)
_PREAD = 17
HITS = 50
OFFSETS = (5, 9)
"""Offsets after the fentry site, without and with an endbr64 before the site."""
BEGUN = "p:begun vfs_read+%d fl=%%flags sp=%%sp cs=%%cs ss=%%ss ip=%%ip dx=%%dx\n"
ENDED = b"r:ended vfs_read ret=$retval fl=%flags sp=%sp\n"


class Probed:
    """A guest with kprobes of its own kernel that use int3, and system calls that hit these probes."""

    def __init__(self) -> None:
        self.tasks: LinuxTasks = debian_kernel.tasks()
        self._calls = LinuxSyscalls(self.tasks)
        self._init = self.tasks.init
        self._file = self._calls.open(self._init, "/init", os.O_RDONLY)
        self.write("/proc/sys/debug/kprobes-optimization", b"0", os.O_WRONLY)
        assert any(self.define(offset) for offset in OFFSETS)
        self.write("/tracing/kprobe_events", ENDED)

    def define(self, offset: int) -> bool:
        with suppress(KernelError):
            self.write("/tracing/kprobe_events", (BEGUN % offset).encode())
            return True
        return False

    def write(self, path: str, data: bytes, flags: int = os.O_WRONLY | os.O_APPEND) -> None:
        handle = self._calls.open(self._init, path, flags)
        self._calls.write(self._init, handle, data, None)
        self._calls.close(self._init, handle)

    def enable(self, on: bool) -> None:
        self.write("/tracing/events/kprobes/enable", b"1" if on else b"0", os.O_WRONLY)

    def read(self, size: int) -> None:
        self.tasks.call(self._init, _PREAD, self._file, BUFFER, size, 0)

    def timed_records(self) -> list[str]:
        """Clear the trace, hit the probes, and return the new records."""
        self._calls.close(
            self._init, self._calls.open(self._init, "/tracing/trace", os.O_WRONLY | os.O_TRUNC)
        )
        self.enable(True)
        for number in range(HITS):
            self.read(number * 97 % 4000 + 1)
        self.enable(False)
        lines = self._calls.read_all("/tracing/trace").decode().splitlines()
        # Other system calls read and write the control files in between.
        return [line for line in lines if "vfs_read" in line]

    def records(self) -> list[str]:
        """Return new records without their times."""
        return [line.partition(": ")[2] for line in self.timed_records()]


@pytest.fixture
def probed() -> Iterator[Probed]:
    probed = Probed()
    yield probed
    probed.tasks.machine.close()


def test_records_are_those_of_exceptions_that_python_delivers(probed: Probed) -> None:
    machine = probed.tasks.machine
    expected = probed.records()
    assert machine.hooks.native_traps == 0
    probed.tasks.deliver_breakpoints()
    assert machine.delivers_breakpoints
    assert probed.records() == expected
    assert len(expected) >= 2 * HITS
    # An int3 hit has a second breakpoint after the copied instruction, where it is not boosted.
    assert machine.hooks.native_traps >= 2 * HITS


@contextmanager
def reads_of_time() -> Iterator[list[str]]:
    """Yield a list that gets one item per call of Python's callback for rdtsc during the block."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_qualname.endswith("_hook_instructions.<locals>.rdtsc"):
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


def test_times_are_those_of_an_rdtsc_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's routine for rdtsc calls no Python, and returns the same time as Python, to the cycle."""
    found = []
    for in_python in ("", "1"):
        monkeypatch.setenv(host_code.PYTHON_TRAPS, in_python)
        probed = Probed()
        with reads_of_time() as called:
            records = probed.timed_records()
        assert len(called) >= 2 * HITS if in_python else called == []
        found.append((records, probed.tasks.machine.pc.state()))
        probed.tasks.machine.close()
    assert found[0] == found[1]
    assert len(found[0][0]) >= 2 * HITS


def test_breakpoints_in_user_mode_and_other_exceptions_stay_pythons(probed: Probed) -> None:
    machine = probed.tasks.machine
    probed.tasks.deliver_breakpoints()
    words = machine.hooks.words
    table = words.gate_low
    words.gate_low = table ^ 1
    expected = machine.hooks.native_traps
    probed.records()
    assert machine.hooks.native_traps == expected, "the gate is another one"
    words.gate_low = table
    probed.records()
    assert machine.hooks.native_traps > expected


def test_a_breakpoint_without_a_stack_is_a_double_fault(probed: Probed) -> None:
    """A breakpoint whose frame cannot be pushed on the stack is a double fault, like any other such
    exception.
    """
    machine = probed.tasks.machine
    probed.tasks.deliver_breakpoints()
    text, entry = probed.tasks._thunk.stub_text
    # Behind the stub: mov rsp, 64; int3
    machine.memory.ram[text + 0x80 : text + 0x88] = bytes.fromhex("48c7c440000000cc")
    with machine.cpu.as_kernel():
        machine.regs.ip = entry + 0x80
    assert isinstance(machine.cpu, PcCpu)
    machine.cpu.interrupt(3)
    machine.regs.ip = entry + 0x80
    with pytest.raises(GuestFault, match="no stack for exception 3") as caught:
        machine.run()
    assert caught.value.trap.kind is TrapKind.DOUBLE_FAULT
