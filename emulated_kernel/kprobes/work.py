"""DelayedWork: something to do later, when whoever owns time says that it is due."""

from __future__ import annotations

from collections.abc import Callable


class DelayedWork:
    """One function and, while it is pending, the jiffy at which it is due.

    Nothing runs by itself: the host calls `run_if_due` between requests. Mirrors: struct delayed_work.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._due: int | None = None
        self.now_jiffies: Callable[[], int] = lambda: 0
        """The clock; set by whoever owns time."""

    @property
    def is_pending(self) -> bool:
        return self._due is not None

    def schedule(self, delay: int) -> None:
        """Let it run in `delay` jiffies; one that is pending stays as it is."""
        if self._due is None:
            self._due = self.now_jiffies() + delay

    def run_if_due(self) -> None:
        """Run it if its time has come."""
        if self._due is not None and self.now_jiffies() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Run it now if it is pending. Mirrors: flush_delayed_work."""
        if self._due is not None:
            self._due = None
            self._function()
