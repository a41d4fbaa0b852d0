"""Trace events: what they are called, how their entries are laid out, and how one is printed."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import bytes_to_text
from emulated_kernel.trace.fetch import COMMON_SIZE
from emulated_kernel.trace.fetchargs import ProbeArg
from emulated_kernel.trace.ports import Recorder, TraceSymbols
from emulated_kernel.trace.symbols import print_ip, sprint_symbol

if TYPE_CHECKING:
    from emulated_kernel.trace.filter import EventFilter
    from emulated_kernel.trace.trace_kprobe import TraceKprobe

FIRST_EVENT_ID = 21
"""Lower ids are tracing's own entries. Mirrors: kernel/trace/trace.h:__TRACE_LAST_TYPE (v6.1)."""
LAST_EVENT_ID = 0xFFFF


@dataclass(frozen=True)
class EventField:
    """A field of an entry; offset and size in bytes, the offset from the entry's start."""

    type: str
    name: str
    offset: int
    size: int
    is_signed: bool

    def format_line(self) -> str:
        """Mirrors: kernel/trace/trace_events.c:f_show (v6.1)."""
        declaration = f"{self.type} {self.name}"
        base, bracket, _ = self.type.partition("[")
        if bracket and not self.type.startswith("__data_loc"):
            # Linux: a probe's fields don't tell it how long the array is.
            declaration = f"{base} {self.name}[]"
        rest = f"offset:{self.offset};\tsize:{self.size};\tsigned:{int(self.is_signed)}"
        return f"\tfield:{declaration};\t{rest};\n"


COMMON_FIELDS = (
    EventField("unsigned short", "common_type", 0, 2, False),
    EventField("unsigned char", "common_flags", 2, 1, False),
    EventField("unsigned char", "common_preempt_count", 3, 1, False),
    EventField("int", "common_pid", 4, 4, True),
)


class TraceEvent(ABC):
    """An event: `id` stands in its entries as common_type, 0 before it is registered."""

    def __init__(self, group: str, name: str, fields: Iterable[EventField], print_fmt: str) -> None:
        self.group = group
        self.name = name
        self.id = 0
        self.fields = tuple(fields)
        self.print_fmt = print_fmt
        self.references = 0
        """Users such as hist triggers and event probes; while there are any, it can't be removed."""
        self.filters: dict[Recorder, EventFilter] = {}
        """Of each trace array that has one for this event."""

    def format_text(self) -> str:
        """The `format` file. Mirrors: kernel/trace/trace_events.c:f_show (v6.1)."""
        common = "".join(field.format_line() for field in COMMON_FIELDS)
        own = "".join(field.format_line() for field in self.fields)
        return f"name: {self.name}\nID: {self.id}\nformat:\n{common}\n{own}\nprint fmt: {self.print_fmt}\n"

    @abstractmethod
    def print_record(self, payload: bytes, symbols: TraceSymbols, *, sym_addr: bool = False) -> str:
        """What `trace` shows after `name: `; `payload` is the entry behind its 8 common bytes."""


class KprobeTraceEvent(TraceEvent):
    """The event of one or more kprobes, which all have the same arguments.

    Mirrors: kernel/trace/trace_probe.h:struct trace_probe_event (v6.1).
    """

    def __init__(
        self, group: str, name: str, is_return: bool, args: tuple[ProbeArg, ...], word_size: int
    ) -> None:
        self.is_return = is_return
        self.args = args
        self.word_size = word_size
        self.probes: list[TraceKprobe] = []
        self.recorders: list[Recorder] = []
        """Those that have it enabled."""
        self.seen_by: list[Recorder] = []
        """Those that ever had it enabled, and may hold entries of it."""
        names = ("__probe_func", "__probe_ret_ip") if is_return else ("__probe_ip",)
        super().__init__(group, name, _fields(names, args, word_size), _print_fmt(names, args))

    @property
    def is_enabled(self) -> bool:
        """Whether any recorder has it enabled."""
        return bool(self.recorders)

    @property
    def header_size(self) -> int:
        """Bytes of a payload before its arguments."""
        return self.word_size * (2 if self.is_return else 1)

    def print_record(self, payload: bytes, symbols: TraceSymbols, *, sym_addr: bool = False) -> str:
        """Mirrors: kernel/trace/trace_kprobe.c:print_kprobe_event, print_kretprobe_event (v6.1)."""
        digits = 2 * self.word_size if sym_addr else 0
        first = int.from_bytes(payload[: self.word_size], "little")
        text = print_ip(symbols, first, offset=not self.is_return, digits=digits)
        if self.is_return:
            second = int.from_bytes(payload[self.word_size : 2 * self.word_size], "little")
            text = f"{print_ip(symbols, second, offset=True, digits=digits)} <- {text}"
        args = "".join(f" {arg.name}={self._arg_text(arg, payload, symbols)}" for arg in self.args)
        return f"({text}){args}"

    def _arg_text(self, arg: ProbeArg, payload: bytes, symbols: TraceSymbols) -> str:
        """Mirrors: kernel/trace/trace_probe_tmpl.h:trace_probe_print_args (v6.1)."""
        at = self.header_size + arg.offset
        places = range(at, at + arg.size, arg.type.size)
        texts = [_element_text(arg, payload, place, symbols) for place in places]
        return "{" + ",".join(texts) + "}" if arg.count else texts[0]


def _element_text(arg: ProbeArg, payload: bytes, place: int, symbols: TraceSymbols) -> str:
    value = int.from_bytes(payload[place : place + arg.type.size], "little", signed=arg.type.is_signed)
    if arg.type.is_string:
        return _string_text(value & 0xFFFFFFFF, payload)
    if arg.type.name == "symbol":
        return sprint_symbol(symbols, value)
    return arg.type.render(value)


def _string_text(location: int, payload: bytes) -> str:
    """Linux: of a string's length in __data_loc only 0 counts; it ends at its NUL."""
    if not location >> 16:
        return "(fault)"
    text = payload[(location & 0xFFFF) - COMMON_SIZE :].partition(b"\0")[0]
    return f'"{bytes_to_text(text)}"'


def _fields(names: Sequence[str], args: Sequence[ProbeArg], word_size: int) -> Iterator[EventField]:
    """Mirrors: kernel/trace/trace_kprobe.c:kprobe_event_define_fields (v6.1)."""
    offset = COMMON_SIZE
    for name in names:
        yield EventField("unsigned long", name, offset, word_size, False)
        offset += word_size
    for arg in args:
        yield EventField(arg.field_type, arg.name, offset + arg.offset, arg.size, arg.type.is_signed)


def _print_fmt(names: Sequence[str], args: Sequence[ProbeArg]) -> str:
    """Mirrors: kernel/trace/trace_probe.c:__set_print_fmt (v6.1)."""
    formats = " <- ".join("%lx" for _ in names)
    text = "".join(f" {arg.name}={_arg_fmt(arg)}" for arg in args)
    values = [f"REC->{name}" for name in names]
    for arg in args:
        values += _arg_values(arg)
    return f'"({formats}){text}", {", ".join(values)}'


def _arg_fmt(arg: ProbeArg) -> str:
    one = arg.type.print_fmt
    return "{" + ",".join([one] * arg.count) + "}" if arg.count else one


def _arg_values(arg: ProbeArg) -> list[str]:
    elements = [f"{arg.name}[{number}]" for number in range(arg.count)] or [arg.name]
    return [f"__get_str({each})" if arg.type.is_string else f"REC->{each}" for each in elements]


class EventRegistry:
    """All trace events of a kernel, by name and by id."""

    def __init__(self, first_id: int = FIRST_EVENT_ID) -> None:
        self._next_id = self._first_id = first_id
        self._events: dict[tuple[str, str], TraceEvent | None] = {}
        self._by_id: dict[int, TraceEvent] = {}
        self._groups: Counter[str] = Counter()

    def __iter__(self) -> Iterator[TraceEvent]:
        """In order of registration."""
        return (event for event in self._events.values() if event is not None)

    def find(self, group: str, name: str) -> TraceEvent | None:
        """The event of that name; None for a reserved name too."""
        return self._events.get((group, name))

    def by_id(self, event_id: int) -> TraceEvent | None:
        """The event whose entries have this common_type."""
        return self._by_id.get(event_id)

    def has_group(self, group: str) -> bool:
        """Whether the group has an event."""
        return group in self._groups

    def reserve(self, group: str, name: str) -> None:
        """Take a name for an event that isn't ours to print."""
        self._events[group, name] = None

    def add(self, event: TraceEvent) -> None:
        """Give the event its id; ids run on, and are used again only when there are no new ones.

        Raises: KernelError EEXIST (name in use), ENODEV (no id left).
        Mirrors: kernel/trace/trace_output.c:register_trace_event (v6.1).
        """
        if (event.group, event.name) in self._events:
            raise KernelError(errno.EEXIST, f"{event.group}/{event.name} exists")
        event.id = self._take_id()
        self._events[event.group, event.name] = event
        self._by_id[event.id] = event
        self._groups[event.group] += 1

    def remove(self, event: TraceEvent) -> None:
        """Forget a registered event."""
        del self._events[event.group, event.name]
        del self._by_id[event.id]
        self._groups[event.group] -= 1
        if not self._groups[event.group]:
            del self._groups[event.group]

    def _take_id(self) -> int:
        if self._next_id <= LAST_EVENT_ID:
            self._next_id += 1
            return self._next_id - 1
        for event_id in range(self._first_id, LAST_EVENT_ID + 1):
            if event_id not in self._by_id:
                return event_id
        raise KernelError(errno.ENODEV, "all event ids are in use")
