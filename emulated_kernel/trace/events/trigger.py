"""Trigger, the base class of the actions that run at the hits of an event."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from enum import Enum, auto
from typing import ClassVar

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.filter.predicates import EventFilter
from emulated_kernel.trace.ring.trace_entry import RawEntry


class TriggerKind(Enum):
    """Kind of a trigger.

    An event has at most one trigger of kind TRACE_ONOFF, one of SNAPSHOT and one of STACKTRACE.
    Mirrors: include/linux/trace_events.h:event_trigger_type (v6.1).
    """

    TRACE_ONOFF = auto()
    SNAPSHOT = auto()
    STACKTRACE = auto()
    EVENT_ENABLE = auto()
    EVENT_HIST = auto()
    HIST_ENABLE = auto()
    EVENT_PROBE = auto()


class Trigger(ABC):
    """A trigger of an event in one trace array.

    Mirrors: kernel/trace/trace.h:struct event_trigger_data (v6.1).
    """

    kind: ClassVar[TriggerKind]
    is_post: ClassVar[bool] = False
    """Whether triggers of this class run after the hit's entry was written; if False, they run before."""
    wants_entry: ClassVar[bool] = False
    """Whether fire() needs the entry, even without a filter."""
    is_hidden: ClassVar[bool] = False
    """Whether the trigger is internal; the trigger file does not show an internal trigger."""

    def __init__(self, filter_: EventFilter | None = None) -> None:
        self.filter = filter_
        """The filter after `if` in the trigger's command, or None if the command has no filter."""
        self.paused = False
        """Whether the trigger is suspended: hits do not run it. `pause` suspends a hist trigger."""

    @property
    def key(self) -> Hashable:
        """A value that no other trigger of the event may have; None if equal triggers are allowed."""
        return None

    @property
    def needs_entry(self) -> bool:
        """Whether the trigger can run only after the hit's entry was built."""
        return self.filter is not None or self.is_post or self.wants_entry

    def accepts(self, entry: RawEntry) -> bool:
        """Return True if the trigger's filter accepts the entry, or if it has no filter."""
        return self.filter is None or self.filter.accepts(entry)

    @abstractmethod
    def fire(self, hit: ProbeHit, entry: RawEntry | None) -> None:
        """Run the trigger at a hit.

        `entry`: the entry of the hit. It is None if no trigger of the event needs the entry, or if the
        entry is already written.
        """

    @abstractmethod
    def show(self) -> str:
        """Return the trigger's line in the trigger file, without a newline."""

    def released(self) -> None:  # noqa: B027
        """Release the resources of a trigger that was removed from its event."""

    def filter_text(self) -> str:
        """Return ` if FILTER` for the end of the trigger's line, or "" if the trigger has no filter."""
        return f" if {self.filter.text}" if self.filter else ""
