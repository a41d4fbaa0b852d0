"""An event that no probe makes, as those of the kernel itself."""

from __future__ import annotations

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.symbols import KernelSymbols


class PlainEvent(TraceEvent):
    """Of any name and fields; shows a record as hexadecimal digits."""

    def start(self) -> None:
        """It is always there."""

    def stop(self) -> None:
        """It stays."""

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        del symbols, sym_addr
        return payload.hex()
