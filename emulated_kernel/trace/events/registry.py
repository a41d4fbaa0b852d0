"""The registry of all trace events of a kernel, by name and by id."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import chain

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

FIRST_EVENT_ID = 1 << 15
"""The first id of a registered event.

Lower ids belong to tracing's own entries and to events of the host kernel. perf_event_open(2) takes an event
by id only, so an id of this kernel must not be one of the host's.
Deviates: Linux's ids begin at __TRACE_LAST_TYPE.
"""
LAST_EVENT_ID = 0xFFFF
"""The greatest id that fits into an entry's common_type, which is a u16."""


def no_such_event(command: str, group: str, event: str) -> str:
    """Return the text of an error: `command` is for an event that does not exist, or for none."""
    if not group or not event:
        return f"{command}: no event is given; write {command}:GROUP:EVENT"
    return f"{group}:{event}: no such event; see available_events"


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
    """The event ids of a kernel that is being replaced; the new kernel's events get the same ids."""

    next_id: int
    """The lowest id that no event of the old kernel has had."""
    names: Mapping[int, tuple[str, str]]
    """Id -> group and name of the event."""


class EventRegistry:
    """All trace events of a kernel, by name and by id."""

    def __init__(self, first_id: int = FIRST_EVENT_ID) -> None:
        self._first_id = first_id
        self._next_id = first_id
        self._by_id: dict[int, TraceEvent] = {}
        self._free_ids: list[int] = []
        """Heap of the ids of removed events, which can be used again."""
        self._saved_ids: dict[tuple[str, str], int] = {}
        self._groups: dict[str, dict[str, TraceEvent]] = {}
        self._watchers: list[EventWatcher] = []
        self.hist_waiters: list[Callable[[], None]] = []
        """Functions to call at each hit that a histogram counts, for clients that poll hist files.

        Mirrors: kernel/trace/trace_events.c:hist_poll_wq (v7.2).
        """
        self.registered = 0
        """Count of all registrations of events so far; removals do not reduce it."""
        self._numbers: dict[TraceEvent, int] = {}
        """Event -> number of events that were registered before it. The keys are in order of registration."""

    def watch(self, watcher: EventWatcher) -> None:
        """Call the watcher's methods when events are added or removed from now on."""
        self._watchers.append(watcher)

    def __iter__(self) -> Iterator[TraceEvent]:
        """Iterate over the events in order of registration."""
        return iter(self._numbers)

    def find(self, group: str, name: str) -> TraceEvent | None:
        """Return the event called `name` in `group`, or None if no such event is registered."""
        return self.in_group(group).get(name)

    def by_id(self, event_id: int) -> TraceEvent | None:
        """Return the event with the id `event_id`, or None if no event has this id.

        The id is the common_type of the event's entries.
        """
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

        `older` is the value of `registered` when the trace array was created. Events that were registered
        since then come first, newest first. Older events follow in order of registration. `among`: the events
        to list, in order of registration; None means all events.
        """
        events = [*(self if among is None else among)]
        newer = 0
        while newer < len(events) and self._numbers[events[-1 - newer]] >= older:
            newer += 1
        return chain(reversed(events[len(events) - newer :]), events[: len(events) - newer])

    def add(self, event: TraceEvent) -> None:
        """Register an event and give it an id. Ids are reused only after each id was used once.

        Raises: KernelError EEXIST (name in use), ENODEV (no id left).
        Mirrors: kernel/trace/trace_output.c:register_trace_event (v6.1).
        """
        if self.find(event.group, event.name) is not None:
            raise KernelError(errno.EEXIST, f"{event.group}/{event.name} exists")
        kept = self._saved_ids.get((event.group, event.name))
        event.id = self._take_id() if kept is None or kept in self._by_id else kept
        self._by_id[event.id] = event
        self.add_own(event)

    def ids(self) -> EventIds:
        """Return the ids of all events. Pass them to keeping() of another kernel's registry."""
        return EventIds(self._next_id, {event_id: (e.group, e.name) for event_id, e in self._by_id.items()})

    @contextmanager
    def keeping(self, former: EventIds) -> Iterator[None]:
        """Give each event that is added in the `with` block the id that its name had in `former`.

        An event that `former` lacks gets a new id.
        """
        self._next_id = max(self._next_id, former.next_id)
        self._saved_ids = {name: event_id for event_id, name in former.names.items()}
        try:
            yield
        finally:
            self._saved_ids = {}
            # Ids below next_id that are unused here are given out after all new ids are used.
            used = self._by_id.keys()
            self._free_ids = [each for each in range(self._first_id, self._next_id) if each not in used]

    def add_own(self, event: TraceEvent) -> None:
        """Register an event of the group ftrace, whose id is the fixed number of its entry type.

        by_id() does not find the event. Its entries are printed by ENTRY_PRINTERS, which has a function for
        each entry type.
        """
        self._numbers[event] = self.registered
        self.registered += 1
        self._groups.setdefault(event.group, {})[event.name] = event
        for watcher in self._watchers:
            watcher.event_added(event)

    def remove(self, event: TraceEvent) -> None:
        """Unregister an event, drop its filters and free its id."""
        del self._by_id[event.id], self._numbers[event]
        heappush(self._free_ids, event.id)
        group = self._groups[event.group]
        del group[event.name]
        if not group:
            del self._groups[event.group]
        # A directory may keep the object for a while, and the filters take memory.
        event.filters = {}
        for watcher in self._watchers:
            watcher.event_removed(event)

    @property
    def free_ids(self) -> int:
        """Number of free ids, which is the number of events that can still be registered."""
        return LAST_EVENT_ID + 1 - self._next_id + len(self._free_ids)

    def _take_id(self) -> int:
        if self._next_id <= LAST_EVENT_ID:
            self._next_id += 1
            return self._next_id - 1
        if not self._free_ids:
            raise KernelError(errno.ENODEV, "all event ids are in use")
        return heappop(self._free_ids)
