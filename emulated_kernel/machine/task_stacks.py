"""TaskStacks: the tasks of a kernel that stands still, and where they go on: what patching text asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence


class TaskStacks(ABC):
    """The tasks of a kernel that stands still, and where each of them will go on."""

    @abstractmethod
    def task_structs(self) -> Iterable[int]:
        """Addresses of all tasks."""

    @abstractmethod
    def in_use_ranges(self, spans: Sequence[tuple[int, int]]) -> Collection[tuple[int, int]]:
        """Which of the disjoint ranges [start, end) hold a CPU's ip or a return address on a task's stack."""

    def is_quiescent(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether no CPU's ip and no return address on a task's stack is in any of the ranges."""
        return not self.in_use_ranges(spans)
