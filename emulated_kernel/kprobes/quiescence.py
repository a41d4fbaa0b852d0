"""GracePeriod finds the text that CPUs and tasks still use; DelayedWork calls a function at a later jiffy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager

from emulated_kernel.machine.task_stacks import TaskStacks

Span = tuple[int, int]
"""Address range: start, and end (exclusive)."""


class GracePeriod:
    """Tells which text is in use by CPUs and tasks; also runs or freezes tasks so that they leave text.

    The methods may be called only while the guest is stopped.
    """

    def __init__(
        self,
        kernel: TaskStacks,
        jiffies: Callable[[], int],
        yield_to_tasks: Callable[[], object],
        frozen: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        self._kernel = kernel
        self.jiffies = jiffies
        """Function that returns the present time in jiffies (units of 1/HZ seconds)."""
        self.yield_to_tasks = yield_to_tasks
        """Function that runs each runnable task of the guest once."""
        self.frozen = frozen
        """Function that returns a context manager, which freezes all tasks.

        The context manager yields True, or False if a task does not freeze.
        """
        self.in_use_ranges: Callable[[Sequence[Span]], Collection[Span]] = kernel.in_use_ranges
        self.is_quiescent: Callable[[Sequence[Span]], bool] = kernel.is_quiescent

    def tasks(self) -> Iterable[int]:
        """Return the addresses of all task_structs."""
        return self._kernel.task_structs()


class DelayedWork:
    """A function that is scheduled for a later jiffy.

    The function runs at the first call of `run_if_due` at or after this jiffy. The host calls `run_if_due`
    between requests.
    Mirrors: struct delayed_work.
    """

    def __init__(self, function: Callable[[], None], scheduler: GracePeriod) -> None:
        self._function = function
        self._scheduler = scheduler
        self.due: int | None = None
        """Jiffy at which the function is due; None if it is not pending."""

    def schedule(self, delay: int) -> None:
        """Schedule the function to run in `delay` jiffies. If it is already pending, do nothing."""
        if self.due is None:
            self.due = self._scheduler.jiffies() + delay

    def run_if_due(self) -> None:
        """Run the function if it is due."""
        if self.due is not None and self._scheduler.jiffies() >= self.due:
            self.flush()

    def flush(self) -> None:
        """Run the function now if it is pending. Mirrors: flush_delayed_work."""
        if self.due is not None:
            self.due = None
            self._function()
