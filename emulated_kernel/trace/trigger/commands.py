"""The plain triggers: traceon, traceoff, snapshot, stacktrace, and those that switch other events."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from emulated_kernel.dataclass import dataclass
from emulated_kernel.errors import KernelError
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.events.event import EventFile
from emulated_kernel.trace.events.trigger import Trigger, TriggerFilter, TriggerKind
from emulated_kernel.trace.hits.probe_hit import ProbeHit
from emulated_kernel.trace.ring.trace_entry import RawEntry
from emulated_kernel.trace.trigger.triggers import (
    UNLIMITED,
    EventTriggers,
    TriggerCommand,
    TriggerWrite,
    parse_count,
    parse_trigger_filter,
    separate_filter,
)


class CountedTrigger(Trigger):
    """A trigger that may have a limit; a hit that would change nothing doesn't count."""

    def __init__(self, count: int = UNLIMITED, filter_: TriggerFilter | None = None) -> None:
        super().__init__(filter_)
        self.count = count

    def fire(self, hit: ProbeHit, entry: RawEntry | None) -> None:
        del entry
        if not self.count or not self.would_change():
            return
        if self.count != UNLIMITED:
            self.count -= 1
        self.act(hit)

    def would_change(self) -> bool:
        """Whether acting makes a difference now."""
        return True

    @abstractmethod
    def act(self, hit: ProbeHit) -> None:
        """Do it."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What stands before the count."""

    def show(self) -> str:
        """Mirrors: kernel/trace/trace_events_trigger.c:event_trigger_print (v6.1)."""
        count = "unlimited" if self.count == UNLIMITED else f"count={self.count}"
        return f"{self.title}:{count}{self.filter_text()}"


class ControlTrigger(CountedTrigger):
    """A trigger that acts on its trace array."""

    def __init__(self, array: TraceArray, count: int, filter_: TriggerFilter | None) -> None:
        super().__init__(count, filter_)
        self.array = array


class TraceOn(ControlTrigger):
    """Lets the buffers take records again."""

    kind = TriggerKind.TRACE_ONOFF
    title = "traceon"

    def would_change(self) -> bool:
        return not self.array.tracing_on

    def act(self, hit: ProbeHit) -> None:
        del hit
        self.array.set_tracing_on(True)


class TraceOff(ControlTrigger):
    """Keeps the buffers as they are, once the entry that did it is written."""

    kind = TriggerKind.TRACE_ONOFF
    title = "traceoff"
    is_post = True

    def would_change(self) -> bool:
        return self.array.tracing_on

    def act(self, hit: ProbeHit) -> None:
        del hit
        self.array.set_tracing_on(False)


class SnapshotTrigger(ControlTrigger):
    """Swaps the buffer with the snapshot's."""

    kind = TriggerKind.SNAPSHOT
    title = "snapshot"

    def act(self, hit: ProbeHit) -> None:
        del hit
        self.array.snapshot.take()


class StackTrace(ControlTrigger):
    """Records the call chain, behind the entry."""

    kind = TriggerKind.STACKTRACE
    title = "stacktrace"
    is_post = True

    def act(self, hit: ProbeHit) -> None:
        self.array.record_stack(hit)


MakeControl = Callable[[TraceArray, int, TriggerFilter | None], ControlTrigger]


@dataclass(frozen=True)
class ControlCommand(TriggerCommand):
    """`NAME[:COUNT] [if FILTER]`. Mirrors: event_trigger_parse, register_trigger (v6.1)."""

    name: str
    kind: TriggerKind
    make: MakeControl

    def execute(self, triggers: EventTriggers, file: EventFile, write: TriggerWrite) -> None:
        """Raises: KernelError EINVAL, ERANGE, EEXIST (there is one of its kind), as parse_filter()."""
        param, condition = separate_filter(write.rest, required=False)
        existing = next((trigger for trigger in file.triggers if trigger.kind is self.kind), None)
        if write.removes:
            if existing is not None:
                file.remove(existing)
            return
        trigger = self.make(triggers.array, parse_count(param), parse_trigger_filter(file.event, condition))
        if self.kind is TriggerKind.SNAPSHOT:
            triggers.array.snapshot.allocate()
        if existing is not None:
            raise KernelError(errno.EEXIST, f"there is a trigger of the kind of {self.name}")
        file.add(trigger)

    def remove_all(self, triggers: EventTriggers, file: EventFile) -> None:
        """Nothing: these stay."""


class SwitchTrigger(CountedTrigger):
    """Acts on another event, which it keeps in soft mode, and alive."""

    def __init__(
        self, name: str, enable: bool, target: EventFile, count: int, filter_: TriggerFilter | None
    ) -> None:
        super().__init__(count, filter_)
        self.enable = enable
        self.target = target
        self._name = name

    @property
    def title(self) -> str:
        return f"{self._name}:{self.target.event.group}:{self.target.event.name}"

    def hold(self) -> None:
        """Raises: KernelError of the target."""
        self.target.event.hold()
        try:
            self.target.enable_soft()
        except KernelError:
            self.target.event.let_go()
            raise

    def released(self) -> None:
        self.target.disable_soft()
        self.target.event.let_go()


class EventSwitch(SwitchTrigger):
    """Has another event recorded, or not, while it stays on."""

    kind = TriggerKind.EVENT_ENABLE

    def would_change(self) -> bool:
        return self.target.soft_disabled is self.enable

    def act(self, hit: ProbeHit) -> None:
        del hit
        self.target.soft_disabled = not self.enable


class HistSwitch(SwitchTrigger):
    """Lets another event's histograms count, or not."""

    kind = TriggerKind.HIST_ENABLE

    def act(self, hit: ProbeHit) -> None:
        del hit
        for trigger in self.target.triggers:
            if trigger.kind is TriggerKind.EVENT_HIST:
                trigger.paused = not self.enable


@dataclass(frozen=True)
class SwitchCommand(TriggerCommand):
    """`NAME:GROUP:EVENT[:COUNT] [if FILTER]`. Mirrors: event_enable_trigger_parse (v6.1)."""

    name: str
    enable: bool
    trigger: type[SwitchTrigger]

    DROPPED_BY_TRUNCATE: ClassVar = TriggerKind.HIST_ENABLE

    def execute(self, triggers: EventTriggers, file: EventFile, write: TriggerWrite) -> None:
        """Raises: KernelError EINVAL (no such event, syntax), ERANGE, EEXIST, as parse_filter()."""
        param, condition = separate_filter(write.rest, required=True)
        group, colon, event_name = (param or "").partition(":")
        if not colon:
            raise KernelError(errno.EINVAL, "an event is missing")
        event_name, counted, count = event_name.partition(":")
        target = triggers.find_switchable(group, event_name)
        if target is None:
            raise KernelError(errno.EINVAL, f"no event {group}:{event_name}")
        existing = self._find(file, target)
        if write.removes:
            if existing is not None:
                file.remove(existing)
            return
        limit = parse_count(count if counted else None)
        filter_ = parse_trigger_filter(file.event, condition)
        if existing is not None:
            raise KernelError(errno.EEXIST, f"there is a trigger of the kind of {self.name} for the event")
        self._add(file, self.trigger(self.name, self.enable, target, limit, filter_))

    def remove_all(self, triggers: EventTriggers, file: EventFile) -> None:
        """Only what switches histograms goes."""
        del triggers
        for trigger in tuple(file.triggers):
            if trigger.kind is self.DROPPED_BY_TRUNCATE:
                file.remove(trigger)

    def _find(self, file: EventFile, target: EventFile) -> Trigger | None:
        for trigger in file.triggers:
            if isinstance(trigger, self.trigger) and trigger.target is target:
                return trigger
        return None

    @staticmethod
    def _add(file: EventFile, trigger: SwitchTrigger) -> None:
        trigger.hold()
        try:
            file.add(trigger)
        except KernelError:
            trigger.released()
            raise


PLAIN_COMMANDS: tuple[TriggerCommand, ...] = (
    ControlCommand("traceon", TriggerKind.TRACE_ONOFF, TraceOn),
    ControlCommand("traceoff", TriggerKind.TRACE_ONOFF, TraceOff),
    ControlCommand("snapshot", TriggerKind.SNAPSHOT, SnapshotTrigger),
    ControlCommand("stacktrace", TriggerKind.STACKTRACE, StackTrace),
    SwitchCommand("enable_event", True, EventSwitch),
    SwitchCommand("disable_event", False, EventSwitch),
    SwitchCommand("enable_hist", True, HistSwitch),
    SwitchCommand("disable_hist", False, HistSwitch),
)
"""In the order of their listing."""
