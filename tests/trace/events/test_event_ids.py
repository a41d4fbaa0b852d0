"""Ids of trace events increase, and an id is used again only when no new ids are left."""

from __future__ import annotations

import pytest

from emulated_kernel.trace.events.registry import LAST_EVENT_ID, EventRegistry
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.util.errors import KernelError


def _event(name: str) -> KprobeTraceEvent:
    return KprobeTraceEvent("g", name, False, (), 8)


def test_ids_run_on_and_the_smallest_free_one_comes_next() -> None:
    registry = EventRegistry(first_id=LAST_EVENT_ID - 3)
    events = [_event(f"e{number}") for number in range(4)]
    registry.add(events[0])
    registry.remove(events[0])
    for event in events[1:]:
        registry.add(event)
    assert [event.id for event in events[1:]] == [LAST_EVENT_ID - 2, LAST_EVENT_ID - 1, LAST_EVENT_ID]
    registry.remove(events[2])
    again = [_event("a"), _event("b")]
    for event in again:
        registry.add(event)
    assert [event.id for event in again] == [LAST_EVENT_ID - 3, LAST_EVENT_ID - 1]
    with pytest.raises(KernelError) as refused:
        registry.add(_event("c"))
    assert refused.value.name == "ENODEV"
    assert registry.find("g", "c") is None
