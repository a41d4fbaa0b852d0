"""Memory use of each kind of shadow stack, measured by its actual allocations."""

from __future__ import annotations

from collections.abc import Iterable

from emulated_kernel.kprobes.return_hook.guest_heap import GuestHeap, TaskFields
from emulated_kernel.kprobes.return_hook.shadow_stack import ShadowStack
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import dataclass

WORD = 8
_FIELDS = {"task_struct.rethooks": 0, "task_struct.ret_stack": WORD}
_TASK_SIZE = 1 << 10


@dataclass(frozen=True)
class Footprint:
    """Memory use of one kind of shadow stack: `memory` bytes for `probes` hooks of `nodes` nodes each.

    `stack`: name of the kind (ShadowStack.name).
    """

    stack: str
    probes: int
    nodes: int
    memory: int


def footprint(kind: type[ShadowStack], *, cpus: int, tasks: int, probes: int, nodes: int) -> Footprint:
    """Return the memory that a shadow stack of class `kind` takes for hooks and for the tasks' arrays.

    No kernel is booted: the function creates a shadow stack for `cpus` CPUs and `tasks` tasks, with `probes`
    hooks of `nodes` nodes each. The control blocks of hooks and the heads of their rings are not counted.
    Source: "Unifying return hooks" (LPC 2023).
    """
    source = _Pages()
    fields = TaskFields(source, {**_FIELDS, "percpu.base": 0, "percpu.current_task": 0}, WORD)
    stack = kind(GuestHeap(source, WORD), fields, cpus)
    hooks = [stack.add_hook(nodes, 0) for _ in range(probes)]
    stack.give_stacks(range(_Pages.TASKS, _Pages.TASKS + tasks * _TASK_SIZE, _TASK_SIZE))
    memory = stack.shared_memory + sum(stack.memory_of(hook) for hook in hooks)
    return Footprint(kind.name, probes, nodes, memory)


def memory_table(
    kinds: Iterable[type[ShadowStack]], *, cpus: int = 10, tasks: int = 500
) -> list[list[Footprint]]:
    """Return the memory use of each kind of shadow stack: one row per kind, with four entries.

    The entries are for 1 and 100 probes with a node per CPU, then for 1 and 100 probes with a node per task.
    """
    columns = [(probes, nodes) for nodes in (cpus, tasks) for probes in (1, 100)]
    return [
        [footprint(kind, cpus=cpus, tasks=tasks, probes=probes, nodes=nodes) for probes, nodes in columns]
        for kind in kinds
    ]


class _Pages:
    """Replacement for a machine's memory: it allocates pages, and any other address reads as zeros."""

    TASKS = 1 << 40

    def __init__(self) -> None:
        self.memory = self
        self._pages: dict[int, bytearray] = {}
        self._next = PAGE_SIZE

    def view(self, va: int, size: int) -> memoryview:
        start = next((base for base, data in self._pages.items() if base <= va < base + len(data)), None)
        if start is None:
            return memoryview(bytearray(size))
        return memoryview(self._pages[start])[va - start : va - start + size]

    def alloc_pages(self, size: int) -> int:
        base = self._next
        self._pages[base] = bytearray(size)
        self._next += size
        return base

    def free_pages(self, va: int) -> None:
        del self._pages[va]
