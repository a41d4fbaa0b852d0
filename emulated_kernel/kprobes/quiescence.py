"""GracePeriod: the guest's jiffies, tasks, and their text; DelayedWork: what is due at a jiffy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager

from emulated_kernel.machine.task_stacks import TaskStacks

Span = tuple[int, int]
"""Addresses [start, end)."""


class GracePeriod:
    """Time as delayed work counts it, and the guest's tasks and stacks; asked only while the guest stands."""

    def __init__(
        self,
        kernel: TaskStacks,
        jiffies: Callable[[], int],
        yield_to_tasks: Callable[[], object],
        frozen: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        self._kernel = kernel
        self.jiffies = jiffies
        """1/HZ seconds."""
        self.yield_to_tasks = yield_to_tasks
        """Gives the CPU to each runnable task once."""
        self.frozen = frozen
        """All tasks are in the refrigerator meanwhile; False: not all got there, and none is."""
        self.in_use_ranges: Callable[[Sequence[Span]], Collection[Span]] = kernel.in_use_ranges
        self.is_quiescent: Callable[[Sequence[Span]], bool] = kernel.is_quiescent

    def tasks(self) -> Iterable[int]:
        """Addresses of all task_structs."""
        return self._kernel.task_structs()


class DelayedWork:
    """One function and, while it is pending, the jiffy at which it is due.

    Nothing runs by itself: the host calls `run_if_due` between requests. Mirrors: struct delayed_work.
    """

    def __init__(self, function: Callable[[], None], scheduler: GracePeriod) -> None:
        self._function = function
        self._scheduler = scheduler
        self.due: int | None = None
        """None: not pending."""

    def schedule(self, delay: int) -> None:
        """Let it run in `delay` jiffies; one that is pending stays as it is."""
        if self.due is None:
            self.due = self._scheduler.jiffies() + delay

    def run_if_due(self) -> None:
        """Run it if its time has come."""
        if self.due is not None and self._scheduler.jiffies() >= self.due:
            self.flush()

    def flush(self) -> None:
        """Run it now if it is pending. Mirrors: flush_delayed_work."""
        if self.due is not None:
            self.due = None
            self._function()
