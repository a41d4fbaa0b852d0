"""Trace events, and an event in one trace array: its filter, its triggers, and its soft mode."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.context.task_check import TaskCheck
from emulated_kernel.trace.events.trigger import Trigger, TriggerKind
from emulated_kernel.trace.filter.predicates import EventFilter
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.buffer_page import MAX_DATA_SIZE
from emulated_kernel.trace.ring.ring_layout import RecordTarget
from emulated_kernel.trace.ring.trace_entry import COMMON_FIELDS, EventField, RawEntry
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.util.errors import KernelError

_V = TypeVar("_V")
_NONE: Mapping[Any, Any] = {}
"""Empty mapping that all events without filters or files share."""


class Recorder(ABC):
    """Interface of the trace arrays for their events: a recorder writes the entries of events.

    The class TraceArray, which implements this interface, belongs to a higher layer, because it prints
    events.
    """

    name = ""
    """Name of the instance; "" for the top trace array."""

    @abstractmethod
    def entry(self, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> RawEntry:
        """Return the entry that record() would write, without writing it."""

    @abstractmethod
    def triggers_ignore(self, event: TraceEvent, payload: bytes, /) -> bool:
        """Return True if triggers that need the entry do not run, because the lists of pids exclude the task.

        `payload` is the entry without its 8 bytes of common fields.
        """

    @abstractmethod
    def reserve(self) -> RingBuffer | None:
        """Return the ring buffer that an entry would be written to now, or None if recording is off.

        Mirrors: kernel/trace/trace.c:trace_event_buffer_lock_reserve (v6.1).
        """

    @abstractmethod
    def record(
        self, event: TraceEvent, payload: bytes, hit: ProbeHit, place: RingBuffer | None = None, /
    ) -> None:
        """Write an entry of `event` to the ring buffer `place`, which reserve() returned.

        If `place` is None, write the entry to the current CPU's buffer.

        `payload` is the entry without its 8 bytes of common fields.
        """

    @abstractmethod
    def target(self) -> RecordTarget | None:
        """Return the ring buffers that guest code may write to, or None if the host has to call record()."""

    def task_check(self) -> TaskCheck | None:
        """Return the check that guest code must make before it records, or None if all tasks are recorded.

        The method is called only if target() returns buffers.
        """
        return None

    def off_since(self) -> int | None:
        """Return None if recording is on, else a number that is different for each pause of recording."""
        return None

    @abstractmethod
    def event_switched(self, event: TraceEvent, /, *, enabled: bool) -> None:
        """Take note that this trace array has enabled (`enabled` is True) or disabled an event."""

    @abstractmethod
    def event_removed(self, event: TraceEvent, /) -> None:
        """Handle the removal of an event that was once enabled in this trace array.

        The event's entries cannot be printed any more, so the trace array empties its buffers.
        Mirrors: kernel/trace/trace.c:tracing_reset_all_online_cpus (v6.1).
        """


class TraceEvent(ABC):
    """A trace event. Its entries have `id` as common_type. The id is 0 before the event is registered.

    There may be thousands of disabled events. To save memory, they share empty collections, so methods
    replace a collection instead of changing it.
    """

    __slots__ = (
        "_fields",
        "_print_fmt",
        "ever_enabled_in",
        "files",
        "filters",
        "group",
        "id",
        "name",
        "recorders",
        "references",
    )

    module = ""
    """Name of the event's module, or "" for the events of the kernel itself."""
    is_switchable = True
    """Whether the event can be enabled. It is False for events of the group ftrace."""
    is_registrable = True
    """Whether perf can count the event. If so, the event's directory has an `id` file."""

    is_tracepoint = False
    """Whether TRACE_EVENT() of Linux's sources defines the event."""

    def __init__(self, group: str, name: str, fields: Iterable[EventField] = (), print_fmt: str = "") -> None:
        self.group = group
        self.name = name
        self.id = 0
        self._fields = tuple(fields)
        self._print_fmt = print_fmt
        self.references = 0
        """Number of users of the event, such as hist triggers and event probes.

        The event cannot be removed while it has users.
        """
        self.filters: Mapping[Recorder, EventFilter] = _NONE
        """Trace array -> its filter for this event, for trace arrays that have a filter."""
        self.recorders: tuple[Recorder, ...] = ()
        """Trace arrays that have the event enabled."""
        self.ever_enabled_in: tuple[Recorder, ...] = ()
        """Trace arrays that have ever enabled the event; their buffers may hold its entries."""
        self.files: Mapping[Recorder, EventFile] = _NONE
        """Trace array -> triggers and soft mode of the event in the array; file() adds missing items."""

    @property
    def fields(self) -> tuple[EventField, ...]:
        """The event's own fields, in the order of the `format` file."""
        return self._fields

    @property
    def print_fmt(self) -> str:
        """The print format, as the `format` file shows it after `print fmt:`."""
        return self._print_fmt

    def hold(self) -> None:
        """Add a user of the event, which prevents its removal.

        Raises: KernelError EBUSY (its module is being unloaded).
        Mirrors: include/linux/trace_events.h:trace_event_try_get_ref (v6.1).
        """
        self.references += 1

    def let_go(self) -> None:
        """Remove a user that hold() added.

        Mirrors: include/linux/trace_events.h:trace_event_put_ref (v6.1).
        """
        self.references -= 1

    def changed(self) -> None:  # noqa: B027 - most events read their state at each hit
        """Recompile guest code for the event, because its recorders, filters or triggers have changed.

        Call this method also when a recorder's target() has changed. If the event has no guest code, do
        nothing.
        """

    @property
    def needs_entry(self) -> bool:
        """Whether the event has a trigger or is in soft mode in at least one trace array.

        Guest code cannot handle the hits of such an event.
        """
        for file in self.files.values():  # noqa: SIM110 - a generator would cost more calls
            if file.is_special:
                return True
        return False

    def file(self, recorder: Recorder) -> EventFile:
        """Return the event's EventFile in a trace array; create the EventFile if it does not exist."""
        found = self.files.get(recorder)
        if found is None:
            found = EventFile(self, recorder)
            self.files = {**self.files, recorder: found}
        return found

    def set_filter(self, recorder: Recorder, event_filter: EventFilter | None) -> None:
        """Set the filter that decides which hits are recorded in the trace array `recorder`.

        If `event_filter` is None, remove the filter, so that all hits are recorded.
        """
        if event_filter is not None:
            self.filters = {**self.filters, recorder: event_filter}
        elif recorder in self.filters:
            self.filters = _without(recorder, self.filters)
        else:
            return
        self.changed()

    def forget(self, recorder: Recorder) -> None:
        """Drop the filter and the EventFile of a trace array that is being removed.

        The event must be disabled in the trace array.
        """
        self.filters = _without(recorder, self.filters)
        self.files = _without(recorder, self.files)
        self.ever_enabled_in = _others(recorder, self.ever_enabled_in)

    @property
    def is_enabled(self) -> bool:
        """Whether any trace array has the event enabled."""
        return bool(self.recorders)

    @property
    def is_removed(self) -> bool:
        """Whether the event was deleted. Open files may still refer to it."""
        return False

    def enable(self, recorder: Recorder) -> None:
        """Begin to record hits in the trace array `recorder`.

        If no other trace array has the event enabled, start the event. If `recorder` has the event enabled
        already, do nothing.
        Raises: KernelError ENODEV (the event was removed), or the error of start().
        """
        self.check_alive()
        if recorder in self.recorders:
            return
        self.recorders += (recorder,)
        if len(self.recorders) == 1:
            try:
                self.start()
            except KernelError:
                self.recorders = ()
                raise
        recorder.event_switched(self, enabled=True)
        self.changed()
        if recorder not in self.ever_enabled_in:
            self.ever_enabled_in += (recorder,)

    def disable(self, recorder: Recorder) -> None:
        """Stop recording hits in the trace array `recorder`.

        If no other trace array has the event enabled, stop the event. If `recorder` does not have the event
        enabled, do nothing.
        Raises: KernelError ENODEV (the event was removed).
        """
        self.check_alive()
        if recorder not in self.recorders:
            return
        self.recorders = _others(recorder, self.recorders)
        recorder.event_switched(self, enabled=False)
        self.changed()
        if not self.recorders:
            self.stop()

    def check_alive(self) -> None:
        """Check that the event still exists. Raises: KernelError ENODEV (the event was removed)."""
        if self.is_removed:
            raise KernelError(errno.ENODEV, f"{self.group}/{self.name} was removed")

    @abstractmethod
    def start(self) -> None:
        """Begin to take hits, because a trace array has enabled the event.

        Raises: KernelError (the event cannot be started).
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop taking hits, because no trace array has the event enabled any more."""

    def record(self, payload: bytes, hit: ProbeHit) -> None:
        """Handle a hit: run the triggers, and write an entry to each trace array whose filter accepts it.

        All kinds of events call this method at a hit. `payload` is the entry without its common fields.
        """
        outer = hit.keep_origin(True)
        try:
            for recorder in self.recorders:
                file = self.files.get(recorder)
                if file is not None and file.is_special:
                    file.fire(payload, hit)
                elif self.passes_filter(recorder, payload, hit):
                    recorder.record(self, payload, hit)
        finally:
            hit.keep_origin(outer)

    def other_task(self, payload: bytes) -> int | None:  # noqa: ARG002
        """Return the pid of a second task that the event concerns, or None if there is no second task.

        The lists of pids apply to this task too.
        """
        return None

    def passes_filter(self, recorder: Recorder, payload: bytes, hit: ProbeHit) -> bool:
        """Return True if the filter of trace array `recorder` accepts the hit, or if there is no filter."""
        event_filter = self.filters.get(recorder)
        if event_filter is None or event_filter.program is None:
            return True
        return event_filter.program.accepts(recorder.entry(self, payload, hit))

    def format_text(self) -> str:
        """Return the text of the `format` file. Mirrors: kernel/trace/trace_events.c:f_show (v6.1)."""
        common = "".join(field.format_line() for field in COMMON_FIELDS)
        own = "".join(field.format_line() for field in self.fields)
        return f"name: {self.name}\nID: {self.id}\nformat:\n{common}\n{own}\nprint fmt: {self.print_fmt}\n"

    @abstractmethod
    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        """Return the text that the trace file shows after the event's name.

        `payload` is the entry without its 8 bytes of common fields. `sym_addr` is the trace option of this
        name.
        """

    def print_line(
        self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False, verbose: bool = False
    ) -> str:
        """Return the text that `trace` shows after the timestamp.

        `sym_addr` and `verbose` are the trace options of these names.
        """
        del verbose
        return f"{self.name}: {self.print_record(payload, symbols, sym_addr=sym_addr)}"


def _without(recorder: Recorder, owned: Mapping[Recorder, _V]) -> Mapping[Recorder, _V]:
    return {each: value for each, value in owned.items() if each is not recorder} or _NONE


def _others(recorder: Recorder, recorders: tuple[Recorder, ...]) -> tuple[Recorder, ...]:
    return tuple(each for each in recorders if each is not recorder)


class EventFile:
    """An event in one trace array: its triggers, and its soft mode.

    In soft mode the event is enabled, so that triggers get its hits. The hits are recorded unless the event
    is soft-disabled. Callers hold the control lock, in the place of Linux's event_mutex.
    Mirrors: include/linux/trace_events.h:struct trace_event_file (v6.1).
    """

    def __init__(self, event: TraceEvent, recorder: Recorder) -> None:
        self.event = event
        self.recorder = recorder
        self.triggers: list[Trigger] = []
        self._keyed: dict[Hashable, Trigger] = {}
        """Trigger.key -> the trigger, for a fast look-up: an event may have thousands of triggers."""
        self.soft_disabled = False
        self.is_special = False
        """Cached value: whether a hit has to go through fire(), because of triggers or soft mode."""
        self._soft_references = 0

    @property
    def soft_mode(self) -> bool:
        """Whether triggers of this or another event need the hits of this event."""
        return self._soft_references > 0

    @property
    def enabled(self) -> bool:
        """Whether the event is enabled in this trace array, also if it is only in soft mode.

        The hits are recorded unless the event is soft-disabled or its filter rejects them.
        """
        return self.recorder in self.event.recorders

    def enabled_text(self) -> str:
        """Return the text of the `enable` file, without its newline.

        Mirrors: kernel/trace/trace_events.c:event_enable_read.
        """
        records = self.enabled and not self.soft_disabled
        return f"{records:d}{'*' if self.soft_disabled or self.soft_mode else ''}"

    # Enabling. Mirrors: kernel/trace/trace_events.c:__ftrace_event_enable_disable (v6.1).

    def enable(self) -> None:
        """Record hits of the event. Raises: errors of TraceEvent.enable()."""
        self.soft_disabled = False
        self.event.enable(self.recorder)

    def disable(self) -> None:
        """Stop recording hits of the event. In soft mode, triggers still get the hits."""
        if not self.soft_mode:
            self.event.disable(self.recorder)
        self.soft_disabled = self.soft_mode

    def enable_soft(self) -> None:
        """Count one more user of the event's hits, such as a trigger; the first one starts soft mode.

        Raises: errors of TraceEvent.enable().
        """
        self._soft_references += 1
        if self._soft_references > 1:
            return
        if not self.enabled:
            self.soft_disabled = True
            try:
                self.event.enable(self.recorder)
            except KernelError:
                self._soft_references = 0
                self.soft_disabled = False
                raise
        self._changed()

    def disable_soft(self) -> None:
        """Count one user less, after enable_soft() has counted it. If no user is left, end soft mode."""
        self._soft_references -= 1
        if self._soft_references:
            return
        if self.soft_disabled:
            self.event.disable(self.recorder)
        self.soft_disabled = False
        self._changed()

    def hold(self) -> None:
        """Enable soft mode for a trigger that switches this event, and prevent the event's removal.

        Raises: errors of TraceEvent.enable().
        """
        self.event.hold()
        try:
            self.enable_soft()
        except KernelError:
            self.event.let_go()
            raise

    def let_go(self) -> None:
        """Undo hold(): end soft mode for the trigger, and allow the event's removal again."""
        self.disable_soft()
        self.event.let_go()

    # Triggers

    def trigger_with(self, key: Hashable) -> Trigger | None:
        """Return the trigger whose attribute `key` equals the parameter `key`, or None if there is none."""
        return self._keyed.get(key)

    def add(self, trigger: Trigger, *, last: bool = False) -> None:
        """Add a trigger before the existing ones, or after them if `last` is set.

        Raises: errors of TraceEvent.enable().
        Mirrors: kernel/trace/trace_events_trigger.c:register_trigger, trace_event_trigger_enable_disable
        (v6.1).
        """
        if not self.triggers:
            self.enable_soft()
        self.triggers.insert(len(self.triggers) if last else 0, trigger)
        if trigger.key is not None:
            self._keyed[trigger.key] = trigger
        self._changed()

    def remove(self, trigger: Trigger) -> None:
        """Remove a trigger from the event, and release the trigger's resources."""
        self.triggers.remove(trigger)
        if trigger.key is not None:
            del self._keyed[trigger.key]
        if not self.triggers:
            self.disable_soft()
        self._changed()
        trigger.released()

    def _changed(self) -> None:
        self.is_special = self.soft_mode or bool(self.triggers)
        self.event.changed()

    # Hits

    @property
    def needs_entry(self) -> bool:
        """Whether a trigger needs the entry of the hit.

        Mirrors: kernel/trace/trace_events_trigger.c:update_cond_flag (v6.1).
        """
        return any(trigger.needs_entry for trigger in self.triggers)

    def fire(self, payload: bytes, hit: ProbeHit) -> None:
        """Run the triggers; record the hit unless the event is soft-disabled or its filter rejects the hit.

        `payload`: the hit's entry without its common fields. Usually, entries that triggers write follow the
        entry of the hit. They precede it if the hit may still be rejected, because Linux then keeps the hit's
        entry in trace_buffered_event. They also precede it if a trigger enables or disables events.
        If a trigger needs the entry, nothing happens for an entry that fits into no page, or for a task that
        the lists of pids exclude. If no trigger needs it, the triggers run also for such a task, but the hit
        is not recorded.
        Mirrors: kernel/trace/trace_events.c:trace_event_buffer_reserve,
        kernel/trace/trace.c:trace_event_buffer_lock_reserve,
        kernel/trace/trace_events_trigger.c:__trace_trigger_soft_disabled,
        kernel/trace/trace.h:__event_trigger_test_discard (v6.1).
        """
        recorder = self.recorder
        deferred: list[Trigger] = []
        if self.needs_entry:
            if recorder.triggers_ignore(self.event, payload):
                return
            # The triggers may swap the buffers, but the entry that they have seen stays in this buffer.
            place = recorder.reserve()
            entry = recorder.entry(self.event, payload, hit)
            if len(entry.data) > MAX_DATA_SIZE:
                # The entry fits into no page, so no trigger sees it.
                return
            others_wait = hit.entry_waits
            waits = self._may_wait() and not hit.entry_waits
            is_first = place is not None and not waits and self._is_recorded(payload, hit)
            if is_first and not any(trigger.kind is TriggerKind.EVENT_ENABLE for trigger in self.triggers):
                # Linux discards an entry if a trigger disables the event meanwhile. With a trigger of kind
                # EVENT_ENABLE, the entry is therefore written after the triggers.
                recorder.record(self.event, payload, hit, place)
                place = None
            hit.entry_waits = others_wait or waits
            try:
                deferred = self.run_on_entry(entry, hit)
            finally:
                hit.entry_waits = others_wait
        else:
            was_disabled = self.soft_disabled
            for trigger in tuple(self.triggers):
                if not trigger.paused:
                    trigger.fire(hit, None)
            if was_disabled:
                # The hit is not recorded, even if one of the triggers has enabled the event.
                return
            place = recorder.reserve()
        if place is not None and self._is_recorded(payload, hit):
            recorder.record(self.event, payload, hit, place)
        self.run_deferred(deferred, hit)

    def _is_recorded(self, payload: bytes, hit: ProbeHit) -> bool:
        return not self.soft_disabled and self.event.passes_filter(self.recorder, payload, hit)

    def _may_wait(self) -> bool:
        """Return True if soft mode or a filter may reject the entry; Linux then does not write it at once."""
        event_filter = self.event.filters.get(self.recorder)
        return self.soft_disabled or (event_filter is not None and event_filter.program is not None)

    def run_on_entry(self, entry: RawEntry, hit: ProbeHit) -> list[Trigger]:
        """Run the triggers whose filters accept the entry.

        Return the triggers that must run after the entry is written.
        Mirrors: kernel/trace/trace_events_trigger.c:event_triggers_call (v6.1).
        """
        deferred: list[Trigger] = []
        for trigger in tuple(self.triggers):
            if trigger.paused or not trigger.accepts(entry):
                continue
            if trigger.is_post:
                deferred.append(trigger)
            else:
                trigger.fire(hit, entry)
        return deferred

    @staticmethod
    def run_deferred(deferred: Iterable[Trigger], hit: ProbeHit) -> None:
        """Run `deferred`, the triggers that run_on_entry() returned, after the entry was written.

        Mirrors: kernel/trace/trace_events_trigger.c:event_triggers_post_call (v6.1).
        """
        for trigger in deferred:
            if not trigger.paused:
                trigger.fire(hit, None)
