"""Every recorded write to a filter file, replayed: errno, error_log, filter files, kprobe_events."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from emulated_kernel.trace.events.event_filters import GROUP_FILTER_TEXT
from tests.trace.events.kernel import Kernel, errno_of, make_kernel
from tests.trace.events.recorded import oracle_path

_FILE = re.compile(r"tracing/events/(\w+)/(?:(\w+)/)?filter")
_TIME = re.compile(r"^\[ *\d+\.\d+\]", re.MULTILINE)


def _load() -> list[dict[str, Any]]:
    with oracle_path("errors-6.1.jsonl").open() as lines:
        records = [json.loads(line) for line in lines]
    return [record for record in records if _FILE.fullmatch(record["file"])]


def _write(kernel: Kernel, file: str, text: str) -> str:
    """Write `text` to `file`. Return the name of the errno, or 0 as text if the write succeeds."""
    events, data = kernel.events, text.encode("latin-1")
    place = _FILE.fullmatch(file)
    if place is None:
        return errno_of(lambda: events.write(data)) or "0"
    if place[2] is None:
        members = [event for event in events.events() if event.group == place[1]]
        return errno_of(lambda: kernel.filters.write_group(members, data)) or "0"
    event = events.find(place[1], place[2])
    assert event is not None
    return errno_of(lambda: kernel.filters.write(event, data)) or "0"


def _show(kernel: Kernel, file: str) -> str:
    place = _FILE.fullmatch(file)
    assert place is not None
    if place[2] is None:
        return GROUP_FILTER_TEXT
    event = kernel.events.find(place[1], place[2])
    assert event is not None
    return kernel.filters.text(event)


def _replay(record: dict[str, Any]) -> list[str]:
    """Replay a recorded write, and return the differences from the record."""
    kernel = make_kernel()
    for step in record["setup"]:
        file, text = ("tracing/kprobe_events", step) if isinstance(step, str) else step
        assert _write(kernel, file, text) == "0"
    kernel.events.error_log.clear()
    got = {
        "errno": _write(kernel, record["file"], record["bytes"]),
        "error_log": _TIME.sub("[]", "".join(kernel.events.error_log.records())),
        "kprobe_events": "".join(kernel.events.records()),
        "files": {file: _show(kernel, file) for file in record["show"]},
    }
    expected = {
        "errno": str(record["errno"]),
        "error_log": _TIME.sub("[]", record["error_log"]),
        "kprobe_events": record["kprobe_events"],
        "files": record["show"],
    }
    return [f"{key}: {got[key]!r}, recorded {expected[key]!r}" for key in got if got[key] != expected[key]]


def test_recorded_writes(capsys: pytest.CaptureFixture[str]) -> None:
    records = _load()
    differing = {record["id"]: found for record in records if (found := _replay(record))}
    with capsys.disabled():
        print(f"\nfilter: {len(records) - len(differing)} of {len(records)} recorded writes agree", end="")
    assert records
    assert not differing, "\n".join(f"{key}: {'; '.join(found)}" for key, found in differing.items())
