"""Dynamic events: the list of those that commands made, and the files' way of taking commands."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.chars import argv_split, decode_command

WRITE_BUFSIZE = 4096


def discard(message: str) -> None:
    """A printk() that nobody reads."""
    del message


def run_commands(data: bytes, execute: Callable[[str], None], printk: Callable[[str], None]) -> int:
    """Execute each line of one write(2), up to the first that fails; returns the bytes taken: all.

    A line and its newline may have 4,095 bytes; a NUL ends what is seen of a line and makes it too long.
    Raises: KernelError EINVAL for a line too long, and what `execute` raises; earlier lines stay done.
    Mirrors: kernel/trace/trace.c:trace_parse_run_command (v6.1).
    """
    done = 0
    while done < len(data):
        chunk = data[done : done + WRITE_BUFSIZE - 1]
        newline, nul = chunk.find(b"\n"), chunk.find(b"\0")
        if newline >= 0 and not 0 <= nul < newline:
            line, size = chunk[:newline], newline + 1
        elif nul < 0 and done + len(chunk) == len(data):
            line, size = chunk, len(chunk)
        else:
            printk(f"Line length is too long: Should be less than {WRITE_BUFSIZE - 2}")
            raise KernelError(errno.EINVAL, "line is too long")
        done += size
        execute(decode_command(line.partition(b"#")[0]))
    return done


class DynEvent(Protocol):
    """A dynamic event, as the list knows it. Mirrors: kernel/trace/trace_dynevent.h (v6.1)."""

    def show(self) -> str:
        """Its line."""

    def is_busy(self) -> bool:
        """Whether it is in use, so that not all events can be removed."""

    def matches(self, group: str | None, event: str, words: Sequence[str]) -> bool:
        """Whether a command to remove an event means this one."""

    def release(self) -> None:
        """Remove it, from the list too. Raises: KernelError EBUSY."""


Create = Callable[[str], bool]
"""Make an event from a command; False where the command isn't for this kind. Raises: KernelError."""


class DynamicEvents:
    """The dynamic_events file: events of all kinds, in order of their making."""

    def __init__(self, printk: Callable[[str], None] = discard) -> None:
        self._printk = printk
        self._creators: list[Create] = []
        self.events: list[DynEvent] = []

    def register_kind(self, create: Create) -> None:
        """A kind of events; they are tried in this order. Mirrors: dyn_event_register (v6.1)."""
        self._creators.append(create)

    def write(self, data: bytes) -> int:
        """Raises: KernelError, as run_commands() says."""
        return run_commands(data, self._execute, self._printk)

    def records(self) -> list[str]:
        """The lines of the file."""
        return [event.show() for event in self.events]

    def show(self) -> str:
        """The file's text."""
        return "".join(self.records())

    def clear(self) -> None:
        """Opening for writing with O_TRUNC. Raises: KernelError EBUSY."""
        self.release_all(self.events)

    def _execute(self, command: str) -> None:
        """Mirrors: kernel/trace/trace_dynevent.c:create_dyn_event (v6.1)."""
        if command[:1] in ("-", "!"):
            self.release_matching(command, self.events)
        elif not any(create(command) for create in self._creators):
            raise KernelError(errno.EINVAL, "no kind of event takes this command")

    @staticmethod
    def release_matching(command: str, events: Sequence[DynEvent]) -> None:
        """Remove those of `events` that `-:[GRP/][EVENT] [PLACE [ARGS]]` means, up to the first that is busy.

        Raises: KernelError EINVAL (nothing named), ENOENT (no such event), EBUSY.
        Mirrors: kernel/trace/trace_dynevent.c:dyn_event_release (v6.1).
        """
        head, *words = argv_split(command)
        group, event = _named(head)
        if group is None and not event:
            raise KernelError(errno.EINVAL, "no event is named")
        found = False
        for each in tuple(events):
            if each.matches(group, event, words):
                each.release()
                found = True
        if not found:
            raise KernelError(errno.ENOENT, "no such event")

    @staticmethod
    def release_all(events: Sequence[DynEvent]) -> None:
        """Remove all of `events`, or none if any is busy.

        Raises: KernelError EBUSY. Mirrors: kernel/trace/trace_dynevent.c:dyn_events_release_all (v6.1).
        """
        if any(event.is_busy() for event in events):
            raise KernelError(errno.EBUSY, "an event is in use")
        for event in tuple(events):
            event.release()


def _named(head: str) -> tuple[str | None, str]:
    """Group, if given, and event of `-:[GRP/][EVENT]` or `!...:[GRP/][EVENT]`."""
    before, colon, name = head.partition(":")
    if not colon or (head[0] == "-" and before != "-"):
        raise KernelError(errno.EINVAL, "a colon and an event are missing")
    group, slash, event = name.partition("/")
    return (group, event) if slash else (None, name)
