"""Static events, which are the events of the tracepoints in the kernel image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from emulated_kernel.image.trace_events import FieldDefinition
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.print_fmt import KernelNames, PrintContext, compile_print_fmt
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.util.fast_dataclass import dataclass

_OTHER_TASKS = {
    "sched_switch": "next_pid",
    "sched_waking": "pid",
    "sched_wakeup": "pid",
    "sched_wakeup_new": "pid",
}

RecordHandler = Callable[[bytes, ProbeHit], None]
"""Handler of a tracepoint's records; its arguments are the record without common fields, and the hit."""


@dataclass(frozen=True)
class TracepointStub:
    """A guest function that a tracepoint calls at each hit, and on which probes of the tracepoint are put.

    The tracepoint passes its own arguments to the function.

    Mirrors: include/linux/tracepoint-defs.h:struct tracepoint, probestub (v6.12).
    """

    symbol: str
    """Name of the function."""
    first_parameter: int = 0
    """Number of leading parameters of the function that are not arguments of the tracepoint."""
    preempt_count: int = 1
    """Amount that the tracepoint adds to preempt_count during the call in Linux.

    The guest does not add it, so it is added to the count in the records.
    """
    switch: Callable[[bool], None] | None = None
    """Function that allows (True) or forbids (False) calls of the stub.

    The value is None if the tracepoint, while it is on, calls the stub at each hit.
    """


class Tracepoint:
    """A tracepoint: a place in the kernel that passes records to handlers while it is switched on."""

    def __init__(self, switch: Callable[[bool], None], stub: TracepointStub | None = None) -> None:
        """Create a tracepoint that is off. `switch` switches it on (True) or off (False).

        `stub`: the function on which kprobes can probe the tracepoint; None if the tracepoint cannot be
        probed.
        """
        self._switch = switch
        self.stub = stub
        self.handlers: tuple[RecordHandler, ...] = ()

    def subscribe(self, handler: RecordHandler, /) -> None:
        """Pass each record of the tracepoint to `handler`. The first handler switches the tracepoint on."""
        if not self.handlers:
            self._switch(True)
        self.handlers += (handler,)

    def unsubscribe(self, handler: RecordHandler, /) -> None:
        """Stop passing records to `handler`. If no handler is left, switch the tracepoint off."""
        self.handlers = tuple(each for each in self.handlers if each != handler)
        if not self.handlers:
            self._switch(False)


def layout_fields(
    definitions: Iterable[FieldDefinition], common_size: int = COMMON_SIZE, *, signed_char: bool = True
) -> Iterator[EventField]:
    """Compute the offsets of an event's fields, and yield the fields.

    `common_size`: size of the kernel's own struct trace_entry in bytes. If `signed_char` is not set, a char
    is unsigned, regardless of the definitions.
    Mirrors: kernel/trace/trace_events.c:event_define_fields (v6.1).
    """
    offset = common_size
    for each in definitions:
        offset += -offset % each.align
        is_signed = each.is_signed and (signed_char or not each.type.startswith("char"))
        yield EventField(each.type, each.name, offset, each.size, is_signed, each.length)
        offset += each.size


class StaticEvent(TraceEvent):
    """An event that records the hits of a tracepoint; the guest fills in the records."""

    is_tracepoint = True

    def __init__(
        self,
        group: str,
        name: str,
        fields: Iterable[EventField],
        print_fmt: str,
        tracepoint: Tracepoint,
        names: Callable[[], KernelNames],
        word_size: int,
    ) -> None:
        """Create the event of a tracepoint.

        `names` returns the kernel's names that the print format may use. `names` is called when the first
        record is printed. `word_size`: size of a long in bytes.
        """
        super().__init__(group, name, fields, print_fmt)
        self.tracepoint = tracepoint
        self._names = names
        self._word_size = word_size

    def other_task(self, payload: bytes) -> int | None:
        """Return the pid of the task that the scheduler switches to or wakes up; None for other events.

        Mirrors: kernel/trace/trace_events.c:register_pid_events (v6.1).
        """
        field = _OTHER_TASKS.get(self.name)
        if field is None or self.group != "sched":
            return None
        at = next(each.offset for each in self.fields if each.name == field) - COMMON_SIZE
        return int.from_bytes(payload[at : at + 4], "little")

    def start(self) -> None:
        """Begin to record the hits of the tracepoint, which is switched on if it is off."""
        self.tracepoint.subscribe(self.record)

    def stop(self) -> None:
        """Stop recording the hits of the tracepoint, which is switched off if it has no other handler."""
        self.tracepoint.unsubscribe(self.record)

    @cached_property
    def _print(self) -> Callable[[PrintContext], str]:
        fields = {field.name: field for field in self.fields}
        return compile_print_fmt(self.print_fmt, fields, self._word_size, self._names())

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        """Return the text of a record, as the event's print format prints it."""
        del sym_addr
        return self._print(PrintContext(payload, symbols))
