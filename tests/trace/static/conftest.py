"""What the tests of static events share: a kernel, and events of it by name."""

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
    """Enables `group/name` for the top trace array, or switches it off."""

    def switch(path: str, on: bool = True) -> None:
        kernel.trace_arrays.top.events.set_enabled(find(kernel, path), on)

    return switch


def find(kernel: Kernel, path: str) -> TraceEvent:
    """The event `group/name`."""
    event = kernel.tracing.kprobe_events.registry.find(*path.split("/"))
    assert event is not None, path
    return event


def records(kernel: Kernel) -> list[str]:
    """What the lines of the trace say, from the pid's column on and without CPU, flags and time."""
    lines = [line for line in kernel.trace.trace_text().splitlines() if not line.startswith("#")]
    return [f"{line[:24].split('-')[-1].split()[0]} {line.split(': ', 1)[1]}" for line in lines]
