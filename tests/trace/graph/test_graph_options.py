"""Options of the function_graph tracer: the columns of lines, and the calls that are traced."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.trace.output.graph_output import header
from emulated_kernel.trace.output.tracer_options import GraphOption, TracerOptions
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError

NAME = "function_graph"
JIFFIES_NS = 50_000_000
"""Nanoseconds after which a timer interrupt is due."""


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel(MachineConfig(clock="virtual")) as booted:
        booted.tracing.function_graph.functions.write(b"kfree")
        booted.trace.set_tracer(NAME)
        yield booted


def _lines(kernel: Kernel) -> list[str]:
    kernel.trace.clear_trace()
    kernel.call("kfree", kernel.call("__kmalloc", 64, 0xCC0))
    return [line for line in kernel.trace.trace_text().splitlines() if not line.startswith("#")]


def _switch(kernel: Kernel, *names: str) -> None:
    for name in names:
        kernel.trace.options.set(name.removeprefix("no"), not name.startswith("no"))


def test_options_are_of_the_current_tracer(kernel: Kernel) -> None:
    options = kernel.trace.options
    assert options.write(b"funcgraph-proc\n") == len(b"funcgraph-proc\n")
    assert "funcgraph-proc\n" in options.text()
    assert "func_stack_trace" not in options.text()
    with pytest.raises(KernelError) as caught:
        options.write(b"func_stack_trace")
    assert caught.value.name == "EINVAL"
    # The file in options/ always exists.
    options.set("func_stack_trace", 1)
    kernel.trace.set_tracer("function")
    assert "\nfunc_stack_trace\n" in options.text()
    assert "funcgraph" not in options.text()


def test_an_instance_has_no_graph(kernel: Kernel) -> None:
    instance = kernel.trace_arrays.make("i").array.options
    names = instance.names(instance=True)
    assert "func-no-repeats" in names
    assert not any(name.startswith("funcgraph") for name in names)
    # Linux: all trace arrays share the options of a tracer.
    instance.set("func-no-repeats", 1)
    assert kernel.trace.options.get("func-no-repeats")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), r" 0\)   \d\.\d{3} us    \|  }"),
        (("funcgraph-tail",), r" 0\)   \d\.\d{3} us    \|  } /\* kfree \*/"),
        (("nofuncgraph-cpu",), r"  \d\.\d{3} us    \|  }"),
        (("nofuncgraph-duration",), r" 0\) }"),
        (("nofuncgraph-duration", "nofuncgraph-cpu"), r"}"),
        (("funcgraph-proc",), r" 0\) [ \S]{14} \|   \d\.\d{3} us    \|  }"),
        (("funcgraph-abstime",), r" {4}0\.\d{6} \|   0\)   \d\.\d{3} us    \|  }"),
        (("latency-format",), r" 0\)  \.{5} \|   \d\.\d{3} us    \|  }"),
        (("nocontext-info",), r"}"),
    ],
)
def test_columns(kernel: Kernel, names: tuple[str, ...], expected: str) -> None:
    _switch(kernel, *names)
    assert re.fullmatch(expected, _lines(kernel)[-1])


def test_overruns_have_a_line(kernel: Kernel) -> None:
    _switch(kernel, "funcgraph-overrun")
    assert _lines(kernel)[-1] == " (Overruns: 0)"


def test_overhead(kernel: Kernel) -> None:
    clock = kernel.machine.clock
    slow = Kprobe(symbol_name="virt_to_head_page", pre_handler=lambda _kprobe, _regs: clock.advance(20_000))
    kernel.register_kprobe(slow)
    assert re.fullmatch(r" 0\) \+ 20\.\d{3} us   \|  }", _lines(kernel)[-1])
    _switch(kernel, "nofuncgraph-overhead")
    assert re.fullmatch(r" 0\)   20\.\d{3} us   \|  }", _lines(kernel)[-1])


def test_headers() -> None:
    options = TracerOptions()
    title, marks = header(options, latency=False).splitlines()
    assert title == "# CPU  DURATION                  FUNCTION CALLS"
    assert marks == "# |     |   |                     |   |   |   |"
    options.switch(GraphOption.ABSTIME, on=True)
    options.switch(GraphOption.PROC, on=True)
    *legend, title, marks = header(options, latency=True).splitlines()
    assert title.startswith("#     TIME        CPU  TASK/PID       ||||     DURATION")
    assert len(legend) == 5
    assert legend[0] == "#" + " " * 37 + "  _-----=> irqs-off        "
    for option in GraphOption:
        options.switch(option, on=False)
    assert header(options, latency=False) == "#               FUNCTION CALLS\n#               |   |   |   |\n"


def test_only_what_took_long_enough(kernel: Kernel) -> None:
    graph = kernel.tracing.function_graph
    everything = _lines(kernel)
    assert len(everything) > 3
    graph.set_threshold(300)
    lines = _lines(kernel)
    assert 0 < len(lines) < len(everything)
    assert all("} /* " in line for line in lines)
    assert lines[-1].endswith("  } /* kfree */")
    graph.set_threshold(1 << 62)
    assert _lines(kernel) == []


def _longest_schedule(kernel: Kernel) -> float:
    """Return the longest duration of schedule() in microseconds, while two tasks run in turns."""
    graph, mirror, syscalls = kernel.tracing.function_graph, kernel.guest.processes, kernel.guest.syscalls
    other = mirror.task_of(700, 0, 0)
    graph.functions.write(b"schedule")
    kernel.trace.clear_trace()
    for task in (mirror.init, other, mirror.init, other, mirror.init):
        syscalls.call(task, "getpid")
    times = re.findall(r" ([\d.]+) us +\|  } /\* schedule \*/", kernel.trace.trace_text())
    return max(map(float, times))


def test_sleep_time(kernel: Kernel) -> None:
    _switch(kernel, "funcgraph-tail")
    with_sleep = _longest_schedule(kernel)
    _switch(kernel, "nosleep-time")
    # A sleep that began before the option was cleared still counts.
    _longest_schedule(kernel)
    assert 0 < _longest_schedule(kernel) < with_sleep / 2
    kernel.trace.set_tracer("nop")
    assert kernel.machine.text.ledger == {}


def test_calls_in_interrupts(kernel: Kernel) -> None:
    kernel.tracing.function_graph.functions.clear()
    _switch(kernel, "latency-format")
    in_irq = re.compile(r"^ 0\)  ..[hH]")

    def seen() -> list[str]:
        kernel.trace.clear_trace()
        kernel.machine.clock.advance(JIFFIES_NS)
        kernel.guest.syscalls.call(kernel.guest.processes.init, "getpid")
        return [line for line in kernel.trace.trace_text().splitlines() if in_irq.match(line)]

    assert any("do_timer" in line for line in seen())
    _switch(kernel, "nofuncgraph-irqs")
    assert seen() == []
    kernel.tracing.function_graph.functions.write(b"do_timer")
    assert any("do_timer" in line for line in seen())


def test_set_ftrace_pid_holds_for_the_graph(kernel: Kernel) -> None:
    pids = kernel.trace_arrays.top.functions.pids.traced
    pids.write(b"4321")
    assert _lines(kernel) == []
    pids.clear()
    assert _lines(kernel) != []
