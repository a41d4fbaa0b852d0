"""Trace events, and an event in one trace array: its filter, its triggers, and its soft mode."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from emulated_kernel.trace.context.probe_hit import ProbeHit
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
"""The filters and the files of an event that has none."""


class Recorder(ABC):
    """What an event is recorded in: a trace array, which stands above the events that it prints."""

    @abstractmethod
    def entry(self, event: TraceEvent, payload: bytes, hit: ProbeHit, /) -> RawEntry:
        """The entry that record() would write; nothing is written."""

    @abstractmethod
    def reserve(self) -> RingBuffer | None:
        """Where an entry would be written now; None while none is taken.

        Mirrors: kernel/trace/trace.c:trace_event_buffer_lock_reserve (v6.1).
        """

    @abstractmethod
    def record(
        self, event: TraceEvent, payload: bytes, hit: ProbeHit, place: RingBuffer | None = None, /
    ) -> None:
        """Write an entry to where reserve() said: `payload` is what follows the 8 bytes of common fields."""

    @abstractmethod
    def target(self) -> RecordTarget | None:
        """Its buffer for guest code to write to, as it is now; None where record() has to be called."""

    @abstractmethod
    def event_switched(self, event: TraceEvent, /, *, enabled: bool) -> None:
        """An event's hits come here from now on, or don't any more."""

    @abstractmethod
    def event_removed(self, event: TraceEvent, /) -> None:
        """An event that was once enabled here is gone; its entries can't be printed any more.

        Linux empties the buffer then. Mirrors: kernel/trace/trace.c:tracing_reset_all_online_cpus (v6.1).
        """


class TraceEvent(ABC):
    """An event: `id` stands in its entries as common_type, 0 before it is registered.

    There may be thousands that nobody has enabled. So their collections are never changed but replaced, and
    the empty ones are shared by all.
    """

    __slots__ = (
        "_fields",
        "_print_fmt",
        "files",
        "filters",
        "group",
        "id",
        "name",
        "recorders",
        "references",
        "seen_by",
    )

    is_switchable = True
    """Whether it can be enabled; others are there for their format alone."""
    is_registrable = True
    """Whether perf could count it: its directory has an `id` then."""

    def __init__(self, group: str, name: str, fields: Iterable[EventField] = (), print_fmt: str = "") -> None:
        self.group = group
        self.name = name
        self.id = 0
        self._fields = tuple(fields)
        self._print_fmt = print_fmt
        self.references = 0
        """Users such as hist triggers and event probes; while there are any, it can't be removed."""
        self.filters: Mapping[Recorder, EventFilter] = _NONE
        """Of each trace array that has one for this event."""
        self.recorders: tuple[Recorder, ...] = ()
        """Those that have it enabled."""
        self.seen_by: tuple[Recorder, ...] = ()
        """Those that ever had it enabled, and may hold entries of it."""
        self.files: Mapping[Recorder, EventFile] = _NONE
        """Triggers and soft mode, of each trace array where there ever were any."""

    @property
    def fields(self) -> tuple[EventField, ...]:
        """Those of its own, in the order of `format`."""
        return self._fields

    @property
    def print_fmt(self) -> str:
        """As in the `format` file."""
        return self._print_fmt

    def hold(self) -> None:
        """One user more. Raises: KernelError EBUSY. Mirrors: trace_event_try_get_ref (v6.1)."""
        self.references += 1

    def let_go(self) -> None:
        """One user less. Mirrors: trace_event_put_ref (v6.1)."""
        self.references -= 1

    def changed(self) -> None:  # noqa: B027 - most events ask at each hit
        """What is done at its hits differs from now on: recorders, their target(), filters, triggers."""

    @property
    def needs_entry(self) -> bool:
        """Whether a hit is more than a record where the filter accepts it: triggers, or soft mode."""
        return any(file.is_special for file in self.files.values())

    def file(self, recorder: Recorder) -> EventFile:
        """The event in that trace array: its triggers and soft mode."""
        found = self.files.get(recorder)
        if found is None:
            found = EventFile(self, recorder)
            self.files = {**self.files, recorder: found}
        return found

    def set_filter(self, recorder: Recorder, event_filter: EventFilter | None) -> None:
        """Let only what the filter accepts be recorded in `recorder`; all with None."""
        if event_filter is not None:
            self.filters = {**self.filters, recorder: event_filter}
        elif recorder in self.filters:
            self.filters = _without(recorder, self.filters)
        else:
            return
        self.changed()

    def forget(self, recorder: Recorder) -> None:
        """The trace array goes, and doesn't have the event enabled."""
        self.filters = _without(recorder, self.filters)
        self.files = _without(recorder, self.files)
        self.seen_by = _others(recorder, self.seen_by)

    @property
    def is_enabled(self) -> bool:
        """Whether any recorder has it enabled."""
        return bool(self.recorders)

    @property
    def is_removed(self) -> bool:
        """Whether it was deleted, though open files may still show it."""
        return False

    def enable(self, recorder: Recorder) -> None:
        """Record its hits in `recorder`; the first one starts the event.

        Raises: KernelError ENODEV (the event was removed), what start() raises.
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
        if recorder not in self.seen_by:
            self.seen_by += (recorder,)

    def disable(self, recorder: Recorder) -> None:
        """Stop recording in `recorder`; the last one stops the event. Raises: KernelError ENODEV."""
        self.check_alive()
        if recorder not in self.recorders:
            return
        self.recorders = _others(recorder, self.recorders)
        recorder.event_switched(self, enabled=False)
        self.changed()
        if not self.recorders:
            self.stop()

    def check_alive(self) -> None:
        """Raises: KernelError ENODEV (the event was removed)."""
        if self.is_removed:
            raise KernelError(errno.ENODEV, f"{self.group}/{self.name} was removed")

    @abstractmethod
    def start(self) -> None:
        """Let hits come: the first recorder has enabled the event. Raises: KernelError."""

    @abstractmethod
    def stop(self) -> None:
        """Let no more hits come: the last recorder has disabled the event."""

    def record(self, payload: bytes, hit: ProbeHit) -> None:
        """A hit: run the triggers, and write its entry wherever no filter rejects it.

        `payload` is what follows the common fields. Every kind of event has its hits go through here.
        """
        for recorder in self.recorders:
            file = self.files.get(recorder)
            if file is not None and file.is_special:
                file.fire(payload, hit)
            elif self.passes_filter(recorder, payload, hit):
                recorder.record(self, payload, hit)

    def other_task(self, payload: bytes) -> int | None:  # noqa: ARG002
        """The pid of a second task that a hit is about, for lists of pids; None for most events."""
        return None

    def passes_filter(self, recorder: Recorder, payload: bytes, hit: ProbeHit) -> bool:
        """Whether the filter in that trace array lets the hit be recorded."""
        event_filter = self.filters.get(recorder)
        if event_filter is None or event_filter.program is None:
            return True
        return event_filter.program.accepts(recorder.entry(self, payload, hit))

    def format_text(self) -> str:
        """The `format` file. Mirrors: kernel/trace/trace_events.c:f_show (v6.1)."""
        common = "".join(field.format_line() for field in COMMON_FIELDS)
        own = "".join(field.format_line() for field in self.fields)
        return f"name: {self.name}\nID: {self.id}\nformat:\n{common}\n{own}\nprint fmt: {self.print_fmt}\n"

    @abstractmethod
    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        """What `trace` shows after `name: `; `payload` is the entry behind its 8 common bytes."""

    def print_line(
        self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False, verbose: bool = False
    ) -> str:
        """What `trace` shows behind the time; `sym_addr`, `verbose`: with these options."""
        del verbose
        return f"{self.name}: {self.print_record(payload, symbols, sym_addr=sym_addr)}"


def _without(recorder: Recorder, owned: Mapping[Recorder, _V]) -> Mapping[Recorder, _V]:
    return {each: value for each, value in owned.items() if each is not recorder} or _NONE


def _others(recorder: Recorder, recorders: tuple[Recorder, ...]) -> tuple[Recorder, ...]:
    return tuple(each for each in recorders if each is not recorder)


class EventFile:
    """Mirrors: include/linux/trace_events.h:struct trace_event_file (v6.1).

    The event counts as enabled in soft mode too: its hits come, for triggers to see them, and are
    recorded unless it is soft-disabled. Callers serialize: Linux holds event_mutex.
    """

    def __init__(self, event: TraceEvent, recorder: Recorder) -> None:
        self.event = event
        self.recorder = recorder
        self.triggers: list[Trigger] = []
        self.soft_disabled = False
        self.is_special = False
        """Whether a hit has to go through fire(); cached, since each hit reads it."""
        self._soft_references = 0

    @property
    def soft_mode(self) -> bool:
        """Whether triggers, here or elsewhere, need it to be on."""
        return self._soft_references > 0

    @property
    def enabled(self) -> bool:
        """Whether hits come at all."""
        return self.recorder in self.event.recorders

    def enabled_text(self) -> str:
        """The enable file, without its newline. Mirrors: kernel/trace/trace_events.c:event_enable_read."""
        records = self.enabled and not self.soft_disabled
        return f"{records:d}{'*' if self.soft_disabled or self.soft_mode else ''}"

    # Enabling; mirrors kernel/trace/trace_events.c:__ftrace_event_enable_disable (v6.1)

    def enable(self) -> None:
        """Record hits. Raises: KernelError (of the event)."""
        self.soft_disabled = False
        self.event.enable(self.recorder)

    def disable(self) -> None:
        """Record no hits; in soft mode they still come."""
        if not self.soft_mode:
            self.event.disable(self.recorder)
        self.soft_disabled = self.soft_mode

    def enable_soft(self) -> None:
        """One user more for whom hits have to come. Raises: KernelError (of the event)."""
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
        """One user less."""
        self._soft_references -= 1
        if self._soft_references:
            return
        if self.soft_disabled:
            self.event.disable(self.recorder)
        self.soft_disabled = False
        self._changed()

    def hold(self) -> None:
        """Have its hits come for who switches it, and keep the event. Raises: KernelError (of the event)."""
        self.event.hold()
        try:
            self.enable_soft()
        except KernelError:
            self.event.let_go()
            raise

    def let_go(self) -> None:
        """The other half of hold()."""
        self.disable_soft()
        self.event.let_go()

    # Triggers

    def add(self, trigger: Trigger, *, last: bool = False) -> None:
        """Put a trigger on the list, before the others or behind them. Raises: KernelError (of the event).

        Mirrors: kernel/trace/trace_events_trigger.c:register_trigger,
        trace_event_trigger_enable_disable (v6.1).
        """
        if not self.triggers:
            self.enable_soft()
        self.triggers.insert(len(self.triggers) if last else 0, trigger)
        self._changed()

    def remove(self, trigger: Trigger) -> None:
        """Take a trigger off the list, and let go of what it holds."""
        self.triggers.remove(trigger)
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
        """Whether a trigger has to see the entry. Mirrors: update_cond_flag (v6.1)."""
        return any(trigger.needs_entry for trigger in self.triggers)

    def fire(self, payload: bytes, hit: ProbeHit) -> None:
        """Run the triggers and record the hit, unless it is soft-disabled or the filter rejects it.

        Entries that triggers make stand behind it, unless it waits in the page for what may be rejected.
        Mirrors: trace_event_buffer_lock_reserve, __trace_trigger_soft_disabled,
        __event_trigger_test_discard (v6.1).
        """
        recorder = self.recorder
        deferred: list[Trigger] = []
        if self.needs_entry:
            # What triggers do to the buffers doesn't move the entry that they have seen.
            place = recorder.reserve()
            entry = recorder.entry(self.event, payload, hit)
            if len(entry.data) > MAX_DATA_SIZE:
                # No page takes it, so nobody sees it.
                return
            others_wait = hit.entry_waits
            waits = self._may_wait() and not hit.entry_waits
            is_first = place is not None and not waits and self._is_recorded(payload, hit)
            if is_first and not any(trigger.kind is TriggerKind.EVENT_ENABLE for trigger in self.triggers):
                # Linux: what a trigger disables meanwhile is discarded. So that isn't written first here.
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
                # Though one of them may have enabled it.
                return
            place = recorder.reserve()
        if place is not None and self._is_recorded(payload, hit):
            recorder.record(self.event, payload, hit, place)
        self.run_deferred(deferred, hit)

    def _is_recorded(self, payload: bytes, hit: ProbeHit) -> bool:
        return not self.soft_disabled and self.event.passes_filter(self.recorder, payload, hit)

    def _may_wait(self) -> bool:
        """Whether its entry isn't written to the buffer at once: it may yet be rejected."""
        event_filter = self.event.filters.get(self.recorder)
        return self.soft_disabled or (event_filter is not None and event_filter.program is not None)

    def run_on_entry(self, entry: RawEntry, hit: ProbeHit) -> list[Trigger]:
        """Run those whose filter accepts the entry; returns those that wait for it to be written.

        Mirrors: event_triggers_call (v6.1).
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
        """The entry is written. Mirrors: event_triggers_post_call (v6.1)."""
        for trigger in deferred:
            if not trigger.paused:
                trigger.fire(hit, None)
