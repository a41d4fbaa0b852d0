"""The filter files of a whole kernel, with real hits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.kernel import Kernel
from emulated_kernel.trace.filter import GROUP_FILTER_TEXT
from emulated_kernel.vfs.ports import EventPort
from emulated_kernel.wiring.tracefs import Events
from tests.trace.events.kernel import errno_of


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as booted:
        yield booted


@pytest.fixture
def events(kernel: Kernel) -> Iterator[Events]:
    """Two events on a function of one argument; the first is enabled."""
    kernel.kprobe_events.write(b"p:a strlen s=+0(%di):string\np:b strlen n=%di\n")
    made = Events(kernel.trace_arrays.top)
    _event(made, "a").set_enabled(True)
    yield made
    made.set_enabled(False)
    kernel.kprobe_events.clear()


def _event(events: Events, name: str) -> EventPort:
    group = events.find("kprobes")
    assert group is not None
    event = group.find(name)
    assert event is not None
    return event


def _records(kernel: Kernel) -> list[str]:
    """Arguments of the recorded hits."""
    return [line.rpartition(") ")[2] for line in kernel.trace.trace_text().splitlines() if "strlen" in line]


def test_files(kernel: Kernel, events: Events) -> None:
    group = events.find("kprobes")
    assert group is not None
    first, second = _event(events, "a"), _event(events, "b")
    first.set_filter(b's ~ "vfs_*" && comm != "bash"\n')
    for name in ("do_fork", "vfs_read"):
        kernel.call("strlen", name)
    assert _records(kernel) == ['s="vfs_read"']
    assert kernel.kprobe_events.profile().split()[:2] == ["a", "2"]
    group.set_filter(b"n == 1")
    assert "n == 1\n^\nparse_error: " in first.filter_text()
    assert second.filter_text() == "n == 1\n"
    assert group.filter_text() == GROUP_FILTER_TEXT


def test_common_fields_are_those_of_the_record(kernel: Kernel, events: Events) -> None:
    event = _event(events, "a")
    kernel.trace.clear_trace()
    event.set_filter(f"common_type == {event.id} && common_flags == 0 && common_pid > 0".encode())
    kernel.call("strlen", "x")
    event.set_filter(b"common_pid <= 0 || CPU > 0")
    kernel.call("strlen", "y")
    assert _records(kernel) == ['s="x"']


def test_files_of_removed_events(kernel: Kernel, events: Events) -> None:
    group, event = events.find("kprobes"), _event(events, "b")
    assert group is not None
    kernel.kprobe_events.write(b"-:b\n")
    assert errno_of(event.filter_text) == "ENODEV"
    assert errno_of(lambda: event.set_filter(b"0")) == "ENODEV"
    events.set_enabled(False)
    kernel.kprobe_events.clear()
    assert errno_of(lambda: group.set_filter(b"0")) == "ENODEV"
