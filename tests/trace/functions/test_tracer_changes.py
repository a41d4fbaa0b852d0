"""Changes of the current tracer, which empty the buffer, and the numbers of functions in
dyn_ftrace_total_info.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.node_tree import NodeTree
from tests.vfs.files import ROOT, read, truncate, write

TOP, INSTANCE = "/tracing", "/tracing/instances/other"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel(MachineConfig(clock="virtual")) as booted:
        yield booted


@pytest.fixture(scope="module")
def tree(kernel: Kernel) -> NodeTree:
    tree = kernel.filesystem()
    tree.mkdir(ROOT, INSTANCE, 0o755)
    return tree


@pytest.mark.parametrize("array", [TOP, INSTANCE])
def test_another_tracer_empties_the_buffer(tree: NodeTree, array: str) -> None:
    """A change to another tracer empties the buffer of this trace array only. A write of the current tracer's
    name changes nothing.
    """
    elsewhere = TOP if array == INSTANCE else INSTANCE
    truncate(tree, f"{elsewhere}/trace")
    write(tree, f"{elsewhere}/trace_marker", "elsewhere")
    for before, after in product(read(tree, f"{array}/available_tracers").split(), repeat=2):
        write(tree, f"{array}/current_tracer", before)
        write(tree, f"{array}/trace_marker", "here")
        write(tree, f"{array}/current_tracer", after)
        assert ("here" in read(tree, f"{array}/trace")) is (before == after), (before, after)
        truncate(tree, f"{array}/trace")
    write(tree, f"{array}/current_tracer", "nop")
    assert "elsewhere" in read(tree, f"{elsewhere}/trace")


@pytest.mark.parametrize("array", [TOP, INSTANCE])
def test_switching_on_clears_the_trace_of_the_function_tracer(tree: NodeTree, array: str) -> None:
    """If tracing was off and is switched on, only the tracer `function` clears the trace, as in Debian's
    6.1.176 and 7.2.13.
    """
    counts = {}
    for tracer in read(tree, f"{array}/available_tracers").split():
        write(tree, f"{array}/current_tracer", tracer)
        for numbers in ("1", "01"):
            truncate(tree, f"{array}/trace")
            write(tree, f"{array}/trace_marker", "before")
            for number in numbers:
                write(tree, f"{array}/tracing_on", number)
            counts[tracer, numbers] = read(tree, f"{array}/trace").count("before")
    write(tree, f"{array}/current_tracer", "nop")
    assert {case for case, count in counts.items() if not count} == {("function", "01")}


def test_the_number_of_functions(kernel: Kernel, tree: NodeTree) -> None:
    """dyn_ftrace_total_info shows how many lines available_filter_functions has, with and without a module.

    The function tracer enables all these functions.
    """
    numbers = []
    for module in (None, "trace_printk"):
        if module is not None:
            kernel.load_module(module)
        number, _, pages, _, groups = read(tree, f"{TOP}/dyn_ftrace_total_info").replace(":", ": ").split()
        assert int(number) == len(read(tree, f"{TOP}/available_filter_functions").splitlines())
        assert 0 < int(groups) <= int(pages) <= int(number)
        write(tree, f"{TOP}/current_tracer", "function")
        assert len(read(tree, f"{TOP}/enabled_functions").splitlines()) == int(number)
        write(tree, f"{TOP}/current_tracer", "nop")
        assert read(tree, f"{TOP}/enabled_functions") == ""
        numbers.append((int(number), int(groups)))
    assert numbers[1][0] > numbers[0][0]
    assert numbers[1][1] == numbers[0][1] + 1
