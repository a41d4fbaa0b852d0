"""Dynamic events: the list of all events created by commands, their kinds, and the execution of commands."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.filter.words import NO_WORDS, FilterWords
from emulated_kernel.trace.interface import LINUX_6_1, Interface
from emulated_kernel.trace.text.chars import argv_split, decode_command, to_text
from emulated_kernel.trace.text.error_log import ErrorLog
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field
from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.util.limits import Limit, Limits

_KIND = lazy_pattern(r"([a-z])\d*[: ]")
"""Pattern for the beginning of a definition; its group is the letter of the kind of event."""
WRITE_BUFSIZE = 4096
"""Size in bytes of Linux's buffer for a line with its newline and NUL."""


def run_commands(data: bytes, execute: Callable[[str], None], printk: Callable[[str], None]) -> int:
    """Call `execute` for each line of one write(2), and return the number of bytes of `data`.

    `execute` gets the line up to a `#`, which begins a comment. A line with its newline has at most 4,095
    bytes. A line with a NUL is refused as too long. `printk` gets the message that a line is too long.
    Raises: KernelError EINVAL (a line is too long), or the error of `execute`. The lines before a line that
    fails keep their effect.
    Mirrors: kernel/trace/trace.c:trace_parse_run_command (v6.1).
    """
    done = 0
    while done < len(data):
        chunk = data[done : done + WRITE_BUFSIZE - 1]
        newline = chunk.find(b"\n")
        nul = chunk.find(b"\0")
        if newline >= 0 and not 0 <= nul < newline:
            line = chunk[:newline]
            size = newline + 1
        elif nul < 0 and done + len(chunk) == len(data):
            line = chunk
            size = len(chunk)
        else:
            printk(f"Line length is too long: Should be less than {WRITE_BUFSIZE - 2}")
            raise KernelError(errno.EINVAL, "line is too long")
        done += size
        execute(decode_command(line.partition(b"#")[0]))
    return done


class DynEvent(ABC):
    """Interface of a dynamic event, which dynamic_events shows as one line.

    Mirrors: kernel/trace/trace_dynevent.h (v6.1).
    """

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the event, as dynamic_events shows it."""

    @abstractmethod
    def show(self) -> str:
        """Return the event's line in dynamic_events, with a newline."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Return True if the event is in use; then release_all() refuses to remove any event."""

    @abstractmethod
    def matches(self, group: str | None, event: str, words: Sequence[str]) -> bool:
        """Return True if a command that removes events matches this event.

        `group` is None, and `event` is "", if the command names none. `words` are the place and the arguments
        in the command; empty if it gives no place.
        """

    @abstractmethod
    def release(self) -> None:
        """Unregister the event, and remove it from the list of dynamic events.

        Raises: KernelError EBUSY (the event is in use).
        """


D = TypeVar("D", bound=DynEvent)


class DynEventList:
    """All dynamic events, in order of creation, with an index by name."""

    def __init__(self) -> None:
        self._all: dict[DynEvent, None] = {}
        self._named: dict[str, DynEvent | dict[DynEvent, None]] = {}
        """Name -> the event with the name; or a dict, once two events have had the name.

        The keys of the dict are the events with the name, oldest first.
        """

    def __iter__(self) -> Iterator[DynEvent]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, entry: DynEvent) -> None:
        """Append a new event to the list."""
        name = entry.name
        self._all[entry] = None
        others = self._named.setdefault(name, entry)
        if isinstance(others, dict):
            others[entry] = None
        elif others is not entry:
            self._named[name] = {others: None, entry: None}

    def remove(self, entry: DynEvent) -> None:
        """Remove an event from the list."""
        del self._all[entry]
        name = entry.name
        others = self._named[name]
        if isinstance(others, dict):
            del others[entry]
            if others:
                return
        del self._named[name]

    def named(self, event: str) -> Iterable[DynEvent]:
        """Return the events called `event`, or all events if `event` is "".

        `event` is the name as written in a command, with one character per byte.
        """
        found = self._named.get(to_text(event), {}) if event else self._all
        return found if isinstance(found, dict) else (found,)


@dataclass(frozen=True, eq=False)
class EventCommands:
    """The objects that the commands of all kinds of dynamic events use."""

    registry: EventRegistry
    error_log: ErrorLog
    printk: Callable[[str], None]
    limits: Limits
    interface: Interface = LINUX_6_1
    filter_words: FilterWords = NO_WORDS
    listed: DynEventList = field(default_factory=DynEventList)


class EventKind(ABC, Generic[D]):
    """A kind of dynamic events: creates them from commands, and shows them in the kind's own file.

    Callers hold the control lock, in the place of Linux's event_mutex.
    Mirrors: kernel/trace/trace_dynevent.h:struct dyn_event_operations (v6.1).
    """

    def __init__(self, commands: EventCommands) -> None:
        self.registry = commands.registry
        self.error_log = commands.error_log
        self.printk = commands.printk
        self.interface = commands.interface
        self.filter_words = commands.filter_words
        self._listed = commands.listed
        self._limits = commands.limits
        self._own: dict[D, None] = {}
        """The dynamic events of this kind, as keys in order of creation."""

    @abstractmethod
    def create(self, command: str) -> bool:
        """Create an event from a command, which has no newline, and return True.

        Return False if the command is for another kind of events. Raises: KernelError (the event cannot be
        created). An error in the command is also written to error_log.
        """

    def write(self, data: bytes) -> int:
        """Execute the commands of one write to the kind's file, and return the number of bytes taken.

        Raises: errors of run_commands().
        """
        return run_commands(data, self._execute, self.printk)

    def _execute(self, command: str) -> None:
        if command.startswith("-"):
            release_matching(command, self._listed, self._own)
        elif not self.create(command):
            reason = "no definition of this file's kind of event; dynamic_events takes all kinds"
            # Linux logs no entry in error_log.
            raise KernelError(errno.EINVAL, f"{command!r}: {reason}")

    def records(self, start: int = 0) -> Iterator[str]:
        """Return the lines of the kind's file, from line `start` on, counted from 0."""
        return (each.show() for each in islice(self._own, start, None))

    def clear(self) -> None:
        """Remove all events of this kind, as opening the kind's file with O_TRUNC does.

        Raises: KernelError EBUSY (an event is in use, so none is removed).
        """
        release_all(list(self._own))

    def _check_capacity(self) -> None:
        """Check that the limit on dynamic events allows one more.

        Raises: KernelError ENOSPC (it does not; also written to the kernel's log).
        """
        try:
            self._limits.check(Limit.PROBES, len(self._listed))
        except KernelError as error:
            self.printk(f"limits: {error.strerror}")
            raise

    def _list(self, entry: D) -> None:
        self._own[entry] = None
        self._listed.add(entry)

    def _unlist(self, entry: D) -> None:
        del self._own[entry]
        self._listed.remove(entry)

    def _forget(self, event: TraceEvent) -> None:
        """Unregister an event without probes, and empty the ring buffers that may contain its entries."""
        self.registry.remove(event)
        for recorder in event.ever_enabled_in:
            recorder.event_removed(event)


class DynamicEvents:
    """The file dynamic_events, which shows the events of all kinds in order of creation."""

    def __init__(self, commands: EventCommands, *kinds: EventKind[Any]) -> None:
        """Create the file. A command that creates an event is offered to `kinds` in the given order."""
        self._printk = commands.printk
        self._events = commands.listed
        self._kinds = kinds

    def write(self, data: bytes) -> int:
        """Execute the commands of one write to the file, and return the number of bytes taken.

        Raises: errors of run_commands().
        """
        return run_commands(data, self._execute, self._printk)

    @property
    def count(self) -> int:
        """Number of dynamic events of all kinds."""
        return len(self._events)

    def records(self) -> list[str]:
        """Return all lines of the file."""
        return [*self.records_from(0)]

    def records_from(self, start: int) -> Iterator[str]:
        """Return the lines of the file from line `start` on, counted from 0."""
        return (event.show() for event in islice(self._events, start, None))

    def clear(self) -> None:
        """Remove all dynamic events, as opening the file with O_TRUNC does.

        Raises: KernelError EBUSY (an event is in use, so none is removed).
        """
        release_all([*self._events])

    def _execute(self, command: str) -> None:
        """Execute a command that creates or removes events.

        Raises: KernelError EINVAL (the command has no known syntax), or the error of the command.
        Mirrors: kernel/trace/trace_dynevent.c:create_dyn_event (v6.1).
        """
        if command[:1] in ("-", "!"):
            release_matching(command, self._events)
        elif not any(kind.create(command) for kind in self._kinds):
            kind = _KIND.match(command)
            unknown = f"{command!r}: no definition of an event"
            reason = f"this kernel has no events of kind {kind[1]}" if kind else unknown
            # Linux logs no entry in error_log.
            raise KernelError(errno.EINVAL, reason)


def release_matching(command: str, listed: DynEventList, own: Container[DynEvent] | None = None) -> None:
    """Remove the events that match `-:[GRP/][EVENT] [PLACE [ARGS]]`, in order of creation.

    If `own` is given, only events in `own` are removed.
    Raises: KernelError EINVAL (no event is named), ENOENT (no such event), EBUSY (an event is in use; the
    events before it are removed).
    Mirrors: kernel/trace/trace_dynevent.c:dyn_event_release (v6.1).
    """
    head, *words = argv_split(command)
    group, event = _named(head)
    if group is None and not event:
        raise KernelError(errno.EINVAL, f"{head!r}: no event is named; write -:GROUP/EVENT")
    found = False
    for each in tuple(listed.named(event)):
        if (own is None or each in own) and each.matches(group, event, words):
            each.release()
            found = True
    if not found:
        raise KernelError(errno.ENOENT, f"{command!r}: no such event")


def release_all(events: Sequence[DynEvent]) -> None:
    """Remove all of `events`, or none of them if one is busy.

    Raises: KernelError EBUSY (an event is busy).
    Mirrors: kernel/trace/trace_dynevent.c:dyn_events_release_all (v6.1).
    """
    if any(event.is_busy() for event in events):
        raise KernelError(errno.EBUSY, "dynamic events: one of them is in use; disable all events first")
    for event in events:
        event.release()


def _named(head: str) -> tuple[str | None, str]:
    """Parse `-:[GRP/][EVENT]` or `!...:[GRP/][EVENT]`, and return the group and the event.

    The group is None if the text has no slash. The event is "" if the text names no event.
    Raises: KernelError EINVAL (the colon is missing, or text precedes it after "-").
    """
    before, colon, name = head.partition(":")
    if not colon or (head[0] == "-" and before != "-"):
        raise KernelError(errno.EINVAL, f"{head!r}: no event is named; write -:GROUP/EVENT")
    group, slash, event = name.partition("/")
    return (group, event) if slash else (None, name)
