"""Records of the kernel that ran before the last reboot, and the events and task names for printing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.text.cmdlines import UNKNOWN_COMM, SavedCmdlines, TaskNames
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True)
class PreviousBootNames:
    """Events (id -> event) and task names of an earlier kernel. The running kernel may reuse ids and pids."""

    events: Mapping[int, TraceEvent]
    cmdlines: SavedCmdlines

    def find_event(self, now: Callable[[int], TraceEvent | None], number: int) -> TraceEvent | None:
        """Return the earlier kernel's event with the id `number`.

        If the earlier kernel had no event with this id, return now(number): the running kernel's event, or
        None if it has none either. The buffers may also hold records of the running kernel, after those of
        the earlier kernel.
        """
        return self.events.get(number) or now(number)


@dataclass(frozen=True)
class CombinedTaskNames(TaskNames):
    """Task names of the earlier kernel.

    For pids that the earlier kernel did not know, names of the running kernel are used.
    """

    then: SavedCmdlines
    now: SavedCmdlines

    def find(self, pid: int) -> str:
        found = self.then.find(pid)
        return self.now.find(pid) if found == UNKNOWN_COMM else found

    def find_tgid(self, pid: int) -> int:
        return self.then.find_tgid(pid) or self.now.find_tgid(pid)


@dataclass(frozen=True)
class PreviousBootRecords:
    """The buffers of an earlier kernel's trace array, with their records.

    The trace array that takes the buffers owns them afterwards.
    """

    buffers: list[RingBuffer]
    aside: list[RingBuffer]
    """The snapshot's buffers, one per CPU."""
    has_snapshot: bool
    time_start: int = 0
    max_latency_ns: int = 0
    names: PreviousBootNames | None = None
    """Events and task names for printing the records; None if those of the running kernel are used."""

    def __len__(self) -> int:
        return sum(len(buffer) for buffer in (*self.buffers, *self.aside))
