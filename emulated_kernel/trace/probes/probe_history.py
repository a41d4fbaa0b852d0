"""The history of kprobe events: the enabled events, whether they were armed, and their hits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypedDict

from emulated_kernel.trace.events.event import Recorder
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent, TraceKprobe
from emulated_kernel.trace.text.chars import to_text
from emulated_kernel.util.fast_dataclass import dataclass, field

MAX_REMOVED = 100
"""Maximum number of removed events that the history keeps.

It is also the maximum number of places that the history keeps of the removed probes of one event. Of older
events and places, only the number of hits is kept.
"""


class PastEvent(TypedDict):
    """An entry of the history: an event that was enabled at some time since the kernel's start."""

    event: str
    """The event as GROUP/EVENT."""
    places: list[str]
    hits: int
    missed: int
    """Number of missed hits, as in kprobe_profile."""
    at_return: bool
    """Whether the event is a return probe."""
    armed: bool
    """Whether, at some time while the event was enabled, all of its probes were armed."""
    unarmed: str
    """Last reason why a probe of the enabled event was not armed; "" if there was no such reason."""
    recording: bool
    """Whether the event was enabled to record hits in a trace array, and not only to run triggers."""
    filters: list[str]
    """The event's filters, now or at its removal."""
    off: bool
    """Whether recording was off in all trace arrays of the event, whenever the event was enabled."""


@dataclass(eq=False, slots=True)
class _Enabled:
    """Data about an event since it was first enabled. Fields without a text are as in PastEvent."""

    armed: bool = False
    unarmed: str = ""
    recording: bool = False
    off: bool = True
    off_since: dict[Recorder, int | None] = field(default_factory=dict)
    """Trace array -> result of Recorder.off_since() when note() first found the event enabled there.

    Only the trace arrays in which the event is enabled now are listed.
    """
    removed: dict[str, int] = field(default_factory=dict)
    """Place of removed probes of the event -> number of their hits."""
    at_return: bool = False
    missed: int = 0
    """Number of missed hits of removed probes."""
    forgotten_hits: int = 0
    """Number of hits of places that were dropped from `removed`, which keeps at most MAX_REMOVED places."""
    filters: list[str] = field(default_factory=list)
    """The event's filters at its removal."""


class ProbeHistory:
    """The events of one kind that were enabled since the kernel's start, including removed ones.

    Linux keeps no such history. Callers hold the control lock.
    """

    def __init__(self) -> None:
        self._present: dict[KprobeTraceEvent, _Enabled] = {}
        self._removed: list[PastEvent] = []
        self.forgotten_hits = 0
        """Number of hits of the removed events beyond MAX_REMOVED, which the history no longer contains."""

    def note(self, events: Iterable[KprobeTraceEvent] | None = None) -> None:
        """Record the present state of `events`; of a disabled event, only that it is disabled.

        By default, `events` are all present events that were enabled at an earlier call. This method is
        called after each change that may arm or disarm probes.
        """
        for event in list(self._present) if events is None else events:
            if not event.is_enabled:
                if event in self._present:
                    self._present[event].off_since = {}
                continue
            known = self._present.setdefault(event, _Enabled())
            reasons = [reason for probe in event.probes if (reason := probe.why_unarmed())]
            known.armed = known.armed or not reasons
            known.unarmed = reasons[0] if reasons else known.unarmed
            _note_recording(event, known)

    def removed(self, probe: TraceKprobe, event: KprobeTraceEvent, filters: list[str], missed: int) -> None:
        """Record the removal of `probe` from `event`; if it was the last probe, also the removal of `event`.

        If the event was never enabled, do nothing. `filters`: texts of the event's filters before the
        removal. `missed`: number of the probe's missed hits.
        """
        known = self._present.get(event)
        if known is None:
            return
        known.removed[probe.place_text] = known.removed.get(probe.place_text, 0) + probe.hits
        known.missed += missed
        known.at_return = probe.place.is_return
        if len(known.removed) > MAX_REMOVED:
            known.forgotten_hits += known.removed.pop(next(iter(known.removed)))
        if event.probes:
            return
        del self._present[event]
        known.filters = filters
        self._removed.append(_past(event, known))
        if len(self._removed) > MAX_REMOVED:
            self.forgotten_hits += self._removed.pop(0)["hits"]

    def events(self) -> Iterator[PastEvent]:
        """Yield the history's events: the removed ones in order of their removal, then the present ones.

        Events may be enabled and removed while the caller iterates. Each event that was known at the first
        item is yielded once.
        """
        removed, present = [*self._removed], [*self._present.items()]
        yield from removed
        for event, known in present:
            self.note([event])
            yield _past(event, known)


def filter_texts(event: KprobeTraceEvent) -> list[str]:
    """Return the texts of the event's filters in all trace arrays."""
    return [to_text(each.text) for each in event.filters.values()]


def _note_recording(event: KprobeTraceEvent, known: _Enabled) -> None:
    known.off_since = {each: known.off_since[each] for each in event.recorders if each in known.off_since}
    for recorder in event.recorders:
        file = event.files.get(recorder)
        if file is not None and file.soft_disabled:
            continue
        known.recording = True
        now = recorder.off_since()
        first = known.off_since.setdefault(recorder, now)
        known.off = known.off and now is not None and first == now


def _past(event: KprobeTraceEvent, known: _Enabled) -> PastEvent:
    hits = dict(known.removed)
    for probe in event.probes:
        hits[probe.place_text] = hits.get(probe.place_text, 0) + probe.hits
    return PastEvent(
        event=f"{event.group}/{event.name}",
        places=list(hits),
        hits=sum(hits.values()) + known.forgotten_hits,
        missed=known.missed + sum(probe.nmissed for probe in event.probes),
        at_return=known.at_return or any(probe.place.is_return for probe in event.probes),
        armed=known.armed,
        unarmed=known.unarmed,
        recording=known.recording,
        filters=known.filters or filter_texts(event),
        off=known.recording and known.off,
    )
