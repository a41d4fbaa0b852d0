"""What may hang on an event, and does something at its hits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import ClassVar

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.filter.predicates import EventFilter
from emulated_kernel.trace.ring.trace_entry import RawEntry


class TriggerKind(Enum):
    """What excludes each other on an event. Mirrors: include/linux/trace_events.h:event_trigger_type."""

    TRACE_ONOFF = auto()
    SNAPSHOT = auto()
    STACKTRACE = auto()
    EVENT_ENABLE = auto()
    EVENT_HIST = auto()
    HIST_ENABLE = auto()
    EVENT_PROBE = auto()


class Trigger(ABC):
    """A trigger on an event. Mirrors: kernel/trace/trace.h:struct event_trigger_data (v6.1)."""

    kind: ClassVar[TriggerKind]
    is_post: ClassVar[bool] = False
    """Runs when the entry is written."""
    wants_entry: ClassVar[bool] = False
    is_hidden: ClassVar[bool] = False
    """Isn't one that a user made through the file."""

    def __init__(self, filter_: EventFilter | None = None) -> None:
        self.filter = filter_
        """What follows `if`."""
        self.paused = False

    @property
    def needs_entry(self) -> bool:
        """Whether it can't run before there is an entry."""
        return self.filter is not None or self.is_post or self.wants_entry

    def accepts(self, entry: RawEntry) -> bool:
        """Whether its filter does."""
        return self.filter is None or self.filter.accepts(entry)

    @abstractmethod
    def fire(self, hit: ProbeHit, entry: RawEntry | None) -> None:
        """The event was hit; `entry` is None where it isn't needed or was written already."""

    @abstractmethod
    def show(self) -> str:
        """Its line in the trigger file, without a newline."""

    def released(self) -> None:  # noqa: B027
        """It was taken off its event."""

    def filter_text(self) -> str:
        """As lines of triggers end."""
        return f" if {self.filter.text}" if self.filter else ""
