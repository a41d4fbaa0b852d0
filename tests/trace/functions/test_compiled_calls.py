"""The function tracer in guest code: the same records as Python's tracer makes, without entering Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.util.config import MachineConfig
from tests.ledger import ledger_mismatches
from tests.sample import share
from tests.trace.graph.test_compiled_graph import Traced

ARCHITECTURES = "x86_64", "i386", "riscv64", "riscv64i"
IN_GUEST = PROFILES["linux-6.1"]
IN_PYTHON = replace(IN_GUEST, compiled=False)
Work = Callable[[Kernel], None]


def everything(kernel: Kernel) -> None:
    Traced(kernel).files()
    Traced(kernel).fork()


def chosen_tasks(kernel: Kernel) -> None:
    """Trace tasks that are selected by pid, and change the pids while the tracer runs."""
    pids = kernel.trace_arrays.top.functions.pids
    pids.traced.write(b"602")
    Traced(kernel).files()
    pids.traced.clear()
    pids.untraced.write(b"601")
    Traced(kernel).files()
    pids.traced.write(b"601 602")
    Traced(kernel).files()


def chosen_functions(kernel: Kernel) -> None:
    """Change the filter, add another user of a function, and set an option that only Python implements."""
    tracer = kernel.trace_arrays.top.functions
    tracer.filter.write(b"vfs_*")
    Traced(kernel).files()
    tracer.filter.write(b"path_openat")
    Traced(kernel).files()
    kernel.tracing.kprobe_events.write(b"p:k/read vfs_read\n")
    event = kernel.trace.system.events.find("k", "read")
    assert event is not None
    event.enable(kernel.trace)
    Traced(kernel).files()
    event.disable(kernel.trace)
    for on in (1, 0):
        kernel.trace.options.set("func_stack_trace", on)
        Traced(kernel).files()


def other_buffers(kernel: Kernel) -> None:
    """Resize the buffer, and turn tracing off and on. Records then go to the new pages, and no record is made
    while tracing is off.
    """
    Traced(kernel).allocate()
    kernel.trace.resize_buffer(300)
    Traced(kernel).files()
    kernel.trace.set_tracing_on(False)
    Traced(kernel).files()
    kernel.trace.set_tracing_on(True)
    Traced(kernel).allocate()


def two_arrays(kernel: Kernel) -> None:
    """Trace in the top trace array and in an instance: first different functions, then also a function that
    both arrays trace.
    """
    kernel.trace_arrays.top.functions.filter.write(b"vfs_*")
    instance = kernel.trace_arrays.make("other")
    instance.functions.filter.write(b"do_*")
    instance.array.set_tracer("function")
    Traced(kernel).files()
    instance.functions.filter.write(b"vfs_read")
    Traced(kernel).files()


WORKS: tuple[Work, ...] = (everything, chosen_tasks, chosen_functions, other_buffers, two_arrays)


def recorded(arch: str, work: Work, *, is_compiled: bool) -> tuple[list[str], int, int]:
    """Return the texts of all trace arrays, the number of calls that entered Python, and the number of
    records.
    """
    config = MachineConfig(arch=arch, clock="virtual", seed=5)
    with Kernel(config, profile=IN_GUEST if is_compiled else IN_PYTHON) as kernel:
        sites = kernel.kprobes.sites
        assert sites is not None
        kernel.trace.set_tracer("function")
        before = sites.calls
        work(kernel)
        calls = sites.calls - before
        texts = [tracing.array.trace_text() for tracing in kernel.trace_arrays]
        for tracing in kernel.trace_arrays:
            tracing.array.set_tracer("nop")
        assert not ledger_mismatches(kernel.machine.text)
        assert not kernel.machine.text.ledger
        return texts, calls, sum(text.count(" <-") for text in texts)


@pytest.mark.parametrize(
    ("arch", "work"),
    [(arch, work) for number, arch in enumerate(ARCHITECTURES) for work in share(list(WORKS), number, 2)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_guest_code_records_what_python_records(arch: str, work: Work) -> None:
    expected, by_python, records = recorded(arch, work, is_compiled=False)
    found, calls, _ = recorded(arch, work, is_compiled=True)
    assert found == expected
    assert records > 20
    assert calls < by_python


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_the_first_call_enters_python(arch: str) -> None:
    _, calls, records = recorded(arch, everything, is_compiled=True)
    assert records > 100
    assert calls == 1
