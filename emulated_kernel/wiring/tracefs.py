"""tracefs' ports over the trace layer: events by group, the trace array, kprobe_events."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.error_log import ErrorLog
from emulated_kernel.trace.event import KprobeTraceEvent
from emulated_kernel.trace.filter import GROUP_FILTER_TEXT
from emulated_kernel.trace.kprobe_events import KprobeEvents
from emulated_kernel.trace.trace_array import TraceArray
from emulated_kernel.trace.trace_pipe import TracePipe
from emulated_kernel.vfs.ports import EventPort
from emulated_kernel.wiring.views import EventViews


class Event:
    """Implements EventPort for a kprobe event."""

    def __init__(self, events: KprobeEvents, event: KprobeTraceEvent, expand: Callable[[], None]) -> None:
        self._events = events
        self._event = event
        self._expand = expand

    @property
    def id(self) -> int:
        return self._event.id

    @property
    def enabled(self) -> bool:
        self._check_alive()
        return self._event.is_enabled

    def set_enabled(self, enabled: bool) -> None:
        """Raises: KernelError ENODEV, and what enabling the kprobes raises."""
        self._check_alive()
        if enabled:
            self._expand()
            self._events.enable(self._event)
        else:
            self._events.disable(self._event)

    def format_text(self) -> str:
        self._check_alive()
        return self._event.format_text()

    def filter_text(self) -> str:
        self._check_alive()
        return self._events.filters.text(self._event)

    def set_filter(self, data: bytes) -> None:
        """Raises: KernelError ENODEV, and as EventFilters.write."""
        self._check_alive()
        self._events.filters.write(self._event, data)

    def _check_alive(self) -> None:
        if not self._event.probes:
            raise KernelError(errno.ENODEV, f"{self._event.group}/{self._event.name} was removed")


class _EventSet(ABC):
    """What a group and the whole of events/ have in common: a switch for all of them."""

    @abstractmethod
    def members(self) -> Iterable[EventPort]:
        """The events that the switch is for."""

    def enabled_text(self) -> str:
        """Mirrors: kernel/trace/trace_events.c:system_enable_read (v6.1)."""
        states = {event.enabled for event in self.members()}
        return {frozenset({False}): "0", frozenset({True}): "1", frozenset({False, True}): "X"}.get(
            frozenset(states), "?"
        )

    def set_enabled(self, enabled: bool) -> None:
        """Switch all. Linux: one that fails doesn't keep the others from it; its errno is the answer."""
        failure: KernelError | None = None
        for event in self.members():
            try:
                event.set_enabled(enabled)
            except KernelError as error:
                failure = failure or error
        if failure is not None:
            raise failure


class Group(_EventSet):
    """Implements GroupPort."""

    def __init__(self, events: Events, name: str) -> None:
        self._events = events
        self._name = name

    def names(self) -> Collection[str]:
        return self._events.names_in(self._name)

    def find(self, name: str) -> EventPort | None:
        return self._events.event(self._name, name)

    def filter_text(self) -> str:
        return GROUP_FILTER_TEXT

    def set_filter(self, data: bytes) -> None:
        """Raises: KernelError as EventFilters.write_group."""
        self._events.set_group_filter(self._name, data)

    def members(self) -> Iterable[EventPort]:
        return [event for name in self.names() if (event := self.find(name)) is not None]


class Events(_EventSet):
    """Implements EventsPort. Objects live as long as what they stand for: open files hold them."""

    def __init__(self, events: KprobeEvents, expand: Callable[[], None]) -> None:
        self._events = events
        self._views = EventViews(lambda event: Event(events, event, expand))
        self._groups: dict[str, Group] = {}

    def _by_group(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for event in self._events.events():
            groups.setdefault(event.group, []).append(event.name)
        return groups

    def names(self) -> Collection[str]:
        return list(self._by_group())

    def names_in(self, group: str) -> Collection[str]:
        return self._by_group().get(group, [])

    def find(self, name: str) -> Group | None:
        if not self._events.registry.has_group(name):
            self._groups.pop(name, None)
            return None
        return self._groups.setdefault(name, Group(self, name))

    def event(self, group: str, name: str) -> EventPort | None:
        event = self._events.find(group, name)
        if event is None:
            return None
        return self._views.of(event)

    def set_group_filter(self, group: str, data: bytes) -> None:
        """Raises: KernelError as EventFilters.write_group."""
        members = [event for event in self._events.events() if event.group == group]
        self._events.filters.write_group(members, data)

    def members(self) -> Iterable[EventPort]:
        found = (self.event(event.group, event.name) for event in self._events.events())
        return [event for event in found if event is not None]


class KprobeEventsFiles:
    """Implements KprobeEventsPort."""

    def __init__(self, events: KprobeEvents) -> None:
        self._events = events

    def definitions(self) -> Iterable[str]:
        return self._events.records()

    def execute(self, data: bytes) -> int:
        return self._events.write(data)

    def clear(self) -> None:
        self._events.clear()

    def profile(self) -> Iterable[str]:
        return self._events.profile_records()


class Trace:
    """Implements TracePort: the trace array, and the error log beside it."""

    def __init__(self, array: TraceArray, errors: ErrorLog) -> None:
        self._array = array
        self._errors = errors
        self.trace_text = array.trace_text
        self.clear_trace = array.clear_trace
        self.set_tracing_on = array.set_tracing_on
        self.write_marker = array.write_marker
        self.buffer_size_text = array.buffer_size_text
        self.resize_buffer = array.resize_buffer
        self.buffer_total_size_text = array.buffer_total_size_text
        self.tracers = array.tracers
        self.set_tracer = array.set_tracer
        self.error_log = errors.records
        self.clear_error_log = errors.clear

    def open_pipe(self, *, nonblock: bool = False) -> TracePipe:
        """Raises: KernelError EBUSY while there is a reader already."""
        return TracePipe(self._array, nonblock=nonblock)

    @property
    def tracing_on(self) -> bool:
        return self._array.tracing_on

    @property
    def current_tracer(self) -> str:
        return self._array.current_tracer
