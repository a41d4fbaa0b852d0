"""Call chains on stacks that belong to no task: the end of the memory, and calls by the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return Kernel()


def _regs(kernel: Kernel, **values: int) -> SimpleNamespace:
    return SimpleNamespace(**dict.fromkeys(kernel.arch.pt_regs, 0) | values)


def test_the_chain_ends_with_the_memory(kernel: Kernel) -> None:
    place = kernel.image.kallsyms.lookup_name("vfs_read")
    assert place is not None
    stack = kernel.tracing.system.stack
    assert stack.callers(_regs(kernel, ip=place, sp=0x123)) == [place]
    assert stack.callers(_regs(kernel, ip=0x123, sp=place)) == [0x123]


def test_a_function_that_the_host_calls_has_no_caller(kernel: Kernel) -> None:
    chains = []
    stack = kernel.tracing.system.stack
    probe = Kprobe(symbol_name="int_sqrt", pre_handler=lambda _, regs: chains.append(stack.callers(regs)))
    kernel.register_kprobe(probe)
    function = kernel.image.kallsyms.lookup_name("int_sqrt")
    assert function is not None
    kernel.machine.calls.call(function, 9)
    kernel.unregister_kprobe(probe)
    assert [len(chain) for chain in chains] == [1]
