"""The registry of all trace events of a kernel, by name and by id."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import chain

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

FIRST_EVENT_ID = 1 << 15
"""The first id of a registered event.

Lower ids belong to tracing's own entries and to the host's events. perf_event_open(2) takes the latter by
number only.
Deviates: Linux's ids begin at __TRACE_LAST_TYPE.
"""
LAST_EVENT_ID = 0xFFFF


class EventWatcher(ABC):
    """Interface of objects that are notified when events are added or removed."""

    @abstractmethod
    def event_added(self, event: TraceEvent) -> None:
        """Handle the registration of an event."""

    @abstractmethod
    def event_removed(self, event: TraceEvent) -> None:
        """Handle the removal of an event."""


@dataclass(frozen=True)
class EventIds:
    """The ids of events in a former kernel, so that a new one can use the same ids."""

    next_id: int
    names: Mapping[int, tuple[str, str]]
    """Id -> group and name."""


class EventRegistry:
    """All trace events of a kernel, by name and by id."""

    def __init__(self, first_id: int = FIRST_EVENT_ID) -> None:
        self._first_id = first_id
        self._next_id = first_id
        self._by_id: dict[int, TraceEvent] = {}
        self._free_ids: list[int] = []
        """Heap of ids that were given back."""
        self._kept_ids: dict[tuple[str, str], int] = {}
        self._groups: dict[str, dict[str, TraceEvent]] = {}
        self._watchers: list[EventWatcher] = []
        self.registered = 0
        """Number of events that were ever registered."""
        self._numbers: dict[TraceEvent, int] = {}
        """Event -> value of `registered` when it was added; in order of registration."""

    def watch(self, watcher: EventWatcher) -> None:
        """Notify the watcher of later changes."""
        self._watchers.append(watcher)

    def __iter__(self) -> Iterator[TraceEvent]:
        """Iterate over the events in order of registration."""
        return iter(self._numbers)

    def find(self, group: str, name: str) -> TraceEvent | None:
        """Return the event of that name, or None."""
        return self.in_group(group).get(name)

    def by_id(self, event_id: int) -> TraceEvent | None:
        """Return the event whose entries have this common_type, or None."""
        return self._by_id.get(event_id)

    def has_group(self, group: str) -> bool:
        """Return True if the group has an event."""
        return group in self._groups

    def groups(self) -> Collection[str]:
        """Return the names of the groups that have events."""
        return self._groups.keys()

    def in_group(self, group: str) -> Mapping[str, TraceEvent]:
        """Return a map name -> event of a group, in order of registration."""
        return self._groups.get(group, {})

    def listed(self, older: int, among: Iterable[TraceEvent] | None = None) -> Iterator[TraceEvent]:
        """Iterate over events in the order in which a trace array lists them.

        `older` is the number of events that were registered before the trace array was made. Later events
        come first, newest first; then the older ones follow in order of registration. `among` restricts the
        list to these events.
        """
        events = [*(self if among is None else among)]
        newer = 0
        while newer < len(events) and self._numbers[events[-1 - newer]] >= older:
            newer += 1
        return chain(reversed(events[len(events) - newer :]), events[: len(events) - newer])

    def add(self, event: TraceEvent) -> None:
        """Register the event and give it an id. Ids are reused only after all of them were used once.

        Raises: KernelError EEXIST (name in use), ENODEV (no id left).
        Mirrors: kernel/trace/trace_output.c:register_trace_event (v6.1).
        """
        if self.find(event.group, event.name) is not None:
            raise KernelError(errno.EEXIST, f"{event.group}/{event.name} exists")
        kept = self._kept_ids.get((event.group, event.name))
        event.id = self._take_id() if kept is None or kept in self._by_id else kept
        self._by_id[event.id] = event
        self.add_own(event)

    def ids(self) -> EventIds:
        """Return the ids that are in use, and the next new one."""
        return EventIds(self._next_id, {event_id: (e.group, e.name) for event_id, e in self._by_id.items()})

    @contextmanager
    def keeping(self, former: EventIds) -> Iterator[None]:
        """Give events that are added in this context the ids that their names had in `former`."""
        self._next_id = max(self._next_id, former.next_id)
        self._kept_ids = {name: event_id for event_id, name in former.names.items()}
        try:
            yield
        finally:
            self._kept_ids = {}
            # Unused ids are given out again after there are no new ones.
            used = self._by_id.keys()
            self._free_ids = [each for each in range(self._first_id, self._next_id) if each not in used]

    def add_own(self, event: TraceEvent) -> None:
        """Register an event of an entry type that tracing itself writes (events/ftrace).

        The id is the fixed number of that type. Its records are formatted without the registry.
        """
        self._numbers[event] = self.registered
        self.registered += 1
        self._groups.setdefault(event.group, {})[event.name] = event
        for watcher in self._watchers:
            watcher.event_added(event)

    def remove(self, event: TraceEvent) -> None:
        """Unregister an event."""
        del self._by_id[event.id], self._numbers[event]
        heappush(self._free_ids, event.id)
        group = self._groups[event.group]
        del group[event.name]
        if not group:
            del self._groups[event.group]
        for watcher in self._watchers:
            watcher.event_removed(event)

    @property
    def ids_left(self) -> int:
        """Number of events that can still be registered."""
        return LAST_EVENT_ID + 1 - self._next_id + len(self._free_ids)

    def _take_id(self) -> int:
        if self._next_id <= LAST_EVENT_ID:
            self._next_id += 1
            return self._next_id - 1
        if not self._free_ids:
            raise KernelError(errno.ENODEV, "all event ids are in use")
        return heappop(self._free_ids)
