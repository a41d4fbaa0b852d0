"""Histograms of Linux 5.10, which has fewer modifiers and operators than 6.1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.hist.field import Operator
from emulated_kernel.trace.hist.operators import find_operator
from emulated_kernel.trace.interface import INTERFACES
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError

TRIGGER = "/tracing/events/kprobes/reads/trigger"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel(MachineConfig(profile="linux-5.10")) as booted:
        booted.write_file("/kprobe_events", "p:reads vfs_read count=$arg3\n")
        yield booted


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ("keys=count.buckets=100", "Invalid field modifier"),
        ("keys=common_pid:vals=count.percent", "Invalid field modifier"),
        ("keys=common_pid:vals=count.graph", "Invalid field modifier"),
        ("keys=common_pid:kb=count*2", "Couldn't find field"),
        ("keys=common_pid:kb=count/2", "Couldn't find field"),
        ("keys=common_pid:kb=16", "Couldn't find field"),
    ],
)
def test_later_syntax_is_refused(kernel: Kernel, attributes: str, said: str) -> None:
    with pytest.raises(KernelError) as refused:
        kernel.write_file(TRIGGER, f"hist:{attributes}")
    assert refused.value.name == "EINVAL"
    assert said in kernel.read_file("/tracing/error_log").splitlines()[-3]


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("a-b-c", (Operator.MINUS, 1), (Operator.MINUS, 3)),
        ("a+b-c", (Operator.PLUS, 1), (Operator.MINUS, 3)),
        ("-(a+b)", (Operator.UNARY_MINUS, 0), (Operator.UNARY_MINUS, 0)),
        ("a*b", None, (Operator.MULT, 1)),
        ("a", None, None),
    ],
)
def test_operators(text: str, first: object, last: object) -> None:
    """5.10 splits an expression at its first operator, and 6.1 at its last one."""
    assert find_operator(text, INTERFACES["linux-5.10"]) == first
    assert find_operator(text, INTERFACES["linux-6.1"]) == last


def test_readme(kernel: Kernel) -> None:
    readme = kernel.read_file("/tracing/README")
    assert "numeric_literal" not in readme
    assert ".buckets" not in readme
