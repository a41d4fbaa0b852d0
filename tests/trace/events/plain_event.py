"""A trace event without a probe, like the kernel's own events."""

from __future__ import annotations

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.symbols import KernelSymbols


class PlainEvent(TraceEvent):
    """An event with any name and fields; a record is shown as hexadecimal digits."""

    def start(self) -> None:
        """Do nothing: the event needs no probe."""

    def stop(self) -> None:
        """Do nothing: the event has no probe."""

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        del symbols, sym_addr
        return payload.hex()
