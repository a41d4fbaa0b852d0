"""Dynamic events: the list of those that commands made, the kinds of them, and the files' way of commands."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import field
from itertools import islice
from typing import Any, Generic, TypeVar

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.text.chars import argv_split, decode_command, to_text
from emulated_kernel.trace.text.error_log import ErrorLog
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import Limit, Limits

WRITE_BUFSIZE = 4096


def run_commands(data: bytes, execute: Callable[[str], None], printk: Callable[[str], None]) -> int:
    """Execute each line of one write(2), up to the first that fails; returns the bytes taken: all.

    A line and its newline may have 4,095 bytes; a NUL ends what is seen of a line and makes it too long.
    Raises: KernelError EINVAL (a line too long), what `execute` raises. Earlier lines stay done.
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
    """A dynamic event, as the list knows it. Mirrors: kernel/trace/trace_dynevent.h (v6.1)."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """Of its event, as readers see it."""

    @abstractmethod
    def show(self) -> str:
        """Its line."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether it is in use, so that not all events can be removed."""

    @abstractmethod
    def matches(self, group: str | None, event: str, words: Sequence[str]) -> bool:
        """Whether a command to remove an event means this one."""

    @abstractmethod
    def release(self) -> None:
        """Remove it, from the list too. Raises: KernelError EBUSY."""


D = TypeVar("D", bound=DynEvent)


class DynEventList:
    """All dynamic events, in order of their making; a command finds those it names without looking at all."""

    def __init__(self) -> None:
        self._all: dict[DynEvent, None] = {}
        self._named: dict[str, tuple[DynEvent, ...]] = {}

    def __iter__(self) -> Iterator[DynEvent]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, entry: DynEvent) -> None:
        """The newest."""
        name = entry.name
        self._all[entry] = None
        self._named[name] = (*self._named.get(name, ()), entry)

    def remove(self, entry: DynEvent) -> None:
        """It has been released."""
        del self._all[entry]
        if left := tuple(other for other in self._named.pop(entry.name) if other is not entry):
            self._named[entry.name] = left

    def named(self, event: str) -> Iterable[DynEvent]:
        """Those of a name as a command has it; all for an empty one."""
        return self._named.get(to_text(event), ()) if event else self._all


@dataclass(frozen=True, eq=False)
class EventCommands:
    """What the commands of all kinds of dynamic events work on."""

    registry: EventRegistry
    error_log: ErrorLog
    printk: Callable[[str], None]
    limits: Limits
    listed: DynEventList = field(default_factory=DynEventList)


class EventKind(ABC, Generic[D]):
    """One kind of dynamic events: the file of its own, and its share of dynamic_events.

    Callers serialize: Linux holds event_mutex.
    Mirrors: kernel/trace/trace_dynevent.h:struct dyn_event_operations (v6.1).
    """

    def __init__(self, commands: EventCommands) -> None:
        self.registry = commands.registry
        self.error_log = commands.error_log
        self.printk = commands.printk
        self._listed = commands.listed
        self._limits = commands.limits
        self._own: dict[D, None] = {}
        """Those of them that stand on the list of dynamic events, in its order."""

    @abstractmethod
    def create(self, command: str) -> bool:
        """Make one from a command without its newline; False where the command isn't for this kind.

        Raises: KernelError (a cause within the command stands in error_log).
        """

    def write(self, data: bytes) -> int:
        """One write(2) to the kind's file; bytes taken: all. Raises: KernelError, as run_commands() says."""
        return run_commands(data, self._execute, self.printk)

    def _execute(self, command: str) -> None:
        if command.startswith("-"):
            release_matching(command, self._listed, self._own)
        elif not self.create(command):
            raise KernelError(errno.EINVAL, "a command for another kind of events")

    def records(self, start: int = 0) -> Iterator[str]:
        """The lines of the kind's file, from one on."""
        return (each.show() for each in islice(self._own, start, None))

    def clear(self) -> None:
        """Remove all, as opening with O_TRUNC does. Raises: KernelError EBUSY."""
        release_all(list(self._own))

    def _check_room(self) -> None:
        """Raises: KernelError ENOSPC (logged, where no more dynamic events may be made)."""
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
        """Take an event whose last probe is gone out of the registry and out of its recorders."""
        self.registry.remove(event)
        for recorder in event.seen_by:
            recorder.event_removed(event)


class DynamicEvents:
    """The dynamic_events file: events of all kinds, in order of their making."""

    def __init__(self, commands: EventCommands, *kinds: EventKind[Any]) -> None:
        """The kinds are tried in this order."""
        self._printk = commands.printk
        self._events = commands.listed
        self._kinds = kinds

    def write(self, data: bytes) -> int:
        """Raises: KernelError, as run_commands() says."""
        return run_commands(data, self._execute, self._printk)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._events)

    def records(self) -> list[str]:
        """The lines of the file."""
        return [event.show() for event in self._events]

    def clear(self) -> None:
        """Opening for writing with O_TRUNC. Raises: KernelError EBUSY."""
        release_all([*self._events])

    def _execute(self, command: str) -> None:
        """Mirrors: kernel/trace/trace_dynevent.c:create_dyn_event (v6.1)."""
        if command[:1] in ("-", "!"):
            release_matching(command, self._events)
        elif not any(kind.create(command) for kind in self._kinds):
            raise KernelError(errno.EINVAL, "no kind of event takes this command")


def release_matching(command: str, listed: DynEventList, own: Container[DynEvent] | None = None) -> None:
    """Remove what `-:[GRP/][EVENT] [PLACE [ARGS]]` means, of `own` if given, up to the first that is busy.

    Raises: KernelError EINVAL (nothing named), ENOENT (no such event), EBUSY.
    Mirrors: kernel/trace/trace_dynevent.c:dyn_event_release (v6.1).
    """
    head, *words = argv_split(command)
    group, event = _named(head)
    if group is None and not event:
        raise KernelError(errno.EINVAL, "no event is named")
    found = False
    for each in tuple(listed.named(event)):
        if (own is None or each in own) and each.matches(group, event, words):
            each.release()
            found = True
    if not found:
        raise KernelError(errno.ENOENT, "no such event")


def release_all(events: Sequence[DynEvent]) -> None:
    """Remove all of `events`, or none if any is busy.

    Raises: KernelError EBUSY. Mirrors: kernel/trace/trace_dynevent.c:dyn_events_release_all (v6.1).
    """
    if any(event.is_busy() for event in events):
        raise KernelError(errno.EBUSY, "an event is in use")
    for event in events:
        event.release()


def _named(head: str) -> tuple[str | None, str]:
    """Group, if given, and event of `-:[GRP/][EVENT]` or `!...:[GRP/][EVENT]`."""
    before, colon, name = head.partition(":")
    if not colon or (head[0] == "-" and before != "-"):
        raise KernelError(errno.EINVAL, "a colon and an event are missing")
    group, slash, event = name.partition("/")
    return (group, event) if slash else (None, name)
