"""Interrupts from the keyboard during a machine's run."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.interrupts.trap_handlers import Redirect
from emulated_kernel.machine.traps.trap import TrapKind
from tests.machine.guests import CODE, boot
from tests.machine.native.host_cpu import NEEDS_ROUTINE

pytestmark = NEEDS_ROUTINE


def unexpected(_regs: Regs) -> None:
    raise AssertionError("Python got the trap")


def interrupt_after(seconds: float, times: int) -> threading.Thread:
    """Send SIGINT to the process, as a terminal does, from another thread.

    `seconds`: CPU time of this thread until the first signal. Each signal is delivered before the next one.
    """
    clock = time.pthread_getcpuclockid(threading.get_ident())
    first = time.clock_gettime(clock) + seconds

    def is_pending() -> bool:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return any(
            int(mask, 16) >> signal.SIGINT - 1 & 1 for mask in re.findall(r"^ShdPnd:\s+(\w+)", status, re.M)
        )

    def send() -> None:
        while time.clock_gettime(clock) < first:
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            while is_pending():
                time.sleep(0.01)

    sender = threading.Thread(target=send)
    sender.start()
    return sender


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("native", [True, False])
def test_a_second_interrupt_ends_a_run_without_python(native: bool) -> None:
    """A second SIGINT ends a run that would take a minute, with and without native traps. Later runs work."""
    machine = boot("int3; mov ebx, 7; hlt", run_budget=60, fast_registers=native)
    machine.breakpoints[CODE] = Redirect(CODE, lambda regs: regs.set("ip", CODE))
    started = time.monotonic()
    sender = interrupt_after(0.2, 2)
    with pytest.raises(KeyboardInterrupt):
        machine.run()
    sender.join()
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
    sender = interrupt_after(0.1, 1)
    trap = machine.run()
    sender.join()
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
