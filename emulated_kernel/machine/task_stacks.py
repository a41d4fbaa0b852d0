"""TaskStacks: the addresses at which the tasks of a stopped guest will continue, for patching text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence


class TaskStacks(ABC):
    """Interface to the tasks of a stopped guest, and to the return addresses on their stacks."""

    @abstractmethod
    def task_structs(self) -> Iterable[int]:
        """Return the addresses of all task_structs."""

    @abstractmethod
    def in_use_ranges(self, spans: Sequence[tuple[int, int]]) -> Collection[tuple[int, int]]:
        """Return the ranges of `spans` that contain a CPU's ip or a return address on a task's stack.

        `spans` are disjoint ranges [start, end).
        """

    def is_quiescent(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Return True if no CPU's ip and no return address on a task's stack is in a range of `spans`."""
        return not self.in_use_ranges(spans)
