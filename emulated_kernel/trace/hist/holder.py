"""The trigger that holds a histogram, as far as other histograms know it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from emulated_kernel.trace.event_file import EventFile
from emulated_kernel.trace.trigger import Trigger, TriggerFilter, TriggerKind

if TYPE_CHECKING:
    from emulated_kernel.trace.hist.data import HistData


class HistHolder(Trigger):
    """A trigger that counts hits in a histogram."""

    kind = TriggerKind.EVENT_HIST
    wants_entry = True

    def __init__(self, data: HistData, filter_: TriggerFilter | None) -> None:
        super().__init__(filter_)
        self.data = data


def holders_of(file: EventFile) -> Iterator[HistHolder]:
    """The histogram triggers of an event, in order."""
    return (trigger for trigger in file.triggers if isinstance(trigger, HistHolder))


def hists_of(file: EventFile) -> Iterator[HistData]:
    """The histograms of an event, in order."""
    return (holder.data for holder in holders_of(file))
