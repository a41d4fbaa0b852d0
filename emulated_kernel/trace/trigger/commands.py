"""All triggers except histograms: traceon, traceoff, snapshot, stacktrace, and switches of other events."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Hashable

from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import EventFile
from emulated_kernel.trace.events.registry import no_such_event
from emulated_kernel.trace.events.trigger import Trigger, TriggerKind
from emulated_kernel.trace.filter.predicates import EventFilter
from emulated_kernel.trace.ring.trace_entry import RawEntry
from emulated_kernel.trace.trigger.triggers import (
    UNLIMITED,
    EventTriggers,
    TriggerCommand,
    parse_count,
    parse_trigger_filter,
    separate_filter,
)
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass


def _exists(command: str, trigger: Trigger) -> str:
    """Return the text of an error: `command` is refused, because the event has `trigger`."""
    return f"{command}: the event has the trigger {trigger.show()}; remove that one first"


class CountedTrigger(Trigger):
    """A trigger whose number of actions may be limited.

    A hit at which the action would change nothing does not count.
    """

    def __init__(self, title: str, count: int, filter_: EventFilter | None) -> None:
        super().__init__(filter_)
        self._title = title
        """Start of the trigger's line, before the count: `NAME` or `NAME:GROUP:EVENT`."""
        self.count = count
        """Number of times that the trigger may still fire; UNLIMITED if it has no limit."""

    def fire(self, hit: ProbeHit, entry: RawEntry | None) -> None:
        del entry
        if not self.count or not self.would_change():
            return
        if self.count != UNLIMITED:
            self.count -= 1
        self.act(hit)

    def would_change(self) -> bool:
        """Return True if act() would change something now. By default, always return True."""
        return True

    @abstractmethod
    def act(self, hit: ProbeHit) -> None:
        """Perform the trigger's action."""

    def show(self) -> str:
        """Return the trigger's line in the trigger file.

        Mirrors: kernel/trace/trace_events_trigger.c:event_trigger_print (v6.1).
        """
        count = "unlimited" if self.count == UNLIMITED else f"count={self.count}"
        return f"{self._title}:{count}{self.filter_text()}"


class ControlTrigger(CountedTrigger):
    """A trigger that acts on the trace array in which it is set."""

    def __init__(self, name: str, array: TraceArray, count: int, filter_: EventFilter | None) -> None:
        super().__init__(name, count, filter_)
        self.array = array

    @property
    def key(self) -> Hashable:
        return self.kind


class TraceOn(ControlTrigger):
    """Trigger that switches the recording of its trace array on."""

    kind = TriggerKind.TRACE_ONOFF
    on = True

    def would_change(self) -> bool:
        return self.array.tracing_on is not self.on

    def act(self, hit: ProbeHit) -> None:
        del hit
        self.array.set_tracing_on(self.on)


class TraceOff(TraceOn):
    """Trigger that switches the recording of its trace array off, after the hit's entry was written."""

    on = False
    is_post = True


class SnapshotTrigger(ControlTrigger):
    """Trigger that takes a snapshot: it swaps the trace array's buffers with the snapshot's buffers."""

    kind = TriggerKind.SNAPSHOT

    def act(self, hit: ProbeHit) -> None:
        del hit
        self.array.snapshot.take()


class StackTrace(ControlTrigger):
    """Trigger that records the call stack of a hit, after the hit's entry."""

    kind = TriggerKind.STACKTRACE
    is_post = True

    def act(self, hit: ProbeHit) -> None:
        self.array.record_stack(hit)


@dataclass(frozen=True)
class ControlCommand(TriggerCommand):
    """The command traceon, traceoff, snapshot or stacktrace: `NAME[:COUNT] [if FILTER]`.

    Mirrors: kernel/trace/trace_events_trigger.c:event_trigger_parse, register_trigger (v6.1).
    """

    name: str
    trigger: type[ControlTrigger]

    def execute(self, triggers: EventTriggers, file: EventFile, rest: str | None, *, removes: bool) -> None:
        """Add the command's trigger to the event `file`, or remove it if `removes` is True.

        traceon and traceoff have the same TriggerKind, so an event has at most one of them, and each command
        can remove the other's trigger. `rest`: the command after its name, `[COUNT] [if FILTER]`; None if
        nothing follows the name.
        Raises: KernelError EINVAL (syntax), ERANGE (the count is too large), EEXIST (the event has a trigger
        of the same TriggerKind), errors of parse_filter().
        """
        param, condition = separate_filter(rest, required=False)
        kind = self.trigger.kind
        existing = file.trigger_with(kind)
        if removes:
            if existing is not None:
                file.remove(existing)
            return
        limit = parse_count(param)
        filter_ = parse_trigger_filter(file.event, condition, triggers)
        if kind is TriggerKind.SNAPSHOT:
            triggers.array.snapshot.allocate()
        if existing is not None:
            raise KernelError(errno.EEXIST, _exists(self.name, existing))
        file.add(self.trigger(self.name, triggers.array, limit, filter_))


class SwitchTrigger(CountedTrigger):
    """A trigger that switches the recording or the histograms of another event, its `target`.

    `enable`: True if a hit switches them on, False if it switches them off. The `target` stays in soft mode
    (see EventFile), and its event cannot be removed, until the trigger is released.
    """

    def __init__(
        self, name: str, enable: bool, target: EventFile, count: int, filter_: EventFilter | None
    ) -> None:
        super().__init__(f"{name}:{target.event.group}:{target.event.name}", count, filter_)
        self.enable = enable
        self.target = target

    @property
    def key(self) -> Hashable:
        return self.kind, self.target

    def released(self) -> None:
        self.target.let_go()


class EventSwitch(SwitchTrigger):
    """Trigger that starts or stops the recording of another event, which stays enabled in soft mode."""

    kind = TriggerKind.EVENT_ENABLE

    def would_change(self) -> bool:
        return self.target.soft_disabled is self.enable

    def act(self, hit: ProbeHit) -> None:
        del hit
        self.target.soft_disabled = not self.enable


class HistSwitch(SwitchTrigger):
    """Trigger that continues or pauses the histograms of another event."""

    kind = TriggerKind.HIST_ENABLE

    def act(self, hit: ProbeHit) -> None:
        del hit
        for trigger in self.target.triggers:
            if trigger.kind is TriggerKind.EVENT_HIST:
                trigger.paused = not self.enable


@dataclass(frozen=True)
class SwitchCommand(TriggerCommand):
    """The command enable_event, disable_event, enable_hist or disable_hist.

    Syntax: `NAME:GROUP:EVENT[:COUNT] [if FILTER]`.
    Mirrors: kernel/trace/trace_events_trigger.c:event_enable_trigger_parse (v6.1).
    """

    name: str
    enable: bool
    trigger: type[SwitchTrigger]

    def execute(self, triggers: EventTriggers, file: EventFile, rest: str | None, *, removes: bool) -> None:
        """Add the command's trigger to the event `file`, or remove it if `removes` is True.

        `rest`: the command after its name, `GROUP:EVENT[:COUNT] [if FILTER]`; None if nothing follows.
        Raises: KernelError EINVAL (no such event, syntax), ERANGE (the count is too large), EEXIST (a trigger
        of `file` with the same TriggerKind switches that event), errors of parse_filter().
        """
        param, condition = separate_filter(rest, required=True)
        group, _, event_name = (param or "").partition(":")
        event_name, counted, count = event_name.partition(":")
        target = triggers.find_switchable(group, event_name)
        if target is None:
            raise KernelError(errno.EINVAL, no_such_event(self.name, group, event_name))
        existing = file.trigger_with((self.trigger.kind, target))
        if removes:
            if existing is not None:
                file.remove(existing)
            return
        limit = parse_count(count if counted else None)
        filter_ = parse_trigger_filter(file.event, condition, triggers)
        if existing is not None:
            raise KernelError(errno.EEXIST, _exists(self.name, existing))
        target.hold()
        try:
            file.add(self.trigger(self.name, self.enable, target, limit, filter_))
        except KernelError:
            target.let_go()
            raise

    def remove_all(self, file: EventFile) -> None:
        """Remove the event's triggers of enable_hist and disable_hist, whatever this command's name is.

        Triggers that switch the recording of events stay.
        """
        for trigger in tuple(file.triggers):
            if trigger.kind is TriggerKind.HIST_ENABLE:
                file.remove(trigger)


PLAIN_COMMANDS: tuple[TriggerCommand, ...] = (
    ControlCommand("traceon", TraceOn),
    ControlCommand("traceoff", TraceOff),
    ControlCommand("snapshot", SnapshotTrigger),
    ControlCommand("stacktrace", StackTrace),
    SwitchCommand("enable_event", True, EventSwitch),
    SwitchCommand("disable_event", False, EventSwitch),
    SwitchCommand("enable_hist", True, HistSwitch),
    SwitchCommand("disable_hist", False, HistSwitch),
)
"""All trigger commands except `hist`, in the order in which the trigger file lists them."""
