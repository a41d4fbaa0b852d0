"""Records of a kernel that runs no longer, with the events and task names needed to print them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.text.cmdlines import UNKNOWN_COMM, SavedCmdlines, TaskNames
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True)
class PreviousBootNames:
    """Events and task names of the earlier kernel, whose numbers may mean something else now."""

    events: Mapping[int, TraceEvent]
    cmdlines: SavedCmdlines

    def find_event(self, now: Callable[[int], TraceEvent | None], number: int) -> TraceEvent | None:
        """Return the event of a record's type `number`: the earlier kernel's, else what `now` finds.

        Records of the running kernel may follow those of the earlier one, so `now` looks up the current
        events.
        """
        return self.events.get(number) or now(number)


@dataclass(frozen=True)
class CombinedTaskNames(TaskNames):
    """Task names of the earlier kernel; for tasks that it did not know, names of the running kernel."""

    then: SavedCmdlines
    now: SavedCmdlines

    def find(self, pid: int) -> str:
        found = self.then.find(pid)
        return self.now.find(pid) if found == UNKNOWN_COMM else found

    def find_tgid(self, pid: int) -> int:
        return self.then.find_tgid(pid) or self.now.find_tgid(pid)


@dataclass(frozen=True)
class PreviousBootRecords:
    """The content of a trace array's buffers, one buffer per CPU.

    The trace array that takes them owns them.
    """

    buffers: list[RingBuffer]
    aside: list[RingBuffer]
    """The snapshot's buffers, one per CPU."""
    has_snapshot: bool
    time_start: int = 0
    max_latency_ns: int = 0
    names: PreviousBootNames | None = None
    """Names to print the records with, if the running kernel has other ones."""

    def __len__(self) -> int:
        return sum(len(buffer) for buffer in (*self.buffers, *self.aside))
