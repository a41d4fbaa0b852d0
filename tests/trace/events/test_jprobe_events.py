"""Jprobe events, an extension for kernels with jprobes: refused definitions and recorded arguments."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import PROFILES, Profile
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.listed import list_lines

ARGUMENTS = "a=$arg1 b=$arg2:u32"


@pytest.fixture(scope="module")
def booted() -> Iterator[Kernel]:
    with Kernel(MachineConfig(profile="kprobes-2010")) as kernel:
        yield kernel


@pytest.fixture
def kernel(booted: Kernel) -> Iterator[Kernel]:
    yield booted
    booted.tracing.kprobe_events.clear()
    assert booted.machine.text.ledger == {}


def write(kernel: Kernel, line: str) -> None:
    kernel.tracing.kprobe_events.write(line.encode() + b"\n")


def shown(kernel: Kernel) -> str:
    return "".join(kernel.tracing.kprobe_events.records())


@pytest.mark.parametrize("profile", PROFILES)
def test_only_where_there_are_jprobes(profile: str) -> None:
    with Kernel(MachineConfig(profile=profile)) as kernel:
        for file in (kernel.tracing.kprobe_events, kernel.tracing.dynamic_events):
            if PROFILES[profile].jprobes:
                file.write(b"j gcd\n")
                assert shown(kernel) == "j:kprobes/j_gcd_0 gcd\n"
                file.write(b"-:kprobes/j_gcd_0\n")
                continue
            with pytest.raises(KernelError) as caught:
                file.write(b"j gcd\n")
            assert caught.value.errno == errno.EINVAL
        assert shown(kernel) == ""
        assert list(kernel.kprobes) == []


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("j gcd", "j:kprobes/j_gcd_0 gcd"),
        ("j:name gcd", "j:kprobes/name gcd"),
        (f"j:group/name gcd {ARGUMENTS}", f"j:group/name gcd {ARGUMENTS}"),
        ("j gcd+0 $arg1", "j:kprobes/j_gcd_0 gcd arg1=$arg1"),
    ],
)
def test_shown_as_written(kernel: Kernel, command: str, line: str) -> None:
    write(kernel, command)
    assert shown(kernel) == f"{line}\n"
    assert [each.split()[1:3] for each in list_lines(kernel.kprobes)] == [["j", "gcd+0x0"]]
    write(kernel, "-:" + line.partition(":")[2])
    assert (shown(kernel), list(kernel.kprobes)) == ("", [])


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("j:x no_such_function", errno.ENOENT, "Invalid probed address or symbol"),
        ("j:x gcd+5", errno.EINVAL, "Invalid probed address or symbol"),
        ("j:x gcd-5", errno.EINVAL, "Invalid probed address or symbol"),
        ("j:x 0x1000", errno.ENOENT, "Invalid probed address or symbol"),
        ("j:x gcd%return", errno.EINVAL, "Invalid probed address suffix"),
        ("j2:x gcd", errno.EINVAL, "Maxactive is not for kprobe"),
        ("j:x gcd $retval", errno.EINVAL, "$retval is not available on probe"),
        ("j:k gcd", errno.EEXIST, "Given group/event name is already used by another event"),
        ("j:r gcd", errno.EEXIST, "Given group/event name is already used by another event"),
        ("p:j int_sqrt", errno.EEXIST, "Given group/event name is already used by another event"),
        ("j:j int_sqrt", errno.EEXIST, "There is already the exact same probe event"),
        ("j:other int_sqrt", errno.EEXIST, ""),
    ],
)
def test_refused(kernel: Kernel, command: str, error: int, message: str) -> None:
    lines = "p:kprobes/k gcd\nr:kprobes/r gcd\nj:kprobes/j int_sqrt\n"
    write(kernel, lines)
    before = list_lines(kernel.kprobes)
    kernel.tracing.arrays.top.errors.clear()
    with pytest.raises(KernelError) as caught:
        write(kernel, command)
    assert caught.value.errno == error
    log = "".join(kernel.tracing.arrays.top.errors.records())
    assert f"trace_kprobe: error: {message}\n" in log if message else log == ""
    assert list_lines(kernel.kprobes) == before


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
@pytest.mark.parametrize("ftrace", [True, False])
def test_the_arguments_are_recorded(arch: str, ftrace: bool) -> None:
    """A jprobe event records the arguments before the function runs, and after all other probes of the
    address. Python or guest code handles the hits.
    """
    profile = Profile("jprobes", jprobes=True, ftrace=ftrace)
    with Kernel(MachineConfig(arch=arch), profile=profile) as kernel:
        write(kernel, "j:j bsearch $arg1 $arg3 $arg5\np:p bsearch a=$arg1")
        events = [kernel.tracing.kprobe_events.find("kprobes", name) for name in "jp"]
        for event in events:
            assert event is not None
            event.enable(kernel.trace)
        for first in (11, 12, 13):
            kernel.call("bsearch", first, 22, 0, 44, 55)
        lines = [line.partition(": ")[2] for line in kernel.trace.trace_text().splitlines() if line[0] != "#"]
        assert [line.partition(") ")[2] for line in lines] == [
            text for number in "bcd" for text in (f"a=0x{number}", f"arg1=0x{number} arg2=0x0 arg3=0x37")
        ]
        assert [probe.hits for probe in kernel.tracing.kprobe_events.probes()] == [3, 3]
        for event in events:
            assert event is not None
            event.disable(kernel.trace)
        kernel.call("bsearch", 1, 22, 0, 44, 55)
        assert [probe.hits for probe in kernel.tracing.kprobe_events.probes()] == [3, 3]
        kernel.tracing.kprobe_events.clear()
        assert kernel.machine.text.ledger == {}
