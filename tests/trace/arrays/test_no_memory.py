"""If memory for a ring buffer cannot be allocated, at whichever allocation, the operation fails with ENOMEM
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TypeVar

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.trace.trace_arrays import TraceArrays
from tests.trace.events.kernel import errno_of

T = TypeVar("T")

OPERATIONS: dict[str, Callable[[TraceArrays], object]] = {
    "an instance": lambda arrays: arrays.make("one"),
    "other sizes": lambda arrays: arrays.top.array.resize_buffer(512),
    "a snapshot": lambda arrays: arrays.top.array.snapshot.write(1),
}


class Limited:
    """A memory allocator whose first `spared` allocations succeed. Later allocations fail."""

    def __init__(self, spared: int) -> None:
        self._left = spared

    def __call__(self, allocate: Callable[..., T], *sizes: object) -> T:
        self._left -= 1
        if self._left < 0:
            raise HardwareError("no memory")
        return allocate(*sizes)


def state(kernel: Kernel) -> tuple[object, ...]:
    """Return what a failed operation must not change: memory in use, places of ring buffers, texts of files,
    and names of instances.
    """
    memory, top = kernel.machine.records, kernel.trace
    places = [buffer.place for buffer in (*top.buffers, *top.snapshot.buffers)]
    texts = top.buffer_size_text(0), top.snapshot_text()
    return memory._pages.used, memory._cells.used, places, texts, list(kernel.trace_arrays.names())


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_at_each_allocation(
    operation: Callable[[TraceArrays], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Kernel() as kernel:
        memory = kernel.machine.records
        if operation is OPERATIONS["a snapshot"]:
            kernel.trace.resize_buffer(256)
        before = state(kernel)
        for spared in count():
            with monkeypatch.context() as patch:
                limited = Limited(spared)
                patch.setattr(memory, "exchanged_pages", partial(limited, memory.exchanged_pages))
                patch.setattr(memory, "alloc_percpu", partial(limited, memory.alloc_percpu))
                failed = errno_of(lambda: operation(kernel.trace_arrays))
            if not failed:
                break
            assert failed == "ENOMEM"
            assert state(kernel) == before
        assert spared
        assert state(kernel) != before
        for name in list(kernel.trace_arrays.names()):
            kernel.trace_arrays.remove(name)
            assert state(kernel) == before
