"""A booted kernel that records hits, for tests of trace arrays and their events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.trace_arrays import TraceArrays, Tracing


@pytest.fixture(scope="module")
def booted() -> Iterator[Kernel]:
    with Kernel() as made:
        yield made


@pytest.fixture
def kernel(booted: Kernel) -> Iterator[Kernel]:
    """Yield a kernel with the events kprobes/a, kprobes/b and g/c; remove all events afterwards."""
    booted.tracing.kprobe_events.write(b"p:a strlen s=+0(%di):string\np:b strlen\np:g/c memcmp\n")
    yield booted
    for name in list(booted.trace_arrays.names()):
        booted.trace_arrays.remove(name)
    booted.trace_arrays.top.events.clear()
    booted.trace.clear_trace()
    booted.tracing.kprobe_events.clear()


@pytest.fixture
def arrays(kernel: Kernel) -> TraceArrays:
    return kernel.trace_arrays


def names(tracing: Tracing) -> list[str]:
    """Return the names of the events of a trace array's records, oldest first."""
    lines = [line for line in tracing.array.trace_text().splitlines() if not line.startswith("#")]
    return [line.split(": ")[1].split(":")[0] for line in lines]
