"""Event triggers: the triggers of each event, the commands that create them, and the trigger files."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.events.event import EventFile, TraceEvent
from emulated_kernel.trace.events.event_filters import log_filter_error
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.events.trigger import Trigger
from emulated_kernel.trace.filter.filter_errors import FilterParseError
from emulated_kernel.trace.filter.parse import parse_event_filter
from emulated_kernel.trace.filter.predicates import EventFilter
from emulated_kernel.trace.filter.words import NO_WORDS, FilterWords
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.chars import SPACES, decode_command, split_at, to_text
from emulated_kernel.trace.text.error_log import ErrorLog
from emulated_kernel.trace.text.numbers import is_digit, kstrtoul
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError

UNLIMITED = -1
"""Count of a trigger that may fire without a limit."""
_LONG_BITS = 64


def trigger_line(trigger: Trigger) -> str:
    """Return the line that shows a trigger, with its newline."""
    return to_text(f"{trigger.show()}\n")


class TriggerCommand(ABC):
    """A kind of command that clients write to trigger files. The text of a command begins with `name`.

    Mirrors: kernel/trace/trace.h:struct event_command (v6.1).
    """

    name: str
    """Name of the command, as a user writes it."""

    @abstractmethod
    def execute(
        self, triggers: EventTriggers, file: EventFile, rest: str | None, /, *, removes: bool
    ) -> None:
        """Add a trigger to the event `file`, or remove it if `removes` is True.

        `rest`: the text after the command's name and a colon or blank, or None if nothing follows.
        Raises: KernelError (the command is refused).
        """

    def remove_all(self, file: EventFile, /) -> None:  # noqa: B027 - most commands keep their triggers
        """Remove those triggers of this command that opening a trigger file with O_TRUNC removes.

        By default, no trigger is removed.
        """


class EventTriggers:
    """The triggers of all events, in one trace array.

    The caller holds the control lock; Linux holds event_mutex.
    Mirrors: kernel/trace/trace_events_trigger.c (v6.1).
    """

    def __init__(
        self,
        array: TraceArray,
        registry: EventRegistry,
        error_log: ErrorLog,
        symbols: KernelSymbols,
        commands: Sequence[TriggerCommand],
        words: FilterWords = NO_WORDS,
    ) -> None:
        self.words = words
        """Features of event filters that this kernel has and Linux 6.1 lacks, and filters' memory budget."""
        self.array = array
        self.registry = registry
        self.error_log = error_log
        self.symbols = symbols
        self._commands = {command.name: command for command in commands}

    def file(self, event: TraceEvent) -> EventFile:
        """Return the state of an event in this trace array."""
        return event.file(self.array)

    def find_file(self, group: str, name: str) -> EventFile | None:
        """Return the state of the event `name` of `group` in this trace array, or None if it is missing."""
        event = self.registry.find(group, name)
        return None if event is None else self.file(event)

    def find_switchable(self, group: str, name: str) -> EventFile | None:
        """Return the state of the event `name` of `group`; None if the event is missing or cannot be enabled.

        Mirrors: kernel/trace/trace_events.c:find_event_file (v6.1).
        """
        file = self.find_file(group, name)
        return file if file is not None and file.event.is_switchable else None

    def records(self, event: TraceEvent, start: int = 0) -> Iterator[str]:
        """Yield the lines of an event's trigger file, from the line with index `start` on.

        Internal triggers (see Trigger.is_hidden) are not listed. If no trigger is listed, a comment lists the
        commands.
        """
        shown = self.visible(event)
        if not shown and not start:
            names = "".join(f" {name}" for name in self._commands)
            yield f"# Available triggers:\n#{names}\n"
        yield from map(trigger_line, shown[start:])

    def visible(self, event: TraceEvent) -> list[Trigger]:
        """Return an event's triggers that its trigger file shows: all but internal ones.

        Internal triggers: see Trigger.is_hidden.
        """
        return [trigger for trigger in self.file(event).triggers if not trigger.is_hidden]

    def write(self, event: TraceEvent, data: bytes) -> int:
        """Execute one write to an event's trigger file, and return the number of bytes of `data`.

        Raises: KernelError EINVAL (`data` fills a page or more, or no such command), errors of the command.
        """
        if len(data) >= PAGE_SIZE:
            raise KernelError(errno.EINVAL, f"trigger: {len(data)} bytes; write less than {PAGE_SIZE}")
        if data:
            self.execute(event, decode_command(data.partition(b"\0")[0]).strip(SPACES))
        return len(data)

    def execute(self, event: TraceEvent, text: str) -> None:
        """Execute a command `[!]NAME[:| ]...` on an event. `text` has no blanks around it.

        Mirrors: kernel/trace/trace_events_trigger.c:trigger_process_regex (v6.1).
        """
        word, rest = split_at(text, ": \t")
        name = word.removeprefix("!")
        if name not in self._commands:
            raise KernelError(errno.EINVAL, f"{name!r}: no such trigger; reading the file lists the commands")
        rest = (rest or "").lstrip(SPACES) or None
        self._commands[name].execute(self, self.file(event), rest, removes=word.startswith("!"))

    def truncate(self, event: TraceEvent) -> None:
        """Remove an event's histograms and triggers that switch histograms, as opening with O_TRUNC does."""
        for command in reversed(self._commands.values()):
            command.remove_all(self.file(event))

    def clear(self) -> None:
        """Remove all triggers of this trace array.

        Mirrors: kernel/trace/trace_events_trigger.c:clear_event_triggers (v6.1).
        """
        for event in self.registry:
            file = event.files.get(self.array)
            for trigger in tuple(file.triggers) if file else ():
                self.file(event).remove(trigger)


def separate_filter(rest: str | None, required: bool) -> tuple[str | None, str | None]:
    """Split `[PARAM] [if FILTER]`, and return PARAM and `if FILTER`.

    An item is None if that part is missing. If `required` is True, `rest` begins with PARAM. Otherwise PARAM
    is optional, and begins with a digit.
    Mirrors: kernel/trace/trace_events_trigger.c:event_trigger_separate_filter (v6.1).
    """
    if rest is None:
        return None, None
    if not required and not is_digit(rest):
        return None, rest
    param, after = split_at(rest)
    return param, (after or "").lstrip(SPACES) or None


def parse_count(param: str | None) -> int:
    """Parse the count of a trigger; return UNLIMITED if `param` is None.

    A colon in `param` and the text after it are ignored. As in Linux, the count is a signed long, so very
    large numbers become negative.
    Raises: KernelError EINVAL (not a number), ERANGE (too large).
    Mirrors: kernel/trace/trace_events_trigger.c:event_trigger_parse_num (v6.1).
    """
    if param is None:
        return UNLIMITED
    count = kstrtoul(param.partition(":")[0], 0, _LONG_BITS)
    # Linux: the counter is a long, so the highest number counts as unlimited.
    return count - (1 << _LONG_BITS) if count >> _LONG_BITS - 1 else count


def parse_trigger_filter(event: TraceEvent, text: str | None, triggers: EventTriggers) -> EventFilter | None:
    """Compile `if FILTER`, and return the filter; return None if `text` is None.

    In Linux up to 6.1, errors in the filter are not added to error_log.
    Raises: KernelError EINVAL (`text` has no `if`, or nothing after it), errors of parse_filter().
    Mirrors: kernel/trace/trace_events_trigger.c:set_trigger_filter (v6.1).
    """
    if text is None:
        return None
    word, expression = split_at(text)
    if word != "if":
        raise KernelError(errno.EINVAL, f"{word!r}: a filter must start with 'if'")
    if expression is None:
        raise KernelError(errno.EINVAL, "trigger: the filter after `if` is empty")
    try:
        return parse_event_filter(expression, event.fields, triggers.words)
    except FilterParseError as failure:
        if InterfaceRule.TRIGGER_FILTER_LOGGED in triggers.words.interface:
            log_filter_error(triggers.error_log, expression, failure)
        raise
