"""tracefs' ports over the trace layer: events by group, trace arrays, kprobe_events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from emulated_kernel.trace.array_events import ArrayEvents
from emulated_kernel.trace.error_log import ErrorLog
from emulated_kernel.trace.event import TraceEvent
from emulated_kernel.trace.filter import GROUP_FILTER_TEXT
from emulated_kernel.trace.function_tracer import FunctionTracer
from emulated_kernel.trace.hist.trigger import hist_text
from emulated_kernel.trace.kprobe_events import KprobeEvents
from emulated_kernel.trace.page_format import header_event_text, header_page_text
from emulated_kernel.trace.trace_array import TraceArray
from emulated_kernel.trace.trace_arrays import TraceArrays, Tracing
from emulated_kernel.vfs.ports import EventPort
from emulated_kernel.wiring.views import EventViews


class Event:
    """Implements EventPort: an event as one trace array has it."""

    def __init__(self, tracing: Tracing, event: TraceEvent) -> None:
        self._events = tracing.events
        self._filters = tracing.filters
        self._triggers = tracing.triggers
        self._event = event

    @property
    def id(self) -> int:
        return self._event.id

    @property
    def is_switchable(self) -> bool:
        return self._event.is_switchable

    def enabled_text(self) -> str:
        """Raises: KernelError ENODEV."""
        return self._events.enabled_text(self._event)

    def set_enabled(self, enabled: bool) -> None:
        """Raises: KernelError as ArrayEvents.set_enabled."""
        self._events.set_enabled(self._event, enabled)

    def format_text(self) -> str:
        """Raises: KernelError ENODEV."""
        self._event.check_alive()
        return self._event.format_text()

    def filter_text(self) -> str:
        """Raises: KernelError ENODEV."""
        self._event.check_alive()
        return self._filters.text(self._event)

    def set_filter(self, data: bytes) -> None:
        """Raises: KernelError ENODEV, and as EventFilters.write."""
        self._event.check_alive()
        self._filters.write(self._event, data)

    def triggers(self) -> list[str]:
        """Raises: KernelError ENODEV."""
        self._event.check_alive()
        return self._triggers.records(self._event)

    def execute_trigger(self, data: bytes) -> int:
        """Raises: KernelError ENODEV, and as EventTriggers.write."""
        self._event.check_alive()
        return self._triggers.write(self._event, data)

    def hist_text(self) -> str:
        """Raises: KernelError ENODEV."""
        self._event.check_alive()
        return hist_text(self._triggers, self._event)

    def drop_histograms(self) -> None:
        """Raises: KernelError ENODEV."""
        self._event.check_alive()
        self._triggers.truncate(self._event)


class Group:
    """Implements GroupPort."""

    def __init__(self, events: Events, name: str) -> None:
        self._events = events
        self._name = name

    def _members(self) -> Mapping[str, TraceEvent]:
        return self._events.own.registry.in_group(self._name)

    def names(self) -> Collection[str]:
        return self._members().keys()

    def find(self, name: str) -> EventPort | None:
        event = self._members().get(name)
        return None if event is None else self._events.view(event)

    @property
    def is_switchable(self) -> bool:
        return any(event.is_switchable for event in self._members().values())

    def enabled_text(self) -> str:
        return self._events.own.set_enabled_text(self._members().values())

    def set_enabled(self, enabled: bool) -> None:
        """Raises: KernelError as ArrayEvents.set_all."""
        self._events.own.set_all((e for e in self._members().values() if e.is_switchable), enabled)

    def filter_text(self) -> str:
        return GROUP_FILTER_TEXT

    def set_filter(self, data: bytes) -> None:
        """Raises: KernelError as EventFilters.write_group."""
        self._events.filters.write_group(list(self._members().values()), data)


class Events:
    """Implements EventsPort. Objects live as long as what they stand for: open files hold them."""

    header_page_text = staticmethod(header_page_text)
    header_event_text = staticmethod(header_event_text)

    def __init__(self, tracing: Tracing) -> None:
        self.own = tracing.events
        self.filters = tracing.filters
        self._views: EventViews[TraceEvent, Event] = EventViews(lambda event: Event(tracing, event))
        self._groups: dict[str, Group] = {}

    @property
    def chosen(self) -> ArrayEvents:
        return self.own

    def names(self) -> Collection[str]:
        return self.own.registry.groups()

    def find(self, name: str) -> Group | None:
        if not self.own.registry.has_group(name):
            self._groups.pop(name, None)
            return None
        return self._groups.setdefault(name, Group(self, name))

    def view(self, event: TraceEvent) -> Event:
        """What shows an event."""
        return self._views.of(event)

    def newest_first(self) -> Iterable[str]:
        return (f"{event.group}:{event.name}\n" for event in self.own.switchable())

    def enabled_text(self) -> str:
        return self.own.set_enabled_text(self.own.switchable())

    def set_enabled(self, enabled: bool) -> None:
        """Raises: KernelError as ArrayEvents.set_all."""
        self.own.set_all(self.own.switchable(), enabled)


class Instance:
    """Implements InstancePort: a trace array with its events and errors."""

    def __init__(self, tracing: Tracing) -> None:
        self.trace: TraceArray = tracing.array
        self.events = Events(tracing)
        self.errors: ErrorLog = tracing.errors
        self.functions: FunctionTracer = tracing.functions


class Instances:
    """Implements InstancesPort."""

    def __init__(self, arrays: TraceArrays) -> None:
        self._arrays = arrays
        self._views: dict[str, tuple[Tracing, Instance]] = {}
        self.names = arrays.names

    def find(self, name: str) -> Instance | None:
        tracing = self._arrays.find(name)
        if tracing is None:
            return None
        known = self._views.get(name)
        if known is None or known[0] is not tracing:
            known = self._views[name] = tracing, Instance(tracing)
        return known[1]

    def make(self, name: str) -> None:
        """Raises: KernelError as TraceArrays.make."""
        self._arrays.make(name)

    def remove(self, name: str) -> None:
        """Raises: KernelError as TraceArrays.remove."""
        self._arrays.remove(name)
        self._views.pop(name, None)


class KprobeEventsFiles:
    """Implements KprobeEventsPort."""

    def __init__(self, events: KprobeEvents) -> None:
        self._events = events

    def definitions(self, start: int) -> Iterable[str]:
        return self._events.records(start)

    def execute(self, data: bytes) -> int:
        return self._events.write(data)

    def clear(self) -> None:
        self._events.clear()

    def profile(self, start: int) -> Iterable[str]:
        return self._events.profile_records(start)
