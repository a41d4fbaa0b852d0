"""The event of trace_marker's records: it can't be enabled, and yet have triggers."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.trace.event import EventField, TraceEvent
from emulated_kernel.trace.ports import ProbeHit, Recorder, TraceSymbols
from emulated_kernel.trace.trace_entry import AddressStyle, EntryType, marker_ip, print_place_and_message

FTRACE_SYSTEM = "ftrace"
_COMMON_SIZE = 8


class PrintEvent(TraceEvent):
    """ftrace:print. Mirrors: kernel/trace/trace_entries.h, the entry `print` (v6.1)."""

    is_switchable = False

    def __init__(self, word_size: int) -> None:
        self._word_size = word_size
        fields = (
            EventField("unsigned long", "ip", _COMMON_SIZE, word_size, False),
            EventField("char[]", "buf", _COMMON_SIZE + word_size, 0, True),
        )
        print_fmt = '"%ps: %s", (void *)REC->ip, REC->buf'
        super().__init__(FTRACE_SYSTEM, "print", fields, print_fmt)
        self.id = EntryType.PRINT

    def start(self) -> None:
        """Nothing: markers are written when somebody writes them."""

    def stop(self) -> None:
        """Nothing."""

    def print_record(self, payload: bytes, symbols: TraceSymbols, *, sym_addr: bool = False) -> str:
        """As without an event, less the newline."""
        style = AddressStyle(symbols, self._word_size, sym_addr=sym_addr)
        return print_place_and_message(payload, style).removesuffix("\n")

    def written(self, recorder: Recorder, text: bytes, hit: ProbeHit) -> Callable[[], None] | None:
        """Run the triggers of a trace array for a marker that is about to be recorded there.

        What is returned runs those that wait until it is. Mirrors: tracing_mark_write (v6.1).
        """
        file = self.files.get(recorder)
        if file is None or not file.triggers:
            return None
        payload = marker_ip(self._word_size).to_bytes(self._word_size, "little") + text + b"\0"
        deferred = file.run_on_entry(recorder.entry(self, payload, hit), hit)
        return lambda: file.run_deferred(deferred, hit)
