"""The function_graph tracer on two CPUs with random switches of CPU: the recorded calls of a task form a
tree.
"""

from __future__ import annotations

from collections import defaultdict
from struct import Struct

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.output.graph_output import NAME, GraphRecords
from emulated_kernel.trace.ring.trace_entry import TRACE_ENTRY, EntryType
from emulated_kernel.util.config import MachineConfig
from tests.smp.conftest import clients
from tests.smp.loops import TURNS, loop
from tests.smp.seeds import seeds
from tests.smp.test_records import run

CASES = [
    (arch, stack, seed)
    for arch, stack in (("x86_64", "unified"), ("riscv64", "rethook"))
    for seed in seeds(3)
]


def _calls(kernel: Kernel) -> dict[int, list[tuple[str, int, int]]]:
    """Return pid -> list of ("begins" or "ends", function, depth of the call), in the order of time."""
    records = GraphRecords(kernel.arch.word_size)
    formats: dict[int, tuple[str, Struct]] = {
        EntryType.GRAPH_ENT: ("begins", records.entered),
        EntryType.GRAPH_RET: ("ends", records.returned),
    }
    found = defaultdict(list)
    merged = sorted((stamp, data) for buffer in kernel.trace.buffers for stamp, data in buffer)
    for _, data in merged:
        kind, _, _, pid = TRACE_ENTRY.unpack_from(data)
        what, layout = formats[kind]
        func, depth, *_ = layout.unpack_from(data, TRACE_ENTRY.size)
        found[pid].append((what, func, depth))
    return found


@pytest.mark.parametrize(("arch", "stack", "seed"), CASES)
def test_trees_of_tasks(arch: str, stack: str, seed: int) -> None:
    """Every call of lcm is recorded.

    A recorded call ends in the task that began the call, after the nested calls of gcd.
    """
    config = MachineConfig(cpus=2, arch=arch, seed=seed, quantum=9, run_budget=20, return_hook=stack)
    with Kernel(config) as kernel:
        for name in (b"lcm", b"gcd"):
            kernel.trace_arrays.top.functions.filter.write(name)
        tasks = clients(kernel, 3)
        address = loop(kernel, "lcm")
        kernel.trace.set_tracer(NAME)
        before = kernel.kprobes.compiler.made
        for _ in range(2):
            run(kernel, tasks, address, results=())
        assert kernel.kprobes.compiler.made > before
        found = _calls(kernel)
        kernel.trace.set_tracer("nop")
        assert kernel.machine.text.ledger == {}
    assert set(found) == {task.pid for task in tasks}
    for calls in found.values():
        opened: list[tuple[int, int]] = []
        for what, func, depth in calls:
            if what == "begins":
                assert depth == len(opened)
                opened.append((func, depth))
            else:
                assert opened.pop() == (func, depth)
        assert opened == []
        assert sum(what == "begins" and depth == 0 for what, _, depth in calls) == 2 * TURNS
