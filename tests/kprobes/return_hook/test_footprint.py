"""The memory of the shadow stacks, compared with the figures of the talk about them (LPC 2023)."""

from __future__ import annotations

from emulated_kernel.kprobes.return_hook.memory_use import memory_table
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS

KB, MB = 1_000, 1_000_000


def test_the_slides_table() -> None:
    """The memory with 10 CPUs and 500 tasks is computed for 1 and 100 probes, with 10 nodes per probe and
    with 500.

    The slides show 1.6 KB and 160 KB. Their own formula, (16 * 8) * 10 + 10 * 48, gives 1760 bytes for one
    probe.
    """
    table = {row[0].stack: [cell.memory for cell in row] for row in memory_table(SHADOW_STACKS.values())}
    assert table["rethook"] == [480, 48 * KB, 24 * KB, 2.4 * MB]
    assert table["objpool"] == [1760, 176 * KB, 64_960, 6_496_000]
    assert table["fgraph"] == table["unified"] == [500 * 4096] * 4
    # The nodes have the same size; 64 list heads are shared by all hooks.
    assert table["instances"] == [bytes_ + 64 * 8 for bytes_ in table["rethook"]]


def test_unhooked_costs_nothing() -> None:
    for row in memory_table(SHADOW_STACKS.values(), cpus=1, tasks=0):
        assert row[0].memory <= 48 + 2 * 8 + 64 * 8
