"""All trace events of a kernel, by name and by id."""

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
"""Lower ids are tracing's own entries, and the host's events, which perf_event_open(2) takes by number alone.

Deviates: Linux's begin at __TRACE_LAST_TYPE.
"""
LAST_EVENT_ID = 0xFFFF


class EventWatcher(ABC):
    """Told of events that come and go."""

    @abstractmethod
    def event_added(self, event: TraceEvent) -> None:
        """It was registered."""

    @abstractmethod
    def event_removed(self, event: TraceEvent) -> None:
        """It is registered no more."""


@dataclass(frozen=True)
class EventIds:
    """Which ids events had in a kernel."""

    next_id: int
    names: Mapping[int, tuple[str, str]]
    """Group and name by id."""


class EventRegistry:
    """All trace events of a kernel, by name and by id."""

    def __init__(self, first_id: int = FIRST_EVENT_ID) -> None:
        self._first_id = first_id
        self._next_id = first_id
        self._by_id: dict[int, TraceEvent] = {}
        self._free_ids: list[int] = []
        """A heap of those that were given back."""
        self._kept_ids: dict[tuple[str, str], int] = {}
        self._groups: dict[str, dict[str, TraceEvent]] = {}
        self._watchers: list[EventWatcher] = []
        self.registered = 0
        """How many there ever were."""
        self._numbers: dict[TraceEvent, int] = {}
        """Which of them each is, in that order."""

    def watch(self, watcher: EventWatcher) -> None:
        """Tell this one of changes from now on."""
        self._watchers.append(watcher)

    def __iter__(self) -> Iterator[TraceEvent]:
        """In order of registration."""
        return iter(self._numbers)

    def find(self, group: str, name: str) -> TraceEvent | None:
        """The event of that name."""
        return self.in_group(group).get(name)

    def by_id(self, event_id: int) -> TraceEvent | None:
        """The event whose entries have this common_type."""
        return self._by_id.get(event_id)

    def has_group(self, group: str) -> bool:
        """Whether the group has an event."""
        return group in self._groups

    def groups(self) -> Collection[str]:
        """Names of the groups that have events."""
        return self._groups.keys()

    def in_group(self, group: str) -> Mapping[str, TraceEvent]:
        """The events of a group by name, in order of registration."""
        return self._groups.get(group, {})

    def listed(self, older: int, among: Iterable[TraceEvent] | None = None) -> Iterator[TraceEvent]:
        """As a trace array lists them, or those `among` them, that was made when so many had been registered.

        Later ones come first, the newest of them before all; then the older ones as they came.
        """
        events = [*(self if among is None else among)]
        newer = 0
        while newer < len(events) and self._numbers[events[-1 - newer]] >= older:
            newer += 1
        return chain(reversed(events[len(events) - newer :]), events[: len(events) - newer])

    def add(self, event: TraceEvent) -> None:
        """Give the event its id; ids run on, and are used again only when there are no new ones.

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
        """Those that are in use, and where they go on."""
        return EventIds(self._next_id, {event_id: (e.group, e.name) for event_id, e in self._by_id.items()})

    @contextmanager
    def keeping(self, former: EventIds) -> Iterator[None]:
        """Events that come within have the ids that those of their names had."""
        self._next_id = max(self._next_id, former.next_id)
        self._kept_ids = {name: event_id for event_id, name in former.names.items()}
        try:
            yield
        finally:
            self._kept_ids = {}
            # Ids that nobody has are used again, once there are no new ones.
            used = self._by_id.keys()
            self._free_ids = [each for each in range(self._first_id, self._next_id) if each not in used]

    def add_own(self, event: TraceEvent) -> None:
        """Name an event of tracing's own entries, which has its id and is printed without its help."""
        self._numbers[event] = self.registered
        self.registered += 1
        self._groups.setdefault(event.group, {})[event.name] = event
        for watcher in self._watchers:
            watcher.event_added(event)

    def remove(self, event: TraceEvent) -> None:
        """Forget a registered event."""
        del self._by_id[event.id], self._numbers[event]
        heappush(self._free_ids, event.id)
        group = self._groups[event.group]
        del group[event.name]
        if not group:
            del self._groups[event.group]
        for watcher in self._watchers:
            watcher.event_removed(event)

    def _take_id(self) -> int:
        if self._next_id <= LAST_EVENT_ID:
            self._next_id += 1
            return self._next_id - 1
        if not self._free_ids:
            raise KernelError(errno.ENODEV, "all event ids are in use")
        return heappop(self._free_ids)
