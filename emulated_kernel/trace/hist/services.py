"""Services for all histograms: look-ups of triggers, variables and events, and removed histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict

from emulated_kernel.trace.events.event import EventFile, Recorder
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.events.trigger import Trigger, TriggerKind
from emulated_kernel.trace.filter.predicates import EventFilter
from emulated_kernel.trace.hist.field import Histogram
from emulated_kernel.trace.interface import LINUX_6_1, Interface
from emulated_kernel.trace.synth.synth_event import SYSTEM, SyntheticEvent
from emulated_kernel.trace.text.chars import to_text
from emulated_kernel.util.fast_dataclass import dataclass, field
from emulated_kernel.util.limits import Limit, Limits, MemoryBudget

MAX_REMOVED = 100
"""Maximum number of removed histograms about which a kernel keeps data; see RemovedHists."""


class HistHolder(Trigger):
    """A trigger that counts hits in a histogram."""

    kind = TriggerKind.EVENT_HIST
    wants_entry = True

    def __init__(self, data: Histogram, filter_: EventFilter | None) -> None:
        super().__init__(filter_)
        self.data = data
        self.file = data.file
        """The trigger's own event. Triggers with the same name share data, but have different events."""


def holders_of(file: EventFile) -> Iterator[HistHolder]:
    """Yield the histogram triggers of an event, in the order of its triggers."""
    return (trigger for trigger in file.triggers if isinstance(trigger, HistHolder))


def hists_of(file: EventFile) -> Iterator[Histogram]:
    """Yield the histograms of an event, in the order of its triggers."""
    return (holder.data for holder in holders_of(file))


class PastHist(TypedDict):
    """Data about a histogram that exists or has existed."""

    array: str
    """Name of the trace array; "" for the top array."""
    event: str
    """The event as GROUP/EVENT."""
    trigger: str
    """The histogram's line in the trigger file, without its state."""
    hits: int


def past_hist(holder: HistHolder) -> PastHist:
    """Return data about the histogram of a trigger. Precondition: the trigger has not been released."""
    event = holder.file.event
    return {
        "array": holder.file.recorder.name,
        "event": f"{event.group}/{event.name}",
        "trigger": to_text(holder.show().rpartition(" [")[0]),
        "hits": holder.data.map.hits,
    }


class RemovedHists:
    """Data about histograms that were removed or cleared, from which hints to users are made.

    Linux keeps no such data.
    """

    def __init__(self) -> None:
        self._hists: dict[tuple[str, str, str], PastHist] = {}
        """Trace array, event and trigger's line -> the removed or cleared histogram with the most hits."""
        self.has_forgotten = False
        """Whether a removed or cleared histogram was not recorded, because MAX_REMOVED others had been."""

    def __iter__(self) -> Iterator[PastHist]:
        return iter(tuple(self._hists.values()))

    def note(self, holder: HistHolder) -> None:
        """Record the histogram of a trigger, before the histogram is removed or cleared."""
        hist = past_hist(holder)
        key = hist["array"], hist["event"], hist["trigger"]
        known = self._hists.get(key)
        if known is None and len(self._hists) == MAX_REMOVED:
            self.has_forgotten = True
        elif known is None or known["hits"] < hist["hits"]:
            self._hists[key] = hist


@dataclass
class HistServices:
    """Objects that all histograms of a kernel share, such as the events and the memory budget."""

    registry: EventRegistry
    syscall_name: Callable[[int], str | None]
    """Function that maps the number of a system call to its name, such as sys_read.

    It returns None if no system call has the number.
    """
    memory: MemoryBudget = field(
        default_factory=lambda: MemoryBudget(Limits(), Limit.HIST_BYTES, Limit.USER_HIST_BYTES)
    )
    """The memory budget of all histograms of the kernel."""
    interface: Interface = LINUX_6_1
    removed: RemovedHists = field(default_factory=RemovedHists)
    _with_variables: dict[Recorder, list[Histogram]] = field(default_factory=dict)

    def find_synthetic(self, name: str) -> SyntheticEvent | None:
        """Return the synthetic event called `name`, or None if there is no such event.

        Mirrors: kernel/trace/trace_events_synth.c:find_synth_event_call (v6.1).
        """
        event = self.registry.find(SYSTEM, name)
        return event if isinstance(event, SyntheticEvent) else None

    def with_variables(self, recorder: Recorder) -> Sequence[Histogram]:
        """Return the histograms of trace array `recorder` that define or use variables, newest first."""
        return self._with_variables.get(recorder, ())

    def save_variables(self, data: Histogram) -> None:
        """Make the variables of a histogram visible to other histograms.

        Mirrors: kernel/trace/trace_events_hist.c:save_hist_vars (v6.1).
        """
        self._with_variables.setdefault(data.triggers.array, []).insert(0, data)

    def remove_variables(self, data: Histogram) -> None:
        """Hide the variables of a histogram from other histograms.

        Mirrors: kernel/trace/trace_events_hist.c:remove_hist_vars (v6.1).
        """
        listed = self._with_variables.get(data.triggers.array, [])
        if data in listed:
            listed.remove(data)
