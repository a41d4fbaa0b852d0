"""Recorded writes of triggers, synthetic events and event probes, replayed: errno, error_log and files are as
recorded.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.trace.events.kernel import errno_of
from tests.trace.events.plain_event import PlainEvent
from tests.trace.events.recorded import oracle_path
from tests.trace.trigger.control import TriggerKernel

_FILE = re.compile(r"tracing/events/(\w+)/(\w+)/trigger")
_TIME = re.compile(r"^\[ *\d+\.\d+\]", re.MULTILINE)


def _load() -> list[dict[str, Any]]:
    with oracle_path("errors-6.1.jsonl").open() as lines:
        records = [json.loads(line) for line in lines]
    return [record for record in records if _is_ours(record)]


def _is_ours(record: dict[str, Any]) -> bool:
    if record["file"] == "tracing/dynamic_events":
        return str(record["bytes"])[0] in "se"
    return _FILE.fullmatch(record["file"]) is not None


def _write(kernel: TriggerKernel, file: str, text: str) -> str:
    """Write `text` to `file`. Return the name of the errno, or 0 as text if the write succeeds."""
    data = text.encode("latin-1")
    place = _FILE.fullmatch(file)
    if file == "tracing/dynamic_events":
        return errno_of(lambda: kernel.kernel.dynamic_events.write(data)) or "0"
    if place is None:
        return errno_of(lambda: kernel.kernel.events.write(data)) or "0"
    event = kernel.kernel.events.registry.find(place[1], place[2])
    assert event is not None
    return errno_of(lambda: kernel.triggers.write(event, data)) or "0"


def _show(kernel: TriggerKernel, file: str) -> str:
    place = _FILE.fullmatch(file)
    assert place is not None
    event = kernel.kernel.events.registry.find(place[1], place[2])
    assert event is not None
    return "".join(kernel.triggers.records(event))


def _replay(record: dict[str, Any]) -> list[str]:
    """Replay a recorded write, and return the differences from the record."""
    kernel = TriggerKernel()
    events = kernel.kernel.events
    events.registry.add(PlainEvent("sched", "sched_switch", (), ""))
    for step in record["setup"]:
        file, text = ("tracing/kprobe_events", step) if isinstance(step, str) else step[:2]
        assert _write(kernel, file, text) == "0"
    events.error_log.clear()
    got = {
        "errno": _write(kernel, record["file"], record["bytes"]),
        "error_log": _TIME.sub("[]", "".join(events.error_log.records())),
        "kprobe_events": "".join(events.records()),
        "files": {file: _show(kernel, file) for file in record.get("show", ())},
    }
    expected = {
        "errno": str(record["errno"]),
        "error_log": _TIME.sub("[]", record["error_log"]),
        "kprobe_events": record["kprobe_events"],
        "files": record.get("show", {}),
    }
    return [f"{key}: {got[key]!r}, recorded {expected[key]!r}" for key in got if got[key] != expected[key]]


def test_recorded_writes(capsys: pytest.CaptureFixture[str]) -> None:
    records = _load()
    differing = {record["id"]: found for record in records if (found := _replay(record))}
    with capsys.disabled():
        print(f"\ntriggers: {len(records) - len(differing)} of {len(records)} recorded writes agree", end="")
    assert records
    assert not differing, "\n".join(f"{key}: {'; '.join(found)}" for key, found in differing.items())
