"""Triggers of trace_marker, which belong to the event ftrace:print. This event cannot be enabled."""

from __future__ import annotations

import pytest

from emulated_kernel.trace.events.print_event import PrintEvent
from tests.trace.events.kernel import Hit, errno_of
from tests.trace.trigger.control import TriggerKernel


@pytest.fixture
def kernel() -> TriggerKernel:
    made = TriggerKernel()
    made.kernel.events.registry.add_own(PrintEvent(8, 0xFFFFFFFF811B228D))
    made.define("p:a vfs_read\n")
    return made


def _event(kernel: TriggerKernel) -> PrintEvent:
    event = kernel.kernel.events.registry.find("ftrace", "print")
    assert isinstance(event, PrintEvent)
    return event


def _mark(kernel: TriggerKernel, text: bytes) -> None:
    recorded = _event(kernel).written(kernel.kernel.recorder, text, Hit())
    kernel.control.actions.append("recorded")
    if recorded is not None:
        recorded()


def _trigger(kernel: TriggerKernel, text: str) -> None:
    kernel.triggers.execute(_event(kernel), text)


def test_its_place_among_events(kernel: TriggerKernel) -> None:
    event = _event(kernel)
    assert event.id == 5
    assert kernel.kernel.events.registry.by_id(5) is None
    assert not event.is_switchable
    assert errno_of(lambda: kernel.write("enable_event:ftrace:print")) == "EINVAL"
    command = b"e:ep ftrace.print\n"
    assert errno_of(lambda: kernel.kernel.dynamic_events.write(command)) == "ENODEV"


def test_triggers_run_around_the_record(kernel: TriggerKernel) -> None:
    _mark(kernel, b"none yet")
    _trigger(kernel, "snapshot")
    _trigger(kernel, "stacktrace")
    _mark(kernel, b"x")
    assert kernel.control.actions == ["recorded", "allocate", "snapshot", "recorded", "stack"]


def test_the_text_can_be_filtered(kernel: TriggerKernel) -> None:
    _trigger(kernel, 'stacktrace if buf == "start"')
    _mark(kernel, b"start\n")
    _mark(kernel, b"start")
    assert kernel.control.actions == ["recorded", "recorded", "stack"]


def test_a_delay_between_markers(kernel: TriggerKernel) -> None:
    kernel.synthetic.write(b"latency u64 lat\n")
    _trigger(kernel, 'hist:keys=common_pid:ts0=common_timestamp if buf == "start"')
    _trigger(
        kernel,
        "hist:keys=common_pid:lat=common_timestamp-$ts0:onmatch(ftrace.print).latency($lat) if buf == 'end'",
    )
    latency = kernel.synthetic.find("latency")
    assert latency is not None
    latency.file(kernel.kernel.recorder).enable()
    for time, text in ((100, b"start"), (130, b"end")):
        kernel.control.time = time
        _mark(kernel, text)
    ((_, payload),) = kernel.kernel.recorder.entries
    assert latency.print_record(payload, kernel.kernel.symbols) == "lat=30"
