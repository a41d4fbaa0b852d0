"""Fprobe events: their commands, their lines in dynamic_events, and their records."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.probes.fprobe_events import FprobeEvents
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.return_hook.test_native import counted_traps


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel(MachineConfig(profile="linux-6.1-fprobe")) as kernel:
        yield kernel
        assert kernel.machine.text.ledger == {}


def _events(kernel: Kernel) -> FprobeEvents:
    assert kernel.tracing.fprobe_events is not None
    return kernel.tracing.fprobe_events


def test_the_default_kernel_has_none() -> None:
    with Kernel() as kernel, pytest.raises(KernelError) as caught:
        write(kernel, "f vfs_read")
    assert caught.value.errno == errno.EINVAL


def write(kernel: Kernel, line: str) -> None:
    kernel.tracing.dynamic_events.write(line.encode() + b"\n")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("f vfs_read", "f:fprobes/vfs_read__entry vfs_read"),
        ("f vfs_read%return", "f:fprobes/vfs_read__exit vfs_read%return"),
        ("f:name vfs_read $arg1", "f:fprobes/name vfs_read arg1=$arg1"),
        ("f:group/ vfs_read", "f:group/vfs_read__entry vfs_read"),
        ("f:group/name vfs_read%return $retval", "f:group/name vfs_read%return arg1=$retval"),
        ("f:name vfs_read $retval", "f:fprobes/name vfs_read%return arg1=$retval"),
        ("f vfs_mk*", "f:fprobes/vfs_mk___entry vfs_mk*"),
        ("f12:name vfs_read%return", "f12:fprobes/name vfs_read%return"),
    ],
)
def test_shown_in_dynamic_events_alone(kernel: Kernel, command: str, shown: str) -> None:
    write(kernel, command)
    assert "".join(kernel.tracing.dynamic_events.records()) == f"{shown}\n"
    assert (
        "".join(kernel.tracing.kprobe_events.records())
        == "".join(kernel.tracing.kprobe_events.profile_records())
        == ""
    )
    write(kernel, "-:" + shown.partition(":")[2].split()[0])
    assert "".join(kernel.tracing.dynamic_events.records()) == ""


@pytest.mark.parametrize(
    ("profile", "rounds"), [("linux-6.1-fprobe", 2), ("linux-6.12", 1), ("linux-7.2", 2)]
)
def test_functions_of_modules(profile: str, rounds: int) -> None:
    """After the module is unloaded, events on its functions stay, but have no hits.

    In 6.12, the fprobe is registered once, when the event is defined. In the other versions, enabling the
    event registers the fprobe again.
    """
    with Kernel(MachineConfig(profile=profile)) as kernel:
        kernel.load_module("ktgt")
        write(kernel, "f:in ktgt_add")
        write(kernel, "f:out ktgt_a*%return")
        events = [_events(kernel).find("fprobes", name) for name in ("in", "out")]
        for _ in range(2):
            for event in events:
                assert event is not None
                event.enable(kernel.trace)
            kernel.call("ktgt_add", 3, 4)
            kernel.unload_module("ktgt")
            assert kernel.machine.text.ledger == {}
            kernel.load_module("ktgt")
            kernel.call("ktgt_add", 3, 4)
            for event in events:
                assert event is not None
                event.disable(kernel.trace)
        found = re.findall(r" (in|out): \((.*?)\)", kernel.trace.trace_text())
        kernel.tracing.dynamic_events.clear()
        assert [name for name, _ in found] == ["in", "out"] * rounds
        assert all("ktgt_add" in place for _, place in found)


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("f:x no_such_function", errno.EINVAL, "Failed to register probe event"),
        ("f:x vfs_read+4", errno.EINVAL, "Failed to register probe event"),
        ("f:x no_such_*", errno.EINVAL, "Failed to register probe event"),
        ("f:x __switch_to", errno.EINVAL, "Failed to register probe event"),
        ("f3:x vfs_read", errno.EINVAL, "Maxactive is only for function exit"),
        ("f:x vfs_read%foo", errno.EINVAL, "Invalid probed address suffix"),
        ("f:x vfs_read x=%di", errno.EINVAL, "Invalid $-variable specified"),
        ("f:kprobes/k vfs_read", errno.EEXIST, "Given group/event name is already used by another event"),
    ],
)
def test_refused(kernel: Kernel, command: str, error: int, message: str) -> None:
    write(kernel, "p:k vfs_read")
    with pytest.raises(KernelError) as caught:
        write(kernel, command)
    assert caught.value.errno == error
    assert f"trace_fprobe: error: {message}\n" in "".join(_events(kernel).error_log.records())
    assert "".join(kernel.tracing.dynamic_events.records()) == "p:kprobes/k vfs_read\n"
    kernel.tracing.kprobe_events.clear()


def test_records(kernel: Kernel) -> None:
    write(kernel, "f:in gcd a=$arg1:u64 b=$arg2:u64")
    write(kernel, "f:out gcd%return result=$retval:u64")
    events = [_events(kernel).find("fprobes", name) for name in ("in", "out")]
    for event in events:
        assert event is not None
        event.enable(kernel.trace)
    assert kernel.call("gcd", 12, 18) == 6
    lines = [line.partition(": ")[2] for line in kernel.trace.trace_text().splitlines() if line[0] != "#"]
    assert lines[0].startswith("in: (gcd+0x0/")
    assert lines[0].endswith(" a=12 b=18")
    assert lines[1].startswith("out: (")
    assert lines[1].endswith(" <- gcd) result=6")
    with pytest.raises(KernelError) as caught:
        write(kernel, "-:fprobes/in")
    assert caught.value.errno == errno.EBUSY
    for event in events:
        assert event is not None
        event.disable(kernel.trace)
    kernel.call("gcd", 12, 18)
    assert [probe.hits for probe in _events(kernel).probes()] == [1, 1]
    kernel.tracing.dynamic_events.clear()


@pytest.mark.parametrize(("profile", "entry"), [("linux-6.12", "."), ("linux-7.2", "1")])
def test_the_preemption_depth(profile: str, entry: str) -> None:
    """The preemption depth is the same in records that Python makes, at the first hits, and in records of
    guest code.
    """
    with Kernel(MachineConfig(profile=profile)) as kernel:
        write(kernel, "f:in gcd")
        write(kernel, "f:out int_sqrt%return")
        for name in ("in", "out"):
            event = _events(kernel).find("fprobes", name)
            assert event is not None
            event.enable(kernel.trace)
        for _ in range(4):
            kernel.call("gcd", 12, 18)
            kernel.call("int_sqrt", 16)
        found = re.findall(r"\] \S{3}(\S)\S +\S+ (in|out): ", kernel.trace.trace_text())
        for name in ("in", "out"):
            event = _events(kernel).find("fprobes", name)
            assert event is not None
            event.disable(kernel.trace)
        kernel.tracing.dynamic_events.clear()
    assert found == [(entry, "in"), ("1", "out")] * 4


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_records_of_guest_code_are_the_same(arch: str) -> None:
    """After two hits, guest code handles fprobe events without a trap, and makes the same records as
    Python.
    """
    with Kernel(MachineConfig(arch=arch, profile="linux-6.1-fprobe")) as kernel:
        write(kernel, "f:in gcd a=$arg1:u32 b=$arg2:u32 s=$stack0:x32")
        write(kernel, "f:out lcm%return result=$retval:u32")
        write(kernel, "f:at int_sqrt sp=$stack:x32")
        for name in ("in", "out", "at"):
            event = _events(kernel).find("fprobes", name)
            assert event is not None
            event.enable(kernel.trace)
        lcm, root = (kernel.image.kallsyms.lookup_name(name) for name in ("lcm", "int_sqrt"))
        assert lcm is not None
        assert root is not None
        texts = []
        for number in range(4):
            with counted_traps(kernel) as met:
                assert kernel.machine.call(lcm, 4, 6) == 12
                assert kernel.machine.call(root, 9) == 3
            assert len(met) == 0 or number < 2
            lines = [
                line.partition(": ")[2] for line in kernel.trace.trace_text().splitlines() if line[0] != "#"
            ]
            assert len(lines) == 3 * (number + 1)
            texts.append(lines[-3:])
        assert all(text == texts[0] for text in texts)
        assert [probe.hits for probe in _events(kernel).probes()] == [4, 4, 4]
        for name in ("in", "out", "at"):
            event = _events(kernel).find("fprobes", name)
            assert event is not None
            event.disable(kernel.trace)
        kernel.machine.call(lcm, 4, 6)
        assert kernel.trace.trace_text().count(": (") == 12
        kernel.tracing.dynamic_events.clear()
        assert kernel.machine.text.ledger == {}


@pytest.mark.parametrize(("profile", "hidden"), [("linux-6.12", False), ("linux-7.2", True)])
def test_a_return_probe_of_the_same_call_hides_the_caller_since_7_2(profile: str, hidden: bool) -> None:
    """Since Linux 7.2, a return probe hides the caller from an fprobe's exit event of the same call. The
    return probe is enabled last, and hooks calls first.
    """
    with Kernel(MachineConfig(profile=profile)) as kernel:
        write(kernel, "f:k/alone gcd%return")
        write(kernel, "f:k/exits int_sqrt%return")
        write(kernel, "r:k/returns int_sqrt")
        for event in ("alone", "exits", "returns"):
            kernel.write_file(f"tracing/events/k/{event}/enable", "1")
        for _ in range(3):
            kernel.call("gcd", 12, 18)
            kernel.call("int_sqrt", 144)
        lines = kernel.read_file("tracing/trace").splitlines()
    places = {
        name: {line.split("(")[1].split(" <- ")[0] for line in lines if f" {name}: " in line}
        for name in ("alone", "exits", "returns")
    }
    (caller,) = places["returns"]
    assert caller.startswith("do_syscall_64+")
    exits = "[unknown/kretprobe'd]" if hidden else caller
    assert places == {"alone": {caller}, "exits": {exits}, "returns": {caller}}
