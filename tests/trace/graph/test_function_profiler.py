"""The function profiler: the same counts as in the function graph, times, and the exclusion of other users of
the graph.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.output.tracer_options import GraphOption
from emulated_kernel.trace.tracers.function_profiler import FunctionProfiler, _Profile
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.ledger import ledger_mismatches

HEADER = """\
  Function                               Hit    Time            Avg             s^2
  --------                               ---    ----            ---             ---
"""
LINE = re.compile(r"  (\S+) +(\d+)    ([\d.]+) us +    ([\d.]+) us +    ([\d.]+) us +")


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel(MachineConfig()) as kernel:
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []


def profile(profiler: FunctionProfiler) -> dict[str, tuple[int, float, float]]:
    """Return function -> hits, time and average, from the profile of CPU 0."""
    text = profiler.text(0)
    assert text.startswith(HEADER)
    found = {}
    for line in text.removeprefix(HEADER).splitlines():
        match = LINE.fullmatch(line)
        assert match is not None, line
        found[match[1]] = int(match[2]), float(match[3]), float(match[4])
    return found


def allocate(kernel: Kernel) -> None:
    kernel.call("kfree", kernel.call("__kmalloc", 64, 0xCC0))


def test_it_counts_what_the_graph_shows(kernel: Kernel) -> None:
    allocate(kernel)
    kernel.trace.set_tracer("function_graph")
    allocate(kernel)
    graph = Counter(re.findall(r"(\w+)\(\)", kernel.trace.trace_text()))
    kernel.trace.set_tracer("nop")
    profiler = kernel.tracing.function_profiler
    profiler.enable(1)
    allocate(kernel)
    profiler.enable(0)
    assert kernel.machine.text.ledger == {}
    counts = profile(profiler)
    assert {name[:30]: count for name, count in graph.items()} == {n: c[0] for n, c in counts.items()}
    assert counts["__kmalloc"][0] == 1
    allocate(kernel)
    assert profile(profiler) == counts


def test_the_longest_comes_first_and_a_start_is_anew(kernel: Kernel) -> None:
    profiler = kernel.tracing.function_profiler
    profiler.enable(1)
    for _ in range(3):
        allocate(kernel)
    times = [time for _, time, _ in profile(profiler).values()]
    assert times == sorted(times, reverse=True)
    assert times[0] > 0
    profiler.enable(2)
    assert profile(profiler)["kfree"][0] == 3
    profiler.enable(0)
    profiler.enable(1)
    assert profiler.text(0) == HEADER


def test_filters_and_threshold_hold(kernel: Kernel) -> None:
    profiler, tracer = kernel.tracing.function_profiler, kernel.tracing.arrays.top.functions
    tracer.filter.write(b"*kmalloc")
    profiler.enable(1)
    allocate(kernel)
    found = profile(profiler)
    assert set(found) == {"__kmalloc"}
    hits, time, average = found["__kmalloc"]
    assert (hits, time) == (1, average)
    kernel.tracing.function_graph.set_threshold(int(average * 1000) + 1)
    assert profiler.text(0) == HEADER


def test_time_of_nested_functions_is_left_out(kernel: Kernel) -> None:
    """With the option graph-time off, the times of all functions together do not exceed the time of the
    outermost call.
    """
    profiler, options = kernel.tracing.function_profiler, kernel.tracing.system.tracer_options
    assert options.is_on(GraphOption.GRAPH_TIME)
    profiler.enable(1)
    whole = kernel.machine.clock.now_ns()
    allocate(kernel)
    whole = kernel.machine.clock.now_ns() - whole
    nested = profile(profiler)
    profiler.enable(0)
    options.switch(GraphOption.GRAPH_TIME, on=False)
    profiler.enable(1)
    allocate(kernel)
    own = profile(profiler)
    assert own["__kmalloc"][1] < nested["__kmalloc"][1]
    assert sum(time for _, time, _ in own.values()) * 1000 <= whole
    assert sum(time for _, time, _ in nested.values()) > sum(time for _, time, _ in own.values())


def test_one_user_of_the_graph_at_a_time(kernel: Kernel) -> None:
    profiler = kernel.tracing.function_profiler
    profiler.enable(1)
    with pytest.raises(KernelError) as refused:
        kernel.trace.set_tracer("function_graph")
    assert refused.value.errno == errno.EBUSY
    assert kernel.trace.current_tracer == "nop"
    profiler.enable(0)
    kernel.trace.set_tracer("function_graph")
    with pytest.raises(KernelError) as refused:
        profiler.enable(1)
    assert refused.value.errno == errno.EBUSY
    assert not profiler.is_enabled


def test_squares() -> None:
    """The variance s^2 of 1000, 2000 and 3000 ns is 1 square microsecond. A single call has no variance."""
    times = (1000, 2000, 3000)
    found = _Profile(0, len(times), sum(times), sum(time * time for time in times))
    assert found.variance() == 1000
    assert _Profile(0, 1, 5, 25).variance() == 0
