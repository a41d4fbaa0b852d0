"""Hits and misses of probe events, to be carried from one kernel to another."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent

Counts = dict[str, list[list[int]]]
"""Hits and missed hits of each probe of an event, by group/name."""


def counts(kernel: Kernel) -> Counts:
    """As they are now."""
    return {
        f"{event.group}/{event.name}": [[probe.hits, probe.nmissed] for probe in event.probes]
        for event in _events(kernel)
    }


def set_counts(kernel: Kernel, known: Counts) -> None:
    """Let probes go on from there; of an event with another number of probes none does.

    Raises: TypeError, ValueError (these are no counts).
    """
    for event in _events(kernel):
        found = known.get(f"{event.group}/{event.name}", [])
        if len(found) == len(event.probes):
            for probe, (hits, missed) in zip(event.probes, found, strict=True):
                probe.hits, probe.nmissed = int(hits), int(missed)


def _events(kernel: Kernel) -> Iterator[KprobeTraceEvent]:
    yield from kernel.tracing.kprobe_events.events()
    if kernel.tracing.fprobe_events is not None:
        yield from kernel.tracing.fprobe_events.events()
