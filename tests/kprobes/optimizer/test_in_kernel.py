"""The optimizer in a running kernel: its effects on time, stacks, trace records and files."""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from emulated_kernel.guests.common import request_clock
from emulated_kernel.guests.common.request_clock import NSEC_PER_JIFFY, RequestClock
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from tests.kprobes.optimizer.conftest import GCD_HEAD, Probed

ROOT = Client(pid=0, uid=0, gid=0)


class Files:
    """Files of a kernel, used without FUSE. Each read and each write opens and closes the file."""

    def __init__(self, kernel: Kernel) -> None:
        self._mount = kernel.mount()

    def write(self, path: str, text: str) -> None:
        handle = self._mount.open(ROOT, path, 1)
        try:
            self._mount.write(ROOT, handle, text.encode(), 0)
        finally:
            self._mount.release(handle)

    def read(self, path: str) -> str:
        handle = self._mount.open(ROOT, path, 0)
        try:
            return self._mount.read(ROOT, handle, 1 << 16, 0).decode()
        finally:
            self._mount.release(handle)


@pytest.fixture
def files(probed: Probed) -> Files:
    return Files(probed.kernel)


def clock(now: int, *, virtual: bool) -> Any:
    """Return a machine's clock that stands still at `now` nanoseconds. `virtual`: value of is_virtual."""
    return SimpleNamespace(now_ns=lambda: now, is_virtual=virtual)


class TestTime:
    def test_requests_count_in_virtual_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(request_clock, "PAUSE", 0.1)
        wall = [0.0]
        time = RequestClock(clock(7 * NSEC_PER_JIFFY, virtual=True), lambda: wall[0])
        assert time.jiffies() == 7
        time.count_request()
        wall[0] += 0.05
        time.count_request()
        assert time.jiffies() == 9
        wall[0] += 1
        time.count_request()
        assert time.jiffies() == 10 + 250

    def test_real_time_is_the_clocks(self) -> None:
        wall = [0.0]
        time = RequestClock(clock(5, virtual=False), lambda: wall[0])
        time.count_request()
        wall[0] += 10
        time.count_request()
        assert time.jiffies() == 0


def test_optimized_after_a_few_requests(probed: Probed, files: Files) -> None:
    files.write("/kprobe_events", "p:ev gcd+5")
    files.write("/tracing/events/kprobes/ev/enable", "1")
    stats = "/kprobes/stats/kprobes/ev"
    assert files.read(f"{stats}/mode") == "int3\n"
    assert "waits for the optimizer" in files.read(f"{stats}/reason")
    for _ in range(5):
        listed = files.read("/kprobes/list")
    assert "gcd+0x5    [OPTIMIZED]" in listed
    assert [files.read(f"{stats}/{name}") for name in ("mode", "optimized", "reason")] == [
        "optimized\n",
        "1\n",
        "",
    ]
    assert probed.text("gcd", GCD_HEAD).hex(" ") in files.read(f"{stats}/bytes")
    assert "pushfq" in files.read(f"{stats}/detour")


def test_the_detour_shown_is_the_one_that_is_jumped_to(probed: Probed, files: Files) -> None:
    """The file `detour` shows the code to which the breakpoint or the jump leads.

    The order is: a slot, a stub before the slot, a detour that saves all registers, and a detour that
    contains the handler.
    """
    detour = "/kprobes/stats/kprobes/ev/detour"
    files.write("/kprobe_events", "p:ev gcd+5")
    files.write("/tracing/events/kprobes/ev/enable", "1")
    slot = files.read(detour)
    probed.gcd()
    assert files.read(detour).endswith(slot)
    probed.settle()
    for saves_all in (True, False):
        address = probed.address("gcd", GCD_HEAD)
        target = address + 5 + int.from_bytes(probed.text("gcd", GCD_HEAD)[1:], "little", signed=True)
        shown = files.read(detour)
        assert f"{target:#x}: " in shown
        assert ("popq %r15" in shown) is saves_all
        probed.gcd()


def test_files_switch_it(files: Files) -> None:
    files.write("/kprobe_events", "p:ev gcd+5")
    files.write("/tracing/events/kprobes/ev/enable", "1")
    stats = "/kprobes/stats/kprobes/ev"
    files.write(f"{stats}/optimized", "1")
    assert files.read(f"{stats}/mode") == "optimized\n"
    files.write(f"{stats}/optimized", "0")
    assert files.read(f"{stats}/mode") == "int3\n"
    files.write(f"{stats}/optimized", "1")
    files.write("/kprobes/optimization", "0")
    assert (files.read("/kprobes/optimization"), files.read(f"{stats}/mode")) == ("0\n", "int3\n")
    with pytest.raises(KernelError) as caught:
        files.write("/kprobes/optimization", "2")
    assert caught.value.errno == errno.EINVAL
    files.write("/kprobes/optimization", "1")
    log = files.read("/machine/dmesg")
    assert "kprobe jump-optimization is disabled." in log
    assert "kprobe jump-optimization is enabled." in log


@pytest.mark.parametrize(
    ("profile", "by_breakpoint"), [("linux-6.1", "..Zff"), ("linux-6.1-nopreempt", "d.Z..")]
)
def test_the_context_in_records(boot: Callable[[str], Probed], profile: str, by_breakpoint: str) -> None:
    """A trace record of a hit by a breakpoint has the flags of an NMI.

    A record of a hit by a call or jump has the context of the probed code.
    """
    probed = boot(profile)
    files = Files(probed.kernel)
    files.write("/kprobe_events", "p:mid gcd+5 %ip %flags %cs %ss %orig_ax")
    files.write("/kprobe_events", "p:entry gcd %ip %orig_ax")
    files.write("/tracing/events/kprobes/enable", "1")
    probed.kernel.call("gcd", 12, 18)
    probed.settle()
    probed.kernel.call("gcd", 12, 18)
    lines = [line.split() for line in files.read("/tracing/trace").splitlines() if "gcd" in line]
    contexts = [(words[4], words[2]) for words in lines]
    assert contexts == [
        ("entry:", "....."), ("mid:", by_breakpoint), ("entry:", "....."), ("mid:", "....."),
    ]  # fmt: skip
    assert lines[1][5:] == lines[3][5:]


def test_interrupts_off_show(probed: Probed) -> None:
    files = Files(probed.kernel)
    files.write("/kprobe_events", "p:entry gcd")
    files.write("/tracing/events/kprobes/enable", "1")
    machine = probed.kernel.machine
    start = machine.regs.snapshot()._replace(
        ip=probed.address("gcd"), sp=machine.calls.stack_top, di=12, si=18, flags=2
    )
    machine.execute(start)
    (line,) = [line for line in files.read("/tracing/trace").splitlines() if "entry:" in line]
    assert line.split()[2] == "d...."


@pytest.mark.parametrize("profile", ["linux-6.1", "optprobes-2009"])
def test_the_version_names_the_profile(boot: Callable[[str], Probed], profile: str) -> None:
    assert Files(boot(profile).kernel).read("/machine/version").splitlines()[1] == f"profile {profile}"


def test_an_unknown_profile() -> None:
    with pytest.raises(KernelError) as caught:
        Kernel(MachineConfig(profile="linux-2.4"))
    assert caught.value.errno == errno.EINVAL


def test_the_same_script_gives_the_same_trace(boot: Callable[[str], Probed]) -> None:
    def script() -> Any:
        kernel = boot("linux-6.1").kernel
        files = Files(kernel)
        files.write("/kprobe_events", "p:ev gcd+5 %ip")
        files.write("/tracing/events/kprobes/ev/enable", "1")
        for _ in range(8):
            kernel.call("gcd", 12, 18)
        return files.read("/tracing/trace")

    first = script()
    assert "..Zff" in first
    assert " ..... " in first
    assert script() == first
