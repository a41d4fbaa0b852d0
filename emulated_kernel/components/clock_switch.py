"""ClockSwitch: changes the mode or seed of the machine's clock, and drops the compiled code that reads it."""

from __future__ import annotations

from emulated_kernel.machine.guest_clock import MachineClock
from emulated_kernel.trace.trace_arrays import TraceArrays
from emulated_kernel.util.control_lock import ControlLock


class ClockSwitch:
    """Changes the machine's clock, and drops the compiled handlers that read the old clock."""

    def __init__(self, clock: MachineClock, arrays: TraceArrays, lock: ControlLock) -> None:
        self._clock = clock
        self._arrays = arrays
        self._lock = lock

    def select(self, kind: str | None, seed: int | None) -> None:
        """Select the mode and the seed of the clock; None keeps the current one.

        `kind`, `seed`, errors: see MachineClock.select().
        """
        self._lock.assert_held()
        clock = self._clock
        clock.select(clock.kind if kind is None else kind, clock.seed if seed is None else seed)
        # This also drops the compiled handlers, which read the old clock.
        for tracing in self._arrays:
            tracing.array.notify_rewired()
