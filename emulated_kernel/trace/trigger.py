"""Event triggers: what may hang on an event, the commands that make them, and the trigger files."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import ClassVar, Protocol

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import SPACES, decode_command, to_text
from emulated_kernel.trace.error_log import ErrorLog
from emulated_kernel.trace.event import EventRegistry, TraceEvent
from emulated_kernel.trace.event_file import EventFile
from emulated_kernel.trace.filter_fields import find_event_field
from emulated_kernel.trace.filter_ops import FilterProgram
from emulated_kernel.trace.filter_parse import parse_filter
from emulated_kernel.trace.numbers import is_digit, kstrtoul
from emulated_kernel.trace.ports import ProbeHit, RawEntry, Recorder, TraceSymbols

UNLIMITED = -1
_LONG_BITS = 64
_BLANKS = " \t"


class TriggerKind(Enum):
    """What excludes each other on an event. Mirrors: include/linux/trace_events.h:event_trigger_type."""

    TRACE_ONOFF = auto()
    SNAPSHOT = auto()
    STACKTRACE = auto()
    EVENT_ENABLE = auto()
    EVENT_HIST = auto()
    HIST_ENABLE = auto()
    EVENT_PROBE = auto()


class TraceControl(Protocol):
    """What triggers do to the trace array that they belong to, and ask of it."""

    @property
    def tracing_on(self) -> bool:
        """Whether its buffers take records."""

    def set_tracing_on(self, on: bool, /) -> None:
        """Let its buffers take records, or not."""

    def record_stack(self, hit: ProbeHit, /) -> None:
        """Record the call chain of a hit."""

    def callers(self, hit: ProbeHit, /) -> Sequence[int]:
        """The call chain of a hit: its place, then return addresses, innermost first."""

    @property
    def has_snapshots(self) -> bool:
        """Whether it has a snapshot buffer; without, no trigger takes any."""

    def allocate_snapshot(self) -> None:
        """Make room for snapshots. Raises: KernelError ENOMEM."""

    def take_snapshot(self) -> None:
        """Swap the buffer with the snapshot's."""

    def now(self) -> int:
        """The time in units of its clock."""

    def set_clock(self, name: str, /) -> None:
        """Use another clock. Raises: KernelError EINVAL for an unknown one."""

    @property
    def clock_in_ns(self) -> bool:
        """Whether its clock counts nanoseconds."""


@dataclass(frozen=True)
class TriggerFilter:
    """What follows `if`, as it was written."""

    text: str
    program: FilterProgram


class Trigger(ABC):
    """A trigger on an event. Mirrors: kernel/trace/trace.h:struct event_trigger_data (v6.1)."""

    kind: ClassVar[TriggerKind]
    is_post: ClassVar[bool] = False
    """Runs when the entry is written."""
    wants_entry: ClassVar[bool] = False
    is_hidden: ClassVar[bool] = False
    """Isn't one that a user made through the file."""

    def __init__(self, filter_: TriggerFilter | None = None) -> None:
        self.filter = filter_
        self.paused = False

    @property
    def needs_entry(self) -> bool:
        """Whether it can't run before there is an entry."""
        return self.filter is not None or self.is_post or self.wants_entry

    def accepts(self, entry: RawEntry) -> bool:
        """Whether its filter does."""
        return self.filter is None or self.filter.program.accepts(entry)

    @abstractmethod
    def fire(self, hit: ProbeHit, entry: RawEntry | None) -> None:
        """The event was hit; `entry` is None where it isn't needed or was written already."""

    @abstractmethod
    def show(self) -> str:
        """Its line in the trigger file, without a newline."""

    def released(self) -> None:  # noqa: B027
        """It was taken off its event."""

    def filter_text(self) -> str:
        """As lines of triggers end."""
        return f" if {self.filter.text}" if self.filter else ""


@dataclass(frozen=True)
class TriggerWrite:
    """A written command: `[!]NAME[:| ]rest`, with the rest None where there is none."""

    name: str
    removes: bool
    rest: str | None


class TriggerCommand(Protocol):
    """A name that commands start with. Mirrors: kernel/trace/trace.h:struct event_command (v6.1)."""

    @property
    def name(self) -> str:
        """As written."""

    def execute(self, triggers: EventTriggers, file: EventFile, write: TriggerWrite, /) -> None:
        """Add or remove a trigger. Raises: KernelError."""

    def remove_all(self, triggers: EventTriggers, file: EventFile, /) -> None:
        """What opening the file with O_TRUNC does."""


class EventTriggers:
    """The triggers of a trace array's events. `recorder` stands for the trace array.

    Callers serialize: Linux holds event_mutex. Mirrors: kernel/trace/trace_events_trigger.c (v6.1).
    """

    def __init__(
        self,
        recorder: Recorder,
        control: TraceControl,
        registry: EventRegistry,
        error_log: ErrorLog,
        symbols: TraceSymbols,
        commands: Sequence[TriggerCommand],
    ) -> None:
        self.recorder = recorder
        self.control = control
        self.registry = registry
        self.error_log = error_log
        self.symbols = symbols
        self._commands = tuple(commands)

    def file(self, event: TraceEvent) -> EventFile:
        """The event in this trace array."""
        return event.file(self.recorder)

    def find_file(self, group: str, name: str) -> EventFile | None:
        """The event of that name in this trace array."""
        event = self.registry.find(group, name)
        return None if event is None else self.file(event)

    def find_switchable(self, group: str, name: str) -> EventFile | None:
        """The same, of those that can be enabled. Mirrors: find_event_file (v6.1)."""
        file = self.find_file(group, name)
        return file if file is not None and file.event.is_switchable else None

    def records(self, event: TraceEvent) -> list[str]:
        """Lines of the event's trigger file; hidden triggers show only beside others."""
        shown = self.file(event).triggers
        if all(trigger.is_hidden for trigger in shown):
            names = "".join(f" {command.name}" for command in self._commands)
            return [f"# Available triggers:\n#{names}\n"]
        return [to_text(f"{trigger.show()}\n") for trigger in shown if not trigger.is_hidden]

    def write(self, event: TraceEvent, data: bytes) -> int:
        """Execute one write(2); bytes taken: all.

        Raises: KernelError EINVAL (a page or more, no such command), and what the command raises.
        """
        if len(data) >= PAGE_SIZE:
            raise KernelError(errno.EINVAL, "a trigger is shorter than a page")
        if data:
            self.execute(event, decode_command(data.partition(b"\0")[0]).strip(SPACES))
        return len(data)

    def execute(self, event: TraceEvent, text: str) -> None:
        """Execute a command without blanks around it. Mirrors: trigger_process_regex (v6.1)."""
        end = next((at for at, char in enumerate(text) if char in ": \t"), None)
        name, rest = (text, None) if end is None else (text[:end], text[end + 1 :].lstrip(SPACES) or None)
        write = TriggerWrite(name.removeprefix("!"), name.startswith("!"), rest)
        for command in self._commands:
            if command.name == write.name:
                command.execute(self, self.file(event), write)
                return
        raise KernelError(errno.EINVAL, f"no trigger called {write.name!r}")

    def truncate(self, event: TraceEvent) -> None:
        """Opening the trigger file with O_TRUNC: histograms go, and what switches them."""
        for command in reversed(self._commands):
            command.remove_all(self, self.file(event))

    def clear(self) -> None:
        """Remove all triggers of this trace array. Mirrors: clear_event_triggers (v6.1)."""
        for event in self.registry:
            file = event.files.get(self.recorder)
            for trigger in tuple(file.triggers) if file else ():
                self.file(event).remove(trigger)


def separate_filter(rest: str | None, required: bool) -> tuple[str | None, str | None]:
    """Parameter and filter of `[PARAM] [if FILTER]`; an optional parameter is a number.

    Raises: KernelError EINVAL. Mirrors: event_trigger_separate_filter (v6.1).
    """
    if rest is None:
        if required:
            raise KernelError(errno.EINVAL, "a parameter is missing")
        return None, None
    if not required and not is_digit(rest):
        return None, rest
    param, blank, after = split_blank(rest)
    return param, (after.lstrip(SPACES) or None) if blank else None


def split_blank(text: str) -> tuple[str, str, str]:
    """What stands before the first blank, the blank, and what stands behind it."""
    at = next((at for at, char in enumerate(text) if char in _BLANKS), None)
    return (text, "", "") if at is None else (text[:at], text[at], text[at + 1 :])


def parse_count(param: str | None) -> int:
    """The number of times a trigger fires; what follows another colon is ignored.

    Raises: KernelError EINVAL, ERANGE. Mirrors: event_trigger_parse_num (v6.1).
    """
    if param is None:
        return UNLIMITED
    count = kstrtoul(param.partition(":")[0], 0, _LONG_BITS)
    # Linux: the counter is a long, so the highest number counts as unlimited.
    return count - (1 << _LONG_BITS) if count >> _LONG_BITS - 1 else count


def parse_trigger_filter(event: TraceEvent, text: str | None) -> TriggerFilter | None:
    """Compile `if FILTER`. Linux: error_log tells nothing of what is wrong with it.

    Raises: KernelError EINVAL, and as parse_filter(). Mirrors: set_trigger_filter (v6.1).
    """
    if text is None:
        return None
    word, blank, expression = split_blank(text)
    if word != "if" or not blank:
        raise KernelError(errno.EINVAL, "a filter starts with 'if'")
    return TriggerFilter(expression, parse_filter(expression, partial(find_event_field, event)))
