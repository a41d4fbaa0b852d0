"""Fixtures of the tests of static events: a kernel, and its events by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.util.config import MachineConfig

Enable = Callable[..., None]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel(MachineConfig(clock="virtual")) as booted:
        yield booted


@pytest.fixture
def enable(kernel: Kernel) -> Enable:
    """Return a function that enables the event `group/name` for the top trace array, or disables it."""

    def switch(path: str, on: bool = True) -> None:
        kernel.trace_arrays.top.events.set_enabled(find(kernel, path), on)

    return switch


def find(kernel: Kernel, path: str) -> TraceEvent:
    """Return the event `group/name`."""
    event = kernel.tracing.kprobe_events.registry.find(*path.split("/"))
    assert event is not None, path
    return event


def records(kernel: Kernel) -> list[str]:
    """Return the trace's lines from the pid's column on, without CPU, flags and time."""
    lines = [line for line in kernel.trace.trace_text().splitlines() if not line.startswith("#")]
    return [f"{line[:24].split('-')[-1].split()[0]} {line.split(': ', 1)[1]}" for line in lines]
