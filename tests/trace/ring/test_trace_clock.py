"""Trace clocks. With `--clock real`, records have times that user space can read from the same clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.ring.trace_clock import TRACE_CLOCKS
from emulated_kernel.util.config import MachineConfig

CLOCKS: dict[str, Callable[[], int]] = {
    "mono": lambda: time.clock_gettime_ns(time.CLOCK_MONOTONIC),
    "mono_raw": lambda: time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW),
    "boot": lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    "tai": lambda: time.clock_gettime_ns(time.CLOCK_TAI),
}


def _mark(kernel: Kernel) -> int:
    """Write a marker, and return the time of its record in nanoseconds."""
    kernel.trace.clear_trace()
    kernel.trace.write_marker(b"now")
    ((stamp, _record),) = kernel.trace.buffers[0]
    return stamp


@pytest.mark.parametrize("name", CLOCKS)
def test_with_the_real_clock_a_record_lies_between_two_readings(name: str) -> None:
    with Kernel(MachineConfig(clock="real")) as kernel:
        kernel.trace.set_clock(name)
        for _ in range(10):
            before = CLOCKS[name]()
            stamp = _mark(kernel)
            assert before <= stamp <= CLOCKS[name]()
        # A sleeping guest advances its clock, but the trace clock still shows real time.
        kernel.machine.clock.advance(10**9)
        before = CLOCKS[name]()
        assert before <= _mark(kernel) <= CLOCKS[name]()


def test_other_clocks_count_from_the_boot() -> None:
    with Kernel(MachineConfig(clock="real")) as kernel:
        for name in ("local", "global", "perf"):
            kernel.trace.set_clock(name)
            assert _mark(kernel) <= kernel.machine.clock.now_ns()


def test_with_a_virtual_clock_all_count_the_guest_s_time() -> None:
    with Kernel(MachineConfig()) as kernel:
        for clock in TRACE_CLOCKS:
            if clock.in_ns:
                kernel.trace.set_clock(clock.name)
                before = kernel.machine.clock.now_ns()
                assert before < _mark(kernel) <= kernel.machine.clock.now_ns()
