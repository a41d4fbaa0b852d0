"""Reads and sets the hit and miss counts of probe events, to move them from one kernel to the next."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent

Counts = dict[str, list[list[int]]]
"""Event as group/name -> a pair for each of the event's probes: number of hits, number of missed hits."""


def counts(kernel: Kernel) -> Counts:
    """Return the current counts of all probe events of a kernel."""
    return {
        f"{event.group}/{event.name}": [[probe.hits, probe.nmissed] for probe in event.probes]
        for event in _events(kernel)
    }


def set_counts(kernel: Kernel, known: Counts) -> None:
    """Set the counts of a kernel's probes to the counts `known`.

    Skip an event whose number of probes differs from that in `known`. Raises: TypeError, ValueError
    (`known` does not contain counts).
    """
    for event in _events(kernel):
        found = known.get(f"{event.group}/{event.name}", [])
        if len(found) == len(event.probes):
            for probe, (hits, missed) in zip(event.probes, found, strict=True):
                probe.hits = int(hits)
                probe.nmissed = int(missed)


def _events(kernel: Kernel) -> Iterator[KprobeTraceEvent]:
    yield from kernel.tracing.kprobe_events.events()
    if kernel.tracing.fprobe_events is not None:
        yield from kernel.tracing.fprobe_events.events()
