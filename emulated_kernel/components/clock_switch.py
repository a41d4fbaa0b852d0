"""Changing what the machine's clock follows, and all that depends on it."""

from __future__ import annotations

from emulated_kernel.machine.guest_clock import MachineClock
from emulated_kernel.trace.trace_arrays import TraceArrays
from emulated_kernel.util.control_lock import ControlLock


class ClockSwitch:
    """The clock's mode and seed, for the machine and for the guest code that reads the clock for records."""

    def __init__(self, clock: MachineClock, arrays: TraceArrays, lock: ControlLock) -> None:
        self._clock = clock
        self._arrays = arrays
        self._lock = lock

    def select(self, kind: str | None, seed: int | None) -> None:
        """Follow another one; None: the mode, or the seed, stays."""
        self._lock.assert_held()
        clock = self._clock
        clock.select(clock.kind if kind is None else kind, clock.seed if seed is None else seed)
        # Guest code that reads the old clock is dropped with the records' ways.
        for tracing in self._arrays:
            tracing.array.notify_rewired()
