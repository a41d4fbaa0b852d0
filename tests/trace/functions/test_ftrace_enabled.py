"""sysctl kernel.ftrace_enabled: while the value is 0, tracers and probes that hook function entries are not
called.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.node_tree import NodeTree
from tests.vfs.files import assert_errno, names, read, truncate, write

SWITCH = "/sysctl/kernel/ftrace_enabled"
TRACING = "/tracing"
ENABLE = f"{TRACING}/events/kprobes/enable"


@pytest.fixture(params=["x86_64", "i386", "riscv64"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param)) as booted, booted.lock:
        yield booted


@pytest.fixture
def tree(kernel: Kernel) -> NodeTree:
    return kernel.filesystem()


def records(kernel: Kernel, tree: NodeTree) -> int:
    """Return the number of records that a call of gcd makes."""
    truncate(tree, f"{TRACING}/trace")
    kernel.call("gcd", 12, 18)
    return sum("gcd" in line for line in read(tree, f"{TRACING}/trace").splitlines())


@pytest.mark.parametrize("tracer", ["function", "function_graph"])
def test_tracers(kernel: Kernel, tree: NodeTree, tracer: str) -> None:
    write(tree, f"{TRACING}/set_ftrace_filter", "gcd\n")
    write(tree, f"{TRACING}/current_tracer", f"{tracer}\n")
    assert records(kernel, tree) == 1
    write(tree, SWITCH, "0\n")
    assert (read(tree, SWITCH), records(kernel, tree)) == ("0\n", 0)
    assert read(tree, f"{TRACING}/enabled_functions") == ""
    assert not kernel.machine.text.ledger
    write(tree, SWITCH, "1\n")
    assert records(kernel, tree) == 1


def test_probes(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, f"{TRACING}/kprobe_events", "p:entry gcd\n")
    write(tree, f"{TRACING}/kprobe_events", "r:return gcd\n")
    write(tree, ENABLE, "1")
    listed = read(tree, "/kprobes/list")
    assert "[FTRACE]" in listed
    assert records(kernel, tree) == 2
    write(tree, SWITCH, "0")
    assert records(kernel, tree) == 0
    assert read(tree, "/kprobes/list") == listed
    for name in ("entry", "return"):
        stats = f"/kprobes/stats/kprobes/{name}"
        assert read(tree, f"{stats}/mode") == "disarmed\n"
        assert "sysctl/kernel/ftrace_enabled" in read(tree, f"{stats}/reason")
    # A change of the handlers puts no call into the text.
    write(tree, ENABLE, "0")
    write(tree, ENABLE, "1")
    assert records(kernel, tree) == 0
    assert not kernel.machine.text.ledger
    write(tree, SWITCH, "1")
    assert records(kernel, tree) == 2
    assert read(tree, "/kprobes/stats/kprobes/entry/mode") == "ftrace\n"


def test_what_comes_meanwhile_waits(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, SWITCH, "0")
    write(tree, f"{TRACING}/current_tracer", "function\n")
    write(tree, f"{TRACING}/set_ftrace_filter", "gcd\n")
    write(tree, f"{TRACING}/kprobe_events", "p:entry gcd\n")
    write(tree, ENABLE, "1")
    assert records(kernel, tree) == 0
    write(tree, SWITCH, "1")
    assert records(kernel, tree) == 2


def test_what_goes_meanwhile_leaves_nothing(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, f"{TRACING}/current_tracer", "function\n")
    write(tree, f"{TRACING}/kprobe_events", "p:entry gcd\n")
    write(tree, ENABLE, "1")
    write(tree, SWITCH, "0")
    write(tree, ENABLE, "0")
    write(tree, f"{TRACING}/current_tracer", "nop\n")
    write(tree, SWITCH, "1")
    assert records(kernel, tree) == 0
    assert not kernel.machine.text.ledger


def test_values(tree: NodeTree) -> None:
    assert read(tree, SWITCH) == "1\n"
    assert write(tree, SWITCH, " -3 rest") == 8
    assert read(tree, SWITCH) == "-3\n"
    for junk in ("", "x", "1x", "nonsense\n", str(1 << 31)):
        with assert_errno(errno.EINVAL):
            write(tree, SWITCH, junk)
    assert read(tree, SWITCH) == "-3\n"


def test_a_kernel_without_ftrace_has_no_tracers_and_none_of_their_files() -> None:
    with Kernel(MachineConfig(profile="kprobes-2010")) as booted:
        tree = booted.filesystem()
        assert not {"ftrace_enabled", "stack_tracer_enabled"} & {*names(tree, "/sysctl/kernel")}
        assert read(tree, "/tracing/available_tracers") == "nop\n"
        with assert_errno(errno.EINVAL):
            write(tree, "/tracing/current_tracer", "function")
        text = read(tree, "/tracing/README")
        for name in ("set_ftrace_filter", "available_filter_functions", "set_graph_function", "stack_trace"):
            assert name not in names(tree, "/tracing")
            assert name not in text
