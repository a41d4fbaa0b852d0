"""The function_graph tracer: text as Linux prints it, and the calls of a real guest as a tree."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.trace.output.graph_output import NAME, duration_text
from emulated_kernel.trace.output.line_formatter import find_mark
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.ledger import ledger_mismatches

HEADER = """\
# tracer: function_graph
#
# CPU  DURATION                  FUNCTION CALLS
# |     |   |                     |   |   |   |
"""
CALL = re.compile(r"^ 0\) [ +!#*@$] [\d. us]{12}\|  ( *)(\S+)\(\);$")
OPENED = re.compile(r"^ 0\)               \|  ( *)(\S+)\(\) \{$")
CLOSED = re.compile(r"^ 0\) [ +!#*@$] [\d. us]{12}\|  ( *)\}$")


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0.000 us    "),
        (76, "0.076 us    "),
        (1_234, "1.234 us    "),
        (32_936, "32.936 us   "),
        (123_456, "123.456 us  "),
        (1_234_567, "1234.567 us "),
        (12_345_678, "12345.67 us "),
        (123_456_789, "123456.7 us "),
        (1_234_567_890, "1234567 us  "),
        (12_345_678_901, "12345678 us "),
    ],
)
def test_durations_have_seven_digits(nanoseconds: int, text: str) -> None:
    assert duration_text(nanoseconds) == text


@pytest.mark.parametrize(
    ("nanoseconds", "mark"),
    [(10_000, " "), (10_001, "+"), (100_001, "!"), (1_000_001, "#"), (10_000_001, "*"), (2 * 10**9, "$")],
)
def test_marks(nanoseconds: int, mark: str) -> None:
    assert find_mark(nanoseconds) == mark


@pytest.fixture(params=["rethook", "fgraph"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(return_hook=request.param)) as kernel:
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []


def lines(kernel: Kernel) -> list[str]:
    """Return the lines of the trace without the header."""
    text = kernel.trace.trace_text()
    assert text.startswith(HEADER)
    return text.removeprefix(HEADER).splitlines()


def tree(text: list[str]) -> list[tuple[int, str]]:
    """Return depth and function of each call. Assert that every brace is closed at the depth where it was
    opened.
    """
    calls, opened = [], []
    for line in text:
        if found := CALL.match(line) or OPENED.match(line):
            calls.append((len(found[1]) // 2, found[2]))
            if line.endswith("{"):
                opened.append(found[1])
        else:
            closed = CLOSED.match(line)
            assert closed is not None, line
            assert closed[1] == opened.pop()
    assert opened == []
    return calls


def test_calls_of_a_function(kernel: Kernel) -> None:
    for function in (b"kfree\n", b"__kmalloc\n"):
        kernel.tracing.function_graph.functions.write(function)
    kernel.trace.set_tracer(NAME)
    block = kernel.call("__kmalloc", 64, 0xCC0)
    kernel.call("kfree", block)
    calls = tree(lines(kernel))
    kernel.trace.set_tracer("nop")
    assert kernel.machine.text.ledger == {}
    assert "kfree" not in kernel.trace.trace_text()
    assert [name for depth, name in calls if depth == 0] == ["__kmalloc", "kfree"]
    assert (1, "kmem_cache_alloc") in calls or len(calls) > 2


def test_leaves_and_depth(kernel: Kernel) -> None:
    graph = kernel.tracing.function_graph
    graph.functions.write(b"kfree")
    graph.set_max_depth(1)
    kernel.trace.set_tracer(NAME)
    kernel.call("kfree", kernel.call("__kmalloc", 64, 0xCC0))
    assert tree(lines(kernel)) == [(0, "kfree")]
    kernel.trace.clear_trace()
    graph.set_max_depth(0)
    kernel.call("kfree", kernel.call("__kmalloc", 64, 0xCC0))
    assert len(tree(lines(kernel))) > 1


def test_notrace_hides_what_is_called(kernel: Kernel) -> None:
    graph = kernel.tracing.function_graph
    graph.functions.write(b"kfree")
    for pattern in (b"*slab*", b"virt_to_head_page"):
        graph.notrace.write(pattern)
    kernel.trace.set_tracer(NAME)
    kernel.call("kfree", kernel.call("__kmalloc", 64, 0xCC0))
    assert tree(lines(kernel)) == [(0, "kfree")]


def test_a_whole_session_closes_what_it_opens(kernel: Kernel) -> None:
    """With all functions traced, the graph shows calls, task switches and a task's exit.

    After the tracer is removed, no text of the kernel stays patched.
    """
    kernel.trace.set_tracer(NAME)
    kernel.guest.processes.task_of(600, 0, 0)
    kernel.guest.processes.exit(600)
    kernel.call("gcd", 12, 18)
    kernel.trace.set_tracing_on(False)
    text = kernel.trace.trace_text()
    kernel.trace.set_tracer("nop")
    assert "=>" in text
    assert " gcd();\n" in text
    depth = [line for line in text.splitlines() if line.endswith("{")]
    assert len(depth) > 20
    assert kernel.call("gcd", 12, 18) == 6
    assert kernel.machine.text.ledger == {}


def test_beside_a_kretprobe(kernel: Kernel) -> None:
    """A return probe and the function graph can use one call: both see its return.

    While either is in use, the return hook cannot be changed.
    """
    results: list[int] = []
    rp = Kretprobe(symbol_name="gcd", handler=lambda _instance, regs: results.append(regs.ax))
    kernel.register_kretprobe(rp)
    kernel.tracing.function_graph.functions.write(b"gcd")
    kernel.trace.set_tracer(NAME)
    for other in ("rethook", "fgraph"):
        with pytest.raises(KernelError) as caught:
            kernel.kretprobes.hooks.select_return_hook(other)
        assert caught.value.errno == errno.EBUSY
    assert kernel.call("gcd", 12, 18) == 6
    assert results == [6]
    assert tree(lines(kernel)) == [(0, "gcd")]
    kernel.trace.set_tracer("nop")
    assert kernel.call("gcd", 12, 18) == 6
    kernel.unregister_kretprobe(rp)


def test_sets_of_functions(kernel: Kernel) -> None:
    functions = kernel.tracing.function_graph.functions
    assert list(functions.records()) == ["#### all functions enabled ####\n"]
    assert list(kernel.tracing.function_graph.notrace.records()) == ["#### no functions disabled ####\n"]
    functions.write(b"vfs_read vfs_w*te")
    assert sorted(functions.records()) == ["vfs_read\n", "vfs_write\n"]
    functions.write(b"!vfs_read")
    assert list(functions.records()) == ["vfs_write\n"]
    for bad in (b"nothing_like_it", b"!nothing", b"__switch_to", b"!vfs_read", b"3"):
        with pytest.raises(KernelError) as caught:
            functions.write(bad)
        assert caught.value.errno == errno.EINVAL
    functions.clear()
    assert not functions.sites


def test_events_stand_between_the_calls_as_comments(kernel: Kernel) -> None:
    kernel.tracing.function_graph.functions.write(b"gcd")
    kernel.tracing.kprobe_events.write(b"r:result gcd value=$retval\n")
    event = kernel.tracing.kprobe_events.find("kprobes", "result")
    assert event is not None
    event.enable(kernel.trace)
    kernel.trace.set_tracer(NAME)
    kernel.call("gcd", 12, 18)
    comments = [line for line in lines(kernel) if "/*" in line]
    assert len(comments) == 1
    assert re.match(r"^ 0\)               \|  +/\* result: \(.* <- gcd\) value=0x6 \*/$", comments[0])
    kernel.trace.set_tracer("nop")
    event.disable(kernel.trace)
    kernel.tracing.kprobe_events.clear()


def test_without_fentry_sites_there_is_no_graph() -> None:
    with Kernel(MachineConfig(profile="optprobes-2009")) as kernel:
        with pytest.raises(KernelError) as caught:
            kernel.trace.set_tracer(NAME)
        assert caught.value.errno == errno.EINVAL
        assert kernel.trace.current_tracer == "nop"


def test_the_filters_of_the_function_tracer_hold_too(kernel: Kernel) -> None:
    """The graph obeys set_ftrace_filter, which may be written before the tracer is set or while the tracer
    runs.
    """
    filters = kernel.trace_arrays.top.functions.filter
    filters.write(b"strlen\n")
    kernel.trace.set_tracer(NAME)
    kernel.call("int_sqrt", 16)
    kernel.call("strlen", "abc")
    assert {name for _, name in tree(lines(kernel))} == {"strlen"}
    filters.write(b"gcd\n")
    kernel.call("gcd", 12, 18)
    filters.clear()
    kernel.call("int_sqrt", 16)
    names = {name for _, name in tree(lines(kernel))}
    assert {"strlen", "gcd", "int_sqrt"} <= names
    kernel.trace.set_tracer("nop")
    assert kernel.machine.text.ledger == {}
