"""What triggers do to a trace array: its switch, its clock, call chains and snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from emulated_kernel.trace.ports import ProbeHit
from emulated_kernel.trace.trace_array import TraceArray
from emulated_kernel.trace.trace_entry import EntryType, stack_entry
from emulated_kernel.wiring.call_stack import CallStack


class Snapshots(Protocol):
    """The snapshot buffer of a trace array."""

    def allocate(self) -> None:
        """Make room for snapshots, if there is none yet. Raises: KernelError ENOMEM."""

    def take(self) -> None:
        """Swap the buffer with the snapshot's."""


class RawRecorder(Protocol):
    """Records of a hit that are no event's."""

    def record_raw(self, event_id: int, payload: bytes, hit: ProbeHit, /) -> None: ...


class ArrayControl:
    """Implements trace.trigger.TraceControl."""

    def __init__(
        self, array: TraceArray, recorder: RawRecorder, stack: CallStack, snapshots: Snapshots | None = None
    ) -> None:
        self._array = array
        self._recorder = recorder
        self._stack = stack
        self.set_tracing_on = array.set_tracing_on
        self.set_clock = array.set_clock
        self._snapshots = snapshots

    @property
    def has_snapshots(self) -> bool:
        return self._snapshots is not None

    def allocate_snapshot(self) -> None:
        """Raises: KernelError ENOMEM."""
        if self._snapshots is not None:
            self._snapshots.allocate()

    def take_snapshot(self) -> None:
        if self._snapshots is not None:
            self._snapshots.take()

    @property
    def tracing_on(self) -> bool:
        return self._array.tracing_on

    @property
    def clock_in_ns(self) -> bool:
        return self._array.clock.in_ns

    def callers(self, hit: ProbeHit) -> Sequence[int]:
        return self._stack.callers(hit.regs)

    def record_stack(self, hit: ProbeHit) -> None:
        payload = stack_entry(self.callers(hit), self._array.system.word_size)
        self._recorder.record_raw(EntryType.STACK, payload, hit)

    def now(self) -> int:
        system = self._array.system
        convert = system.clocks.converter(self._array.clock)
        now = system.now_ns()
        return now if convert is None else convert(now)
