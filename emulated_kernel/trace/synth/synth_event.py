"""SyntheticEvent: the fields of a synthetic event, the writing of its entries, and their text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emulated_kernel.trace.context.probe_hit import ProbeHit, nested_in
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.synth.fields import StackField, SyntheticField, ValueType

SYSTEM = "synthetic"
"""Group of all synthetic events."""
FIELDS_MAX = 64
"""Maximum number of fields of an event."""


class SyntheticEvent(TraceEvent):
    """A synthetic event, whose fields a user defines and which histograms trigger.

    Mirrors: kernel/trace/trace_synth.h:struct synth_event (v6.1).
    """

    def __init__(self, name: str, fields: Sequence[SyntheticField], separator: str = ", ") -> None:
        """Create an event without adding it to the registry.

        `separator`: text between the fields in the print format.
        """
        self.synthetic_fields = tuple(fields)
        self.fixed_size = sum(field.room for field in fields)
        self.hist_references = 0
        """Number of histograms on the event, plus the number of histogram actions that trigger it."""
        self.is_gone = False
        super().__init__(SYSTEM, name, _event_fields(fields), _print_fmt(fields, separator))

    @property
    def is_removed(self) -> bool:
        return self.is_gone

    def start(self) -> None:
        """Do nothing: histograms call trace() even if the event is not started."""

    def stop(self) -> None:
        """Do nothing: trace() records nothing while the event is disabled."""

    def takes(self, position: int, given: ValueType) -> bool:
        """Return True if field `position` can hold the value of a variable of the type `given`.

        Positions are counted from 0. Return False if the event has no such field.
        """
        fields = self.synthetic_fields
        return position < len(fields) and fields[position].takes(given)

    def is_call_chain(self, name: str) -> bool:
        """Return True if the event has a field called `name` that is a call chain."""
        return any(each.name == name and isinstance(each, StackField) for each in self.synthetic_fields)

    def trace(self, values: Sequence[int | bytes], hit: ProbeHit) -> None:
        """Trigger the event: record an entry with a value for each field, if the event is enabled.

        If events trigger one another and the entries would be nested too deep, record nothing.
        Mirrors: kernel/trace/trace_events_synth.c:trace_event_raw_event_synth (v6.1).
        """
        if not self.recorders:
            return
        # Linux: this entry is written while the entry of the event that was hit is still reserved.
        with nested_in(hit) as is_possible:
            if is_possible:
                self.record(self._payload(values), hit)

    def _payload(self, values: Sequence[int | bytes]) -> bytes:
        fixed = b""
        dynamic = b""
        end = COMMON_SIZE + self.fixed_size
        for field, value in zip(self.synthetic_fields, values, strict=True):
            fixed_part, dynamic_part = field.parts(value, end + len(dynamic))
            fixed += fixed_part
            dynamic += dynamic_part
        return fixed + dynamic

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        """Return the text of an entry.

        Mirrors: kernel/trace/trace_events_synth.c:print_synth_event (v6.1).
        """
        del sym_addr
        text = ""
        at = 0
        for field in self.synthetic_fields:
            # Lines of a call chain end the text so far; a blank separates other fields.
            separator = " " if text and not text.endswith("\n") else ""
            text += f"{separator}{field.name}={field.text(payload, at, symbols)}"
            at += field.room
        return text


def _event_fields(fields: Sequence[SyntheticField]) -> Iterator[EventField]:
    """Yield the fields for the `format` file, with their offsets.

    Mirrors: kernel/trace/trace_events_synth.c:synth_event_define_fields (v6.1).
    """
    offset = COMMON_SIZE
    for field in fields:
        yield EventField(field.type, field.name, offset, field.size, field.is_signed)
        offset += field.room


def _print_fmt(fields: Sequence[SyntheticField], separator: str) -> str:
    """Return the print format of an event.

    Mirrors: kernel/trace/trace_events_synth.c:__set_synth_event_print_fmt (v6.1).
    """
    text = separator.join(f"{field.name}={field.print_fmt}" for field in fields)
    return f'"{text}", {", ".join(field.print_value for field in fields)}'
