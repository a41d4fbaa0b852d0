"""Functions of modules: traced while loaded, selectable before loading, and forgotten after unloading."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.tracers.function_tracer import FunctionTracer
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError

NAME = "trace_printk"
WORKER = "trace_printk_irq_work"
INIT = "trace_printk_init"
ALL = "#### all functions enabled ####\n"


@pytest.fixture(params=["x86_64", "i386"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param, clock="virtual")) as booted:
        yield booted


@pytest.fixture
def tracer(kernel: Kernel) -> FunctionTracer:
    """Return the function tracer of the top trace array."""
    return kernel.trace_arrays.top.functions


def _calls(kernel: Kernel) -> list[str]:
    lines = kernel.trace.trace_text().splitlines()
    return [line.split(": ", 1)[1].split()[0] for line in lines if " <-" in line]


def _available(kernel: Kernel) -> set[str]:
    return {line for line in kernel.tracing.functions.available() if f"[{NAME}]" in line}


def test_they_come_and_go_with_the_module(kernel: Kernel) -> None:
    before = list(kernel.tracing.functions.available())
    kernel.load_module(NAME)
    assert f"{WORKER} [{NAME}]\n" in _available(kernel)
    # The text of the module's init function has been freed.
    assert f"{INIT} [{NAME}]\n" not in _available(kernel)
    assert list(kernel.tracing.functions.available())[: len(before)] == before
    kernel.unload_module(NAME)
    assert list(kernel.tracing.functions.available()) == before


def test_the_tracer_takes_a_module_that_comes(kernel: Kernel) -> None:
    kernel.trace.set_tracer("function")
    kernel.load_module(NAME)
    assert {INIT, WORKER} <= set(_calls(kernel))
    enabled = list(kernel.tracing.functions.enabled())
    assert any(line.startswith(f"{WORKER} [{NAME}] (1)      ") for line in enabled)
    kernel.unload_module(NAME)
    assert not any(NAME in line for line in kernel.tracing.functions.enabled())
    kernel.load_module(NAME)
    kernel.trace.set_tracer("nop")
    assert kernel.machine.text.ledger == {}


def test_kallsyms_lists_freed_functions_that_were_traced(kernel: Kernel) -> None:
    symbols = kernel.tracing.symbols
    kernel.load_module(NAME)
    assert not re.search(rf"\b{INIT}\b", symbols.kallsyms_text())
    kernel.unload_module(NAME)
    kernel.trace.set_tracer("function")
    kernel.load_module(NAME)
    freed = re.findall(rf"^([0-9a-f]+) t {INIT}\t\[{NAME}\]$", symbols.kallsyms_text(), re.MULTILINE)
    (where,) = [symbols.lookup(int(address, 16)) for address in freed]
    assert where is not None
    assert (where.name, where.offset, where.module) == (INIT, 0, NAME)
    kernel.unload_module(NAME)
    assert NAME not in symbols.kallsyms_text()


def test_chosen_before_it_comes(kernel: Kernel, tracer: FunctionTracer) -> None:
    tracer.filter.write(b"*_work:mod:trace_printk")
    assert list(tracer.filter.records()) == ["*_work:mod:trace_printk\n"]
    kernel.trace.set_tracer("function")
    kernel.call("gcd", 12, 18)
    assert _calls(kernel) == []
    kernel.load_module(NAME)
    assert list(tracer.filter.records()) == [f"{WORKER} [{NAME}]\n"]
    assert _calls(kernel) == [WORKER]
    kernel.trace.clear_trace()
    kernel.unload_module(NAME)
    assert list(tracer.filter.records()) == []
    kernel.call("gcd", 12, 18)
    assert _calls(kernel) == []
    tracer.filter.clear()
    assert list(tracer.filter.records()) == [ALL]
    kernel.call("gcd", 12, 18)
    assert "gcd" in _calls(kernel)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (b"*:mod:trace_printk", True),
        (b"*:mod:trace_*", True),
        (b"trace_*:mod:", True),
        (b":mod:trace_printk", True),
        (b"vfs_open:mod:!trace_printk", False),
    ],
)
def test_chosen_while_it_is_there(
    kernel: Kernel, tracer: FunctionTracer, words: bytes, *, expected: bool
) -> None:
    kernel.load_module(NAME)
    tracer.filter.write(words)
    assert (f"{WORKER} [{NAME}]\n" in list(tracer.filter.records())) is expected
    assert ("vfs_open\n" in list(tracer.filter.records())) is not expected


def test_choices_are_taken_back(kernel: Kernel, tracer: FunctionTracer) -> None:
    for words in (b"a:mod:later", b"b:mod:later", b"c:mod:other"):
        tracer.filter.write(words)
    tracer.filter.write(b"!b:mod:later")
    assert list(tracer.filter.records()) == ["c:mod:other\n", "a:mod:later\n"]
    tracer.filter.write(b"!*:mod:later")
    assert list(tracer.filter.records()) == ["c:mod:other\n"]
    for words in (b"!a:mod:later", b"!c:mod:later"):
        with pytest.raises(KernelError) as refused:
            tracer.filter.write(words)
        assert refused.value.name == "EINVAL"
    kernel.load_module(NAME)
    with pytest.raises(KernelError) as refused:
        tracer.filter.write(b"no_such:mod:trace_printk")
    assert refused.value.name == "EINVAL"


def test_notrace(kernel: Kernel, tracer: FunctionTracer) -> None:
    tracer.notrace.write(b"*:mod:trace_printk")
    assert list(tracer.notrace.records()) == [
        "#### no functions disabled ####\n",
        "*:mod:trace_printk\n",
    ]
    kernel.trace.set_tracer("function")
    kernel.load_module(NAME)
    assert not {INIT, WORKER} & set(_calls(kernel))
    assert "schedule" in _calls(kernel)


def test_commands_on_a_module_that_goes(kernel: Kernel, tracer: FunctionTracer) -> None:
    kernel.load_module(NAME)
    tracer.filter.write(f"{WORKER}:traceoff".encode())
    assert f"{WORKER} [{NAME}]:traceoff:unlimited\n" in list(tracer.filter.records())
    kernel.unload_module(NAME)
    assert list(tracer.filter.records()) == [ALL]
    assert kernel.machine.text.ledger == {}


def test_other_tracers(kernel: Kernel) -> None:
    """After a module is unloaded, the function graph and the stack tracer do not have the module's functions
    any more.
    """
    kernel.load_module(NAME)
    kernel.tracing.function_graph.functions.write(WORKER.encode())
    assert list(kernel.tracing.function_graph.functions.records()) == [f"{WORKER} [{NAME}]\n"]
    kernel.tracing.stack_tracer.filter.write(WORKER.encode())
    kernel.tracing.stack_tracer.enable(1)
    kernel.trace.set_tracer("function_graph")
    kernel.unload_module(NAME)
    assert list(kernel.tracing.function_graph.functions.records()) == [ALL]
    assert list(kernel.tracing.stack_tracer.filter.records()) == []
    kernel.load_module(NAME)
    assert kernel.tracing.stack_tracer.max_size == 0
    kernel.trace.set_tracer("nop")
    kernel.tracing.stack_tracer.enable(0)
    assert kernel.machine.text.ledger == {}


def test_an_instance_that_is_gone_is_not_told(kernel: Kernel) -> None:
    instance = kernel.trace_arrays.make("i")
    instance.functions.filter.write(b"*:mod:trace_printk")
    instance.array.set_tracer("function")
    kernel.load_module(NAME)
    assert f"{WORKER} [{NAME}]\n" in list(instance.functions.filter.records())
    instance.array.set_tracer("nop")
    kernel.trace_arrays.remove("i")
    kernel.unload_module(NAME)
    kernel.load_module(NAME)
