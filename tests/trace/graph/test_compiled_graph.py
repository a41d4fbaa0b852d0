"""The function graph in guest code: the same lines as from Python's handlers, without a trap."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.trace.output.graph_output import NAME
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import WouldBlock
from emulated_kernel.vfs.core.client import Client
from tests.kprobes.return_hook.test_native import counted_traps
from tests.ledger import ledger_mismatches
from tests.sample import share
from tests.trace.graph.recursion import Recursion

ARCHITECTURES, STACKS = ("x86_64", "i386", "riscv64"), ("rethook", "fgraph", "unified")
"""With rethook, only the function graph uses its arrays; with fgraph and unified, return probes do, too."""
KERNELS = share([(arch, STACKS[(i + j) % 3]) for i, arch in enumerate(ARCHITECTURES) for j in range(3)], 0, 3)
"""Pairs of architecture and return hook. A short run has one pair for each architecture."""
IN_GUEST = PROFILES["linux-6.1"]
IN_PYTHON = replace(IN_GUEST, compiled=False)
PIPE = "/tracing/instances/quiet/trace_pipe"


@dataclass(frozen=True, eq=False)
class Traced:
    """A kernel with the operations that the scenarios trace."""

    kernel: Kernel

    @cached_property
    def recursion(self) -> Recursion:
        return Recursion(self.kernel)

    def allocate(self) -> None:
        self.kernel.call("kfree", self.kernel.call("__kmalloc", 64, 0xCC0))

    def files(self) -> None:
        """Let two processes write, read and remove a file, one process after the other."""
        mount = self.kernel.mount()
        for pid in (601, 602):
            client = Client(pid, 0, 0)
            handle = mount.create(client, f"/scratch/f{pid}", 0o644, os.O_RDWR)
            mount.write(client, handle, b"data" * 300, 0)
            mount.read(client, handle, 64, 0)
            mount.release(handle)
            mount.unlink(client, f"/scratch/f{pid}")

    def sleep(self) -> None:
        """Let three processes sleep within vfs_read, while another task runs."""
        self.kernel.trace_arrays.make("quiet")
        mount = self.kernel.mount()
        clients = [Client(700 + number, 0, 0) for number in range(3)]
        pipe = mount.open(clients[0], PIPE, os.O_RDONLY)
        for client in clients:
            with pytest.raises(WouldBlock):
                mount.read(client, pipe, 100, 0)
        self.allocate()
        for client in clients:
            mount.give_up(client, pipe, 4)
        mount.release(pipe)
        self.kernel.trace_arrays.remove("quiet")

    def fork(self) -> None:
        self.kernel.guest.processes.task_of(640, 0, 0)
        self.kernel.guest.processes.exit(640)


Scenario = Callable[[Traced], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__] = run
    return run


def _choose(traced: Traced, *functions: bytes) -> None:
    for function in functions:
        traced.kernel.tracing.function_graph.functions.write(function)


@contextmanager
def _graph(traced: Traced) -> Iterator[None]:
    """Set the graph tracer, and make a call so that its guest code exists. After the block, turn
    tracing off.
    """
    trace = traced.kernel.trace
    trace.set_tracer(NAME)
    traced.kernel.call("gcd", 12, 18)
    yield
    trace.set_tracing_on(False)


@scenario
def calls_files_and_forks(traced: Traced) -> None:
    with _graph(traced):
        traced.allocate()
        traced.files()
        traced.fork()


@scenario
def tasks_that_sleep(traced: Traced) -> None:
    with _graph(traced):
        traced.sleep()
    traced.kernel.trace.options.set("funcgraph-proc", True)


@scenario
def sleep_time_off(traced: Traced) -> None:
    traced.kernel.trace.options.set("funcgraph-tail", True)
    with _graph(traced):
        traced.sleep()
        traced.kernel.trace.options.set("sleep-time", False)
        traced.sleep()
        traced.sleep()
    traced.kernel.trace.options.set("sleep-time", True)


@scenario
def recursion_and_overruns(traced: Traced) -> None:
    traced.kernel.trace.options.set("funcgraph-overrun", True)
    with _graph(traced):
        traced.recursion.run(5)
        traced.recursion.run(150)
        traced.recursion.run(2)


@scenario
def chosen_functions(traced: Traced) -> None:
    _choose(traced, b"kfree", b"vfs_read")
    with _graph(traced):
        traced.allocate()
        traced.files()
        _choose(traced, b"vfs_write")
        traced.files()


@scenario
def hidden_functions(traced: Traced) -> None:
    graph = traced.kernel.tracing.function_graph
    _choose(traced, b"kfree", b"vfs_*")
    for pattern in (b"*slab*", b"*lock*", b"vfs_write"):
        graph.notrace.write(pattern)
    with _graph(traced):
        traced.allocate()
        traced.files()


@scenario
def depth(traced: Traced) -> None:
    graph = traced.kernel.tracing.function_graph
    graph.set_max_depth(2)
    with _graph(traced):
        traced.files()
        graph.set_max_depth(0xFFFFFFFF)
        traced.allocate()


@scenario
def long_calls_alone(traced: Traced) -> None:
    graph = traced.kernel.tracing.function_graph
    graph.set_threshold(300)
    with _graph(traced):
        traced.files()
        graph.set_threshold(1 << 40)
        traced.files()


@scenario
def tasks_by_pid(traced: Traced) -> None:
    tracer = traced.kernel.trace_arrays.top.functions
    traced.kernel.trace.options.set("funcgraph-proc", True)
    tracer.pids.traced.write(b"601")
    with _graph(traced):
        traced.files()
        tracer.pids.traced.write(b"602 603")
        traced.files()
        tracer.pids.traced.clear()
        tracer.pids.untraced.write(b"602")
        traced.files()
    tracer.pids.untraced.clear()


@scenario
def interrupts(traced: Traced) -> None:
    kernel = traced.kernel
    with _graph(traced):
        for is_on in (True, False, True):
            kernel.trace.options.set("funcgraph-irqs", is_on)
            kernel.machine.clock.advance(50_000_000)
            kernel.guest.syscalls.call(kernel.guest.processes.init, "getpid")


@scenario
def rings_that_overrun(traced: Traced) -> None:
    kernel = traced.kernel
    kernel.trace.resize_buffer(8)
    with _graph(traced):
        for _ in range(12):
            traced.files()
        kernel.trace.options.set("overwrite", False)
        traced.files()
        kernel.trace.options.set("overwrite", True)
        kernel.trace.clear_trace()
        traced.files()


@scenario
def off_in_the_middle(traced: Traced) -> None:
    kernel = traced.kernel
    with _graph(traced):
        traced.files()
        kernel.trace.set_tracing_on(False)
        traced.files()
        kernel.trace.set_tracing_on(True)
        traced.allocate()
        traced.recursion.run(3)


@scenario
def beside_an_instance(traced: Traced) -> None:
    """Record a probe's event in an instance, and let the instance's function tracer trace one function."""
    kernel = traced.kernel
    other = kernel.trace_arrays.make("beside")
    kernel.tracing.kprobe_events.write(b"p:reads vfs_read count=$arg3\n")
    event = kernel.tracing.kprobe_events.find("kprobes", "reads")
    assert event is not None
    event.enable(other.array)
    with _graph(traced):
        traced.files()
        assert "reads: (vfs_read" in other.array.trace_text()
        other.functions.filter.write(b"kfree\n")
        other.array.set_tracer("function")
        traced.files()
        traced.allocate()
        assert ": kfree <-" in other.array.trace_text()
        other.array.set_tracer("nop")
        traced.allocate()
    event.disable(other.array)
    kernel.tracing.kprobe_events.clear()
    kernel.trace_arrays.remove("beside")


def _reset(kernel: Kernel) -> None:
    """Reset everything that scenarios change to its state at boot."""
    graph, trace = kernel.tracing.function_graph, kernel.trace
    trace.set_tracer("nop")
    assert ledger_mismatches(kernel.machine.text) == []
    assert kernel.machine.text.ledger == {}
    for functions in (graph.functions, graph.notrace):
        functions.clear()
    graph.set_max_depth(0)
    graph.set_threshold(0)
    trace.resize_buffer(1408)
    trace.set_tracing_on(True)
    for name in ("funcgraph-proc", "funcgraph-tail", "funcgraph-overrun"):
        trace.options.set(name, False)


def _text(kernel: Kernel, run: Scenario) -> tuple[str, list[int]]:
    """Run a scenario. Return the trace's text, and the buffers' counts of entries, overruns and dropped
    events.
    """
    traced = Traced(kernel)
    run(traced)
    stats = [buffer.stats() for buffer in kernel.trace.buffers]
    text = kernel.trace.trace_text()
    _reset(kernel)
    return text, [number for each in stats for number in (each.entries, each.overrun, each.dropped_events)]


@pytest.mark.parametrize(("arch", "stack"), KERNELS)
def test_the_same_lines(arch: str, stack: str) -> None:
    """Guest code makes the same lines as Python, with the same times, because the virtual clock moves only
    when the clock is read.
    """
    config = MachineConfig(arch=arch, return_hook=stack)
    with Kernel(config, profile=IN_PYTHON) as python, Kernel(config, profile=IN_GUEST) as guest:
        scenarios = share(list(SCENARIOS.items()), ARCHITECTURES.index(arch), 3)
        for name, run in scenarios:
            expected, counts = _text(python, run)
            found, others = _text(guest, run)
            assert expected.count("\n") > 4, name
            assert found.splitlines() == expected.splitlines(), name
            assert others == counts, name
        assert python.kprobes.compiler.made == 0
        assert guest.kprobes.compiler.made > len(scenarios)


@pytest.mark.parametrize(("arch", "stack"), KERNELS)
def test_calls_stay_in_the_guest(arch: str, stack: str) -> None:
    """Calls of lcm, which calls gcd, cause no trap, whatever functions and options are selected, and while
    tracing is off.
    """
    with Kernel(MachineConfig(arch=arch, return_hook=stack)) as kernel:
        graph, trace = kernel.tracing.function_graph, kernel.trace
        tracer, lcm = kernel.trace_arrays.top.functions, kernel.image.kallsyms.lookup_name("lcm")
        assert lcm is not None
        trace.set_tracer(NAME)
        choices: tuple[tuple[int, Callable[[], object]], ...] = (
            (40, lambda: None),
            (20, lambda: graph.set_max_depth(1)),
            (10, lambda: graph.set_threshold(70)),
            (10, lambda: graph.notrace.write(b"gcd")),
            (10, lambda: graph.functions.write(b"lcm")),
            (10, lambda: tracer.pids.untraced.write(b"4711")),
            (10, lambda: trace.options.set("funcgraph-irqs", False)),
            (10, lambda: trace.options.set("sleep-time", False)),
            (0, lambda: trace.set_tracing_on(False)),
        )
        for number, (records, choose) in enumerate(choices):
            choose()
            trace.clear_trace()
            for _ in range(2):
                kernel.machine.call(lcm, 4, 6)
            before = trace.written
            with counted_traps(kernel) as met:
                assert [kernel.machine.call(lcm, 4, 6) for _ in range(10)] == [12] * 10
            assert met == [], number
            assert trace.written - before == records, number
        trace.set_tracer("nop")
