"""Records of a kernel that runs no more, and what they are printed with: its events, and its tasks' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.text.cmdlines import UNKNOWN_COMM, SavedCmdlines, TaskNames
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True)
class PreviousBootNames:
    """What tells events and tasks of then from those that have their numbers now."""

    events: Mapping[int, TraceEvent]
    cmdlines: SavedCmdlines

    def find_event(self, now: Callable[[int], TraceEvent | None], number: int) -> TraceEvent | None:
        """That of an entry; `now` finds those of entries that came behind what was there then."""
        return self.events.get(number) or now(number)


@dataclass(frozen=True)
class CombinedTaskNames(TaskNames):
    """Names of then, and of now for tasks that weren't known then."""

    then: SavedCmdlines
    now: SavedCmdlines

    def find(self, pid: int) -> str:
        found = self.then.find(pid)
        return self.now.find(pid) if found == UNKNOWN_COMM else found

    def find_tgid(self, pid: int) -> int:
        return self.then.find_tgid(pid) or self.now.find_tgid(pid)


@dataclass(frozen=True)
class PreviousBootRecords:
    """What a trace array had in its buffers, one a CPU; whoever takes them has them alone."""

    buffers: list[RingBuffer]
    aside: list[RingBuffer]
    """The snapshot's."""
    has_snapshot: bool
    time_start: int = 0
    max_latency_ns: int = 0
    names: PreviousBootNames | None = None
    """Those that the records are printed with, where the array's kernel has others."""

    def __len__(self) -> int:
        return sum(map(len, (*self.buffers, *self.aside)))
