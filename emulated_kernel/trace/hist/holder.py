"""The trigger that holds a histogram, as far as other histograms know it."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.trace.events.event import EventFile
from emulated_kernel.trace.events.trigger import Trigger, TriggerFilter, TriggerKind
from emulated_kernel.trace.hist.field import Histogram


class HistHolder(Trigger):
    """A trigger that counts hits in a histogram."""

    kind = TriggerKind.EVENT_HIST
    wants_entry = True

    def __init__(self, data: Histogram, filter_: TriggerFilter | None) -> None:
        super().__init__(filter_)
        self.data = data


def holders_of(file: EventFile) -> Iterator[HistHolder]:
    """The histogram triggers of an event, in order."""
    return (trigger for trigger in file.triggers if isinstance(trigger, HistHolder))


def hists_of(file: EventFile) -> Iterator[Histogram]:
    """The histograms of an event, in order."""
    return (holder.data for holder in holders_of(file))
