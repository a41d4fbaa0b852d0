"""Events of tracing's own entries. They cannot be enabled, but trace_marker's event can have triggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import Recorder, TraceEvent
from emulated_kernel.trace.ring.trace_entry import (
    COMMON_SIZE,
    ENTRY_PRINTERS,
    AddressStyle,
    EntryType,
    EventField,
)
from emulated_kernel.trace.symbols import KernelSymbols

FTRACE_SYSTEM = "ftrace"


class FtraceEntryEvent(TraceEvent):
    """An event of the group ftrace, such as ftrace:function, for a type of entry that tracing itself writes.

    It cannot be enabled, but has a `format` file.
    """

    is_switchable = False

    def __init__(
        self, kind: int, name: str, fields: Iterable[EventField], print_fmt: str, word_size: int
    ) -> None:
        super().__init__(FTRACE_SYSTEM, name, fields, print_fmt)
        self.id = kind
        self.is_registrable = kind in (EntryType.FN, EntryType.PRINT)
        self._word_size = word_size

    def start(self) -> None:
        """Do nothing: tracing writes these entries in any case. Triggers of the event can start it."""

    def stop(self) -> None:
        """Do nothing: start() does nothing either, so there is nothing to stop."""

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        """Return the entry's text without the newline, made by the type's function in ENTRY_PRINTERS."""
        style = AddressStyle(symbols, self._word_size, sym_addr=sym_addr)
        return ENTRY_PRINTERS[self.id](payload, style).removesuffix("\n")


class PrintEvent(FtraceEntryEvent):
    """The event ftrace:print of texts that are written to trace_marker. It can have triggers.

    Mirrors: kernel/trace/trace_entries.h, the entry `print` (v6.1).
    """

    def __init__(self, word_size: int, marker_ip: int, *, signed_char: bool = True) -> None:
        """Create the event. `marker_ip` is the address of the code that writes markers.

        `signed_char`: whether a char of the architecture is signed, which the `format` file shows.
        """
        fields = (
            EventField("unsigned long", "ip", COMMON_SIZE, word_size, False),
            EventField("char[]", "buf", COMMON_SIZE + word_size, 0, signed_char),
        )
        print_fmt = '"%ps: %s", (void *)REC->ip, REC->buf'
        super().__init__(EntryType.PRINT, "print", fields, print_fmt, word_size)
        self.marker_ip = marker_ip

    def written(self, recorder: Recorder, text: bytes, hit: ProbeHit) -> Callable[[], None] | None:
        """Run the event's triggers in the trace array `recorder`, before it records the marker `text`.

        Return a function that runs the triggers that must run after the marker is recorded. Return None if
        the event has no triggers.
        Mirrors: kernel/trace/trace.c:tracing_mark_write (v6.1).
        """
        file = self.files.get(recorder)
        if file is None or not file.triggers:
            return None
        payload = self.marker_ip.to_bytes(self._word_size, "little") + text + b"\0"
        deferred = file.run_on_entry(recorder.entry(self, payload, hit), hit)
        return lambda: file.run_deferred(deferred, hit)
