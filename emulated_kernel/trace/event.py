"""Trace events: what they are called, how their entries are laid out, and how one is printed."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, TypeVar

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import bytes_to_text
from emulated_kernel.trace.event_file import EventFile
from emulated_kernel.trace.fetch import COMMON_SIZE
from emulated_kernel.trace.fetchargs import ProbeArg
from emulated_kernel.trace.ports import ProbeHit, Recorder, TraceSymbols
from emulated_kernel.trace.symbols import print_ip, sprint_symbol

if TYPE_CHECKING:
    from emulated_kernel.trace.filter import EventFilter
    from emulated_kernel.trace.trace_kprobe import TraceKprobe

FIRST_EVENT_ID = 21
"""Lower ids are tracing's own entries. Mirrors: kernel/trace/trace.h:__TRACE_LAST_TYPE (v6.1)."""
LAST_EVENT_ID = 0xFFFF


@dataclass(frozen=True, slots=True)
class EventField:
    """A field of an entry; offset and size in bytes, the offset from the entry's start."""

    type: str
    name: str
    offset: int
    size: int
    is_signed: bool
    length: int = 0
    """Elements of an array of a static event; a probe's fields don't tell."""

    def format_line(self) -> str:
        """Mirrors: kernel/trace/trace_events.c:f_show (v6.1)."""
        declaration = f"{self.type} {self.name}"
        base, bracket, _ = self.type.partition("[")
        if bracket and not self.type.startswith("__data_loc"):
            declaration = f"{base} {self.name}[{self.length or ''}]"
        rest = f"offset:{self.offset};\tsize:{self.size};\tsigned:{int(self.is_signed)}"
        return f"\tfield:{declaration};\t{rest};\n"


COMMON_FIELDS = (
    EventField("unsigned short", "common_type", 0, 2, False),
    EventField("unsigned char", "common_flags", 2, 1, False),
    EventField("unsigned char", "common_preempt_count", 3, 1, False),
    EventField("int", "common_pid", 4, 4, True),
)


_V = TypeVar("_V")
_NONE: Mapping[Any, Any] = {}
"""The filters and the files of an event that has none."""


class TraceEvent(ABC):
    """An event: `id` stands in its entries as common_type, 0 before it is registered.

    There may be thousands that nobody has enabled. So their collections are never changed but replaced, and
    the empty ones are shared by all.
    """

    __slots__ = (
        "_fields",
        "_print_fmt",
        "files",
        "filters",
        "group",
        "id",
        "name",
        "on_change",
        "recorders",
        "references",
        "seen_by",
    )

    is_switchable = True
    """Whether it can be enabled; others are there for their format alone."""

    def __init__(self, group: str, name: str, fields: Iterable[EventField] = (), print_fmt: str = "") -> None:
        self.group = group
        self.name = name
        self.id = 0
        self._fields = tuple(fields)
        self._print_fmt = print_fmt
        self.references = 0
        """Users such as hist triggers and event probes; while there are any, it can't be removed."""
        self.filters: Mapping[Recorder, EventFilter] = _NONE
        """Of each trace array that has one for this event."""
        self.recorders: tuple[Recorder, ...] = ()
        """Those that have it enabled."""
        self.seen_by: tuple[Recorder, ...] = ()
        """Those that ever had it enabled, and may hold entries of it."""
        self.files: Mapping[Recorder, EventFile] = _NONE
        """Triggers and soft mode, of each trace array where there ever were any."""
        self.on_change: tuple[Callable[[TraceEvent], None], ...] = ()
        """Called when what is done at its hits differs: recorders, filters, triggers; see changed()."""

    @property
    def fields(self) -> tuple[EventField, ...]:
        """Those of its own, in the order of `format`."""
        return self._fields

    @property
    def print_fmt(self) -> str:
        """As in the `format` file."""
        return self._print_fmt

    def changed(self) -> None:
        """What is done at its hits differs from now on.

        To be called after each such change, also when a recorder's target() has changed.
        """
        for listener in self.on_change:
            listener(self)

    @property
    def needs_entry(self) -> bool:
        """Whether a hit is more than a record where the filter accepts it: triggers, or soft mode."""
        return any(file.is_special for file in self.files.values())

    def file(self, recorder: Recorder) -> EventFile:
        """The event in that trace array: its triggers and soft mode."""
        found = self.files.get(recorder)
        if found is None:
            found = EventFile(self, recorder)
            self.files = {**self.files, recorder: found}
        return found

    def set_filter(self, recorder: Recorder, event_filter: EventFilter | None) -> None:
        """Let only what the filter accepts be recorded in `recorder`; all with None."""
        if event_filter is not None:
            self.filters = {**self.filters, recorder: event_filter}
        elif recorder in self.filters:
            self.filters = _without(recorder, self.filters)
        else:
            return
        self.changed()

    def forget(self, recorder: Recorder) -> None:
        """The trace array goes, and doesn't have the event enabled."""
        self.filters = _without(recorder, self.filters)
        self.files = _without(recorder, self.files)
        self.seen_by = _others(recorder, self.seen_by)

    @property
    def is_enabled(self) -> bool:
        """Whether any recorder has it enabled."""
        return bool(self.recorders)

    @property
    def is_removed(self) -> bool:
        """Whether it was deleted, though open files may still show it."""
        return False

    def enable(self, recorder: Recorder) -> None:
        """Record its hits in `recorder`; the first one starts the event.

        Raises: KernelError ENODEV (the event was removed), and what start() raises.
        """
        self.check_alive()
        if recorder in self.recorders:
            return
        self.recorders += (recorder,)
        if len(self.recorders) == 1:
            try:
                self.start()
            except KernelError:
                self.recorders = ()
                raise
        self.changed()
        if recorder not in self.seen_by:
            self.seen_by += (recorder,)

    def disable(self, recorder: Recorder) -> None:
        """Stop recording in `recorder`; the last one stops the event. Raises: KernelError ENODEV."""
        self.check_alive()
        if recorder not in self.recorders:
            return
        self.recorders = _others(recorder, self.recorders)
        self.changed()
        if not self.recorders:
            self.stop()

    def check_alive(self) -> None:
        """Raises: KernelError ENODEV if the event was removed."""
        if self.is_removed:
            raise KernelError(errno.ENODEV, f"{self.group}/{self.name} was removed")

    @abstractmethod
    def start(self) -> None:
        """Let hits come: the first recorder has enabled the event. Raises: KernelError."""

    @abstractmethod
    def stop(self) -> None:
        """Let no more hits come: the last recorder has disabled the event."""

    def record(self, payload: bytes, hit: ProbeHit) -> None:
        """A hit: run the triggers, and write its entry wherever no filter rejects it.

        `payload` is what follows the common fields. Every kind of event has its hits go through here.
        """
        for recorder in self.recorders:
            file = self.files.get(recorder)
            if file is not None and file.is_special:
                file.fire(payload, hit)
            elif self.passes_filter(recorder, payload, hit):
                recorder.record(self, payload, hit)

    def other_task(self, payload: bytes) -> int | None:  # noqa: ARG002
        """The pid of a second task that a hit is about, for lists of pids; None for most events."""
        return None

    def passes_filter(self, recorder: Recorder, payload: bytes, hit: ProbeHit) -> bool:
        """Whether the filter in that trace array lets the hit be recorded."""
        event_filter = self.filters.get(recorder)
        if event_filter is None or event_filter.program is None:
            return True
        return event_filter.program.accepts(recorder.entry(self, payload, hit))

    def format_text(self) -> str:
        """The `format` file. Mirrors: kernel/trace/trace_events.c:f_show (v6.1)."""
        common = "".join(field.format_line() for field in COMMON_FIELDS)
        own = "".join(field.format_line() for field in self.fields)
        return f"name: {self.name}\nID: {self.id}\nformat:\n{common}\n{own}\nprint fmt: {self.print_fmt}\n"

    @abstractmethod
    def print_record(self, payload: bytes, symbols: TraceSymbols, *, sym_addr: bool = False) -> str:
        """What `trace` shows after `name: `; `payload` is the entry behind its 8 common bytes."""

    def print_line(self, payload: bytes, symbols: TraceSymbols, *, sym_addr: bool = False) -> str:
        """What `trace` shows behind the time."""
        return f"{self.name}: {self.print_record(payload, symbols, sym_addr=sym_addr)}"


def _without(recorder: Recorder, owned: Mapping[Recorder, _V]) -> Mapping[Recorder, _V]:
    return {each: value for each, value in owned.items() if each is not recorder} or _NONE


def _others(recorder: Recorder, recorders: tuple[Recorder, ...]) -> tuple[Recorder, ...]:
    return tuple(each for each in recorders if each is not recorder)


class KprobeTraceEvent(TraceEvent):
    """The event of one or more kprobes, which all have the same arguments.

    Mirrors: kernel/trace/trace_probe.h:struct trace_probe_event (v6.1).
    """

    __slots__ = ("args", "is_return", "probes", "word_size")

    def __init__(
        self, group: str, name: str, is_return: bool, args: tuple[ProbeArg, ...], word_size: int
    ) -> None:
        super().__init__(group, name)
        self.is_return = is_return
        self.args = args
        self.word_size = word_size
        self.probes: tuple[TraceKprobe, ...] = ()

    # Made when they are asked for, which few events' are.

    @property
    def fields(self) -> tuple[EventField, ...]:
        return tuple(probe_fields(address_names(self.is_return), self.args, self.word_size))

    @property
    def print_fmt(self) -> str:
        return probe_fmt(address_names(self.is_return), self.args)

    @property
    def is_removed(self) -> bool:
        return not self.probes

    def start(self) -> None:
        """Arm all its probes or none; those whose place is gone or pending are left out.

        Linux: succeeds while all kprobes are disarmed.
        Raises: KernelError of the backend. Mirrors: kernel/trace/trace_kprobe.c:enable_trace_kprobe (v6.1).
        """
        done: list[TraceKprobe] = []
        try:
            for probe in self.probes:
                probe.enable()
                done.append(probe)
        except KernelError:
            for probe in done:
                probe.disable()
            raise

    def stop(self) -> None:
        """Disarm its probes. Mirrors: kernel/trace/trace_kprobe.c:disable_trace_kprobe (v6.1)."""
        for probe in self.probes:
            probe.disable()

    def changed(self) -> None:
        super().changed()
        for probe in self.probes:
            probe.handler_changed()

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
        return f"({text}){args_text(self.args, payload, self.header_size, symbols)}"


def args_text(args: Sequence[ProbeArg], payload: bytes, start: int, symbols: TraceSymbols) -> str:
    """Arguments as `trace` shows them, a blank before each; they begin at `start` of the payload.

    Mirrors: kernel/trace/trace_probe_tmpl.h:trace_probe_print_args (v6.1).
    """
    return "".join(f" {arg.name}={_arg_text(arg, payload, start, symbols)}" for arg in args)


def _arg_text(arg: ProbeArg, payload: bytes, start: int, symbols: TraceSymbols) -> str:
    at = start + arg.offset
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


def address_names(is_return: bool) -> Sequence[str]:
    """The fields that a probe's event begins with."""
    return ("__probe_func", "__probe_ret_ip") if is_return else ("__probe_ip",)


def probe_fields(names: Sequence[str], args: Sequence[ProbeArg], word_size: int) -> Iterator[EventField]:
    """Fields of a probe's event: `names` are addresses, which come first.

    Mirrors: kernel/trace/trace_kprobe.c:kprobe_event_define_fields (v6.1).
    """
    offset = COMMON_SIZE
    for name in names:
        yield EventField("unsigned long", name, offset, word_size, False)
        offset += word_size
    for arg in args:
        yield EventField(arg.field_type, arg.name, offset + arg.offset, arg.size, arg.type.is_signed)


def probe_fmt(names: Sequence[str], args: Sequence[ProbeArg]) -> str:
    """Mirrors: kernel/trace/trace_probe.c:__set_print_fmt (v6.1)."""
    formats = " <- ".join("%lx" for _ in names)
    text, values = args_fmt(args)
    return f'"({formats}){text}", {", ".join([f"REC->{name}" for name in names] + values)}'


def args_fmt(args: Sequence[ProbeArg]) -> tuple[str, list[str]]:
    """The arguments' part of a print format, and the values that it takes."""
    text = "".join(f" {arg.name}={_arg_fmt(arg)}" for arg in args)
    return text, [value for arg in args for value in _arg_values(arg)]


def _arg_fmt(arg: ProbeArg) -> str:
    one = arg.type.print_fmt
    return "{" + ",".join([one] * arg.count) + "}" if arg.count else one


def _arg_values(arg: ProbeArg) -> list[str]:
    elements = [f"{arg.name}[{number}]" for number in range(arg.count)] or [arg.name]
    return [f"__get_str({each})" if arg.type.is_string else f"REC->{each}" for each in elements]


class EventRegistry:
    """All trace events of a kernel, by name and by id."""

    def __init__(self, first_id: int = FIRST_EVENT_ID) -> None:
        self._next_id = first_id
        self._events: dict[tuple[str, str], TraceEvent | None] = {}
        self._by_id: dict[int, TraceEvent] = {}
        self._free_ids: list[int] = []
        """A heap of those that were given back."""
        self._groups: dict[str, dict[str, TraceEvent]] = {}
        self.on_added: Callable[[TraceEvent], None] = lambda _event: None
        """Told of each event that was registered."""
        self.on_removed: Callable[[TraceEvent], None] = lambda _event: None
        """Told of each event that is registered no more."""

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

    def groups(self) -> Collection[str]:
        """Names of the groups that have events."""
        return self._groups.keys()

    def in_group(self, group: str) -> Mapping[str, TraceEvent]:
        """The events of a group by name, in order of registration."""
        return self._groups.get(group, {})

    def newest_first(self) -> Iterator[TraceEvent]:
        """In the order that Linux lists events in."""
        return (event for event in reversed(self._events.values()) if event is not None)

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
        self._by_id[event.id] = event
        self.add_own(event)

    def add_own(self, event: TraceEvent) -> None:
        """Name an event of tracing's own entries, which has its id and is printed without its help."""
        self._events[event.group, event.name] = event
        self._groups.setdefault(event.group, {})[event.name] = event
        self.on_added(event)

    def remove(self, event: TraceEvent) -> None:
        """Forget a registered event."""
        del self._events[event.group, event.name]
        del self._by_id[event.id]
        heappush(self._free_ids, event.id)
        group = self._groups[event.group]
        del group[event.name]
        if not group:
            del self._groups[event.group]
        self.on_removed(event)

    def _take_id(self) -> int:
        if self._next_id <= LAST_EVENT_ID:
            self._next_id += 1
            return self._next_id - 1
        if not self._free_ids:
            raise KernelError(errno.ENODEV, "all event ids are in use")
        return heappop(self._free_ids)
