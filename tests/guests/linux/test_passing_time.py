"""Guest time that passes between requests to a distribution's kernel with its own kprobes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.guest.passing_time import RealTime
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.pc.devices import TSC_KHZ
from emulated_kernel.guests.linux.pc.linux_cpu import PcCpu
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.util.abi import Vector
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files
from tests.guests.linux.parts import guest_of

CLIENT = Client(500, 0, 0)
FILE = "/scratch/file"
TICK = 4
"""Milliseconds of guest time between two ticks."""
SOON = 64
"""Number of requests within which a probe is optimized: five ticks, and a grace period of RCU."""
SECOND = 250
"""Number of requests in a second of the guest's time."""


class Shell(Files):
    """A client of a kernel that uses its own kprobes."""

    def __init__(self, *, is_clock_real: bool = False) -> None:
        tasks = debian_kernel.tasks()
        mount = native_mount(
            tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False, is_clock_real=is_clock_real
        )
        super().__init__(mount, CLIENT)
        self.tasks = tasks
        handle = mount.create(CLIENT, FILE, 0o600, os.O_WRONLY)
        mount.write(CLIENT, handle, b"hello", 0)
        mount.release(handle)

    def symbol(self, name: str) -> int:
        found = re.search(rf"^([0-9a-f]+) \w {name}$", self.read("/machine/kallsyms"), re.MULTILINE)
        assert found is not None
        return int(found[1], 16)

    def calls_of(self, function: str) -> list[None]:
        """Return a list that gets one item at each call of `function`."""
        calls: list[None] = []
        address = self.symbol(function)
        with guest_of(self.mount).lock:
            self.tasks.machine.call_at(address, lambda: calls.append(None))
        return calls

    def define(self) -> int:
        """Define the event `a` on vfs_read after the fentry site, and return the offset."""
        for offset in (5, 9):
            with suppress(KernelError):
                self.write("/tracing/kprobe_events", f"p:a vfs_read+{offset}\n")
                return offset
        raise AssertionError("vfs_read has no instruction behind the site")

    def traps(self) -> Callable[[], int]:
        """Return a function that returns the number of breakpoints that the guest has executed since this
        call.
        """
        traps: list[None] = []
        cpu = self.tasks.machine.cpu
        assert isinstance(cpu, PcCpu)
        hooks = self.tasks.machine.hooks
        native = hooks.native_traps
        deliver = cpu.interrupt

        def interrupt(vector: int, error_code: int | None = None) -> None:
            if vector == Vector.BREAKPOINT:
                traps.append(None)
            deliver(vector, error_code)

        cpu.interrupt = interrupt  # type: ignore[method-assign]
        return lambda: len(traps) + hooks.native_traps - native

    def use(self) -> None:
        """Open, read and close a file, which hits a probe on vfs_read twice."""
        handle = self.mount.open(CLIENT, FILE, os.O_RDONLY)
        assert self.mount.read(CLIENT, handle, 100, 0) == b"hello"
        assert self.mount.read(CLIENT, handle, 100, 5) == b""
        self.mount.release(handle)

    @property
    def milliseconds(self) -> float:
        return self.tasks.machine.pc.tsc / TSC_KHZ

    def marked(self) -> list[float]:
        """Return the times of the markers in the trace, in seconds."""
        found = re.findall(r"(\d+\.\d+): tracing_mark_write", self.read("/tracing/trace"))
        return [float(each) for each in found]


@pytest.fixture
def shell() -> Iterator[Shell]:
    found = Shell()
    yield found
    log = found.read("/machine/dmesg")
    assert "WARN" not in log
    assert "BUG" not in log
    assert "stall" not in log
    found.mount.close()


def test_a_probe_that_is_said_to_be_optimized_is_a_jump_soon_and_traps_no_more(shell: Shell) -> None:
    offset = shell.define()
    traps = shell.traps()
    shell.write("/tracing/events/kprobes/a/enable", "1")
    assert f"vfs_read+{offset:#x}    [OPTIMIZED]" in shell.read("/kprobes/list")
    address = shell.symbol("vfs_read") + offset
    hits = int(shell.read("/kprobe_profile").split()[1])
    assert hits > 0
    for _ in range(SOON // 3):
        shell.use()
    assert shell.tasks.machine.memory.read(shell.tasks.root, address, 1) == b"\xe9"
    before = traps()
    assert before > 0
    hits = int(shell.read("/kprobe_profile").split()[1])
    for _ in range(20):
        shell.use()
    # Reading the profile makes two further hits: one returns the text, and the second one finds the end.
    assert int(shell.read("/kprobe_profile").split()[1]) == hits + 2 * 20 + 2
    assert traps() == before
    shell.write("/tracing/events/kprobes/a/enable", "0")
    for _ in range(SOON // 3):
        shell.use()
    assert shell.tasks.machine.memory.read(shell.tasks.root, address, 1) != b"\xe9"


def test_each_request_takes_a_tick_but_lookups_listings_and_closes_take_none(shell: Shell) -> None:
    handle = shell.mount.open(CLIENT, FILE, os.O_RDONLY)
    began = shell.milliseconds
    for _ in range(10):
        shell.mount.read(CLIENT, handle, 100, 0)
    passed = shell.milliseconds - began
    assert 10 * TICK <= passed < 20 * TICK + 20
    began = shell.milliseconds
    for _ in range(10):
        shell.mount.getattr(FILE)
        shell.mount.readdir("/scratch")
        shell.mount.statfs("/scratch")
    shell.mount.release(handle)
    assert shell.milliseconds - began < TICK


def test_the_kernel_counts_the_ticks_that_pass(shell: Shell) -> None:
    """The kernel's uptime advances by the ticks of requests, also if the guest has no turn between the
    requests.
    """
    shell.write("/tracing/trace_clock", "uptime")
    shell.write("/tracing/trace_marker", "first")
    handle = shell.mount.open(CLIENT, FILE, os.O_RDONLY)
    for _ in range(100):
        shell.mount.read(CLIENT, handle, 100, 0)
    shell.write("/tracing/trace_marker", "last")
    first, last = (
        int(each) for each in re.findall(r"(\d+): tracing_mark_write", shell.read("/tracing/trace"))
    )
    # The unit is 10 ms.
    assert 100 * TICK // 10 - 1 <= last - first <= 100 * TICK // 10 + 10


def test_delayed_work_and_rcu_callbacks_have_their_turn(shell: Shell) -> None:
    freed = shell.calls_of("i_callback")
    worked = shell.calls_of("vmstat_shepherd")
    for _ in range(SECOND):
        shell.mount.release(shell.mount.create(CLIENT, "/scratch/other", 0o600, os.O_WRONLY))
        shell.mount.unlink(CLIENT, "/scratch/other")
        shell.mount.mkdir(CLIENT, "/scratch/directory", 0o700)
        shell.mount.rmdir(CLIENT, "/scratch/directory")
    # A round removes two inodes. The last inodes wait for a grace period.
    assert SECOND <= len(freed) <= 2 * SECOND
    # This work queues itself again each second, and may be late. Four seconds have passed.
    assert 1 <= len(worked) <= 5


def test_the_same_requests_give_the_same_trace_whatever_time_they_take() -> None:
    traces = []
    for pause in (0.0, 0.2):
        shell = Shell()
        shell.define()
        shell.write("/tracing/kprobe_events", "r:b vfs_read\n", os.O_WRONLY | os.O_APPEND)
        shell.write("/tracing/events/kprobes/enable", "1")
        shell.write("/tracing/events/timer/timer_expire_entry/enable", "1")
        for _ in range(SECOND // 2):
            shell.use()
        time.sleep(pause)
        for _ in range(SECOND // 2):
            shell.use()
        shell.write("/tracing/tracing_on", "0")
        traces.append(shell.read("/tracing/trace"))
        shell.mount.close()
    assert "timer_expire_entry" in traces[0]
    assert traces[0] == traces[1]


def test_a_dead_guest_answers_eio(shell: Shell) -> None:
    handle = shell.mount.open(CLIENT, FILE, os.O_RDONLY)
    shell.tasks.machine.death = "a test"
    for _ in range(SECOND + 1):
        with pytest.raises(OSError, match="the guest has died"):
            shell.mount.read(CLIENT, handle, 100, 0)
    shell.tasks.machine.death = ""


def test_with_the_real_clock_pauses_pass_in_the_guest() -> None:
    shell = Shell(is_clock_real=True)
    for pause in (0.3, 0.0):
        began = time.monotonic()
        shell.write("/tracing/trace_marker", "before")
        time.sleep(pause)
        shell.write("/tracing/trace_marker", "after")
        took = time.monotonic() - began
        before, after = shell.marked()[-2:]
        assert pause <= after - before + 0.001
        assert after - before <= took + 0.1
    shell.mount.close()


def test_with_the_real_clock_the_guest_works_in_pauses_of_which_a_second_counts() -> None:
    shell = Shell()
    now = 0
    worked = shell.calls_of("vmstat_shepherd")
    real = RealTime(shell.tasks, lambda: now)
    for pause, passes in ((300, 300), (2, 2), (1000, 1000), (3_600_000, 1000), (10, 10)):
        began = shell.milliseconds
        now += pause * 1_000_000
        with guest_of(shell.mount).lock:
            real.request_begins()
        assert shell.milliseconds - began == pytest.approx(passes, abs=1)
    assert worked
    shell.mount.close()


def test_with_the_real_clock_time_follows_the_host_after_the_guest_has_slept() -> None:
    """With the real clock, durations are those of the host, also after the guest has slept for a change of
    definitions.

    The host does not wait for such a sleep.
    """
    shell = Shell(is_clock_real=True)
    now = 0
    shell.tasks.machine.pc.follow_wall(lambda: now)
    began = shell.milliseconds
    shell.write("/tracing/kprobe_events", "p:in vfs_write")
    for switch in "1010":
        shell.write("/tracing/events/kprobes/in/enable", switch)
    assert shell.milliseconds - began > 10
    shell.write("/tracing/trace_marker", "first")
    for passed in (1, 2, 3, 50):
        now += passed * 1_000_000
        shell.write("/tracing/trace_marker", "next")
        before, after = shell.marked()[-2:]
        assert (after - before) * 1000 == pytest.approx(passed, abs=0.1)
    shell.mount.close()


def test_the_real_clock_of_probes_is_that_of_the_host() -> None:
    """With the real clock, each reading follows the host's time, also within one run of the guest."""
    tasks, kernel = debian_kernel.with_kernel()
    now = 5_000_000
    tasks.machine.pc.follow_wall(lambda: now)
    engine = LinuxEngine(tasks, kernel)
    clock = engine.machine.clock
    assert not clock.is_virtual
    # Handlers in guest code could not read this time.
    assert not engine.components.tracing.guest_records.can_tell_time
    began = clock.read_ns()
    for passed in (3_000_000, 1_000, 250_000_000):
        before = clock.read_ns()
        now += passed
        assert clock.read_ns() - before == pytest.approx(passed, abs=200)
    # A reading advances the clock, even if the host's time stands still.
    first = clock.read_ns()
    assert clock.read_ns() > first > began
