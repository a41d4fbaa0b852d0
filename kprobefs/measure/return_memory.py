"""`kprobefs bench return --memory`: the memory that return hooks take, and the figures of a talk.

Source: "Unifying return hooks" (LPC 2023).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from emulated_kernel.kprobes.return_hook.memory_use import Footprint, memory_table
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS

CPUS = 10
TASKS = 500
SLIDES = {
    "rethook": ("480B", "48KB", "24KB", "2.4MB"),
    "objpool": ("1.6KB", "160KB", "65KB", "6.5MB"),
    "fgraph": ("2MB",) * 4,
}
"""Shadow stack -> memory according to the talk.

The figures are for 1 and 100 probes with a node for each CPU, and then for 1 and 100 probes with a node for
each task. A node is the storage for one pending call.
"""
NOTES = (
    "Of hooks, their nodes; of objpool's rings, their entries; of fgraph, the tasks'",
    "  arrays. As there, control blocks and rings' heads aren't counted.",
    "rethook: as there; 48 bytes a node, as its figures are made with, though the",
    "  second slide says 64.",
    "objpool: its own formula, (16 * 8) * 10 + 10 * 48, is 1,760 where it has 1.6KB;",
    "  176,000 for 160KB.",
    "fgraph: 500 pages, 2,048,000 bytes, are its 2MB; unified is the same array,",
    "  whoever hooks.",
    "instances: not in the talk; rethook's nodes, and 64 heads of lists that all",
    "  probes share.",
)
"""Text below the table: differences from the talk, and their reasons."""


def memory(*, as_json: bool) -> None:
    """Compute the memory of return hooks, and print a table with NOTES, or JSON."""
    rows = memory_table(SHADOW_STACKS.values(), cpus=CPUS, tasks=TASKS)
    if as_json:
        print(json.dumps([cell for row in rows for cell in _cells(row)], indent=2))
        return
    print("\n".join(_table(rows)))


def _cells(row: Sequence[Footprint]) -> Iterator[dict[str, object]]:
    for cell, slides in zip(row, _slides(row), strict=True):
        yield {
            "backend": cell.stack,
            "probes": cell.probes,
            "nodes": cell.nodes,
            "bytes": cell.memory,
            "slides": slides or None,
        }


def _slides(row: Sequence[Footprint]) -> Sequence[str]:
    return SLIDES.get(row[0].stack, ("",) * len(row))


def _table(rows: Sequence[Sequence[Footprint]]) -> Iterator[str]:
    yield f"bytes on a 64-bit machine with {CPUS} CPUs and {TASKS} tasks; in brackets the talk's"
    lines = [("", *(f"{cell.probes} x {cell.nodes} nodes" for cell in rows[0]))]
    for row in rows:
        both = zip(row, _slides(row), strict=True)
        lines.append((row[0].stack, *(f"{cell.memory:,} ({slides or '-'})" for cell, slides in both)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        yield f"{name:{widths[0]}}" + "".join(
            f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)
        )
    yield from NOTES
