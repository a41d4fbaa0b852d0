"""SyntheticEvents: creates, shows and removes synthetic events for synthetic_events and dynamic_events."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from itertools import islice

from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.probes.dynamic_events import DynEvent, EventCommands, EventKind
from emulated_kernel.trace.synth.fields import SyntheticField, make_field
from emulated_kernel.trace.synth.synth_event import FIELDS_MAX, SYSTEM, SyntheticEvent
from emulated_kernel.trace.text.chars import SPACES, argv_split, is_good_name, split_at, to_text
from emulated_kernel.trace.text.error_log import CommandError, LastCommandLog
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import Charge

_LOCATION = "synthetic_events"


class SynthError(CommandError):
    """Errors in commands for synthetic events.

    Mirrors: kernel/trace/trace_events_synth.c:ERRORS (v6.1).
    """

    BAD_NAME = "Illegal name"
    INVALID_CMD = "Command must be of the form: <name> field[;field] ..."
    INVALID_DYN_CMD = "Command must be of the form: s or -:[synthetic/]<name> field[;field] ..."
    EVENT_EXISTS = "Event already exists"
    TOO_MANY_FIELDS = "Too many fields"
    INCOMPLETE_TYPE = "Incomplete type"
    INVALID_TYPE = "Invalid type"
    INVALID_FIELD = "Invalid field"
    INVALID_ARRAY_SPEC = "Invalid array specification"


class _Entry(DynEvent):
    """A synthetic event in the list of dynamic events."""

    def __init__(self, event: SyntheticEvent, owner: SyntheticEvents, charge: Charge) -> None:
        self.event = event
        self.charge = charge
        """Charge to the memory limit of the user who created the event, while this object exists."""
        self._owner = owner

    @property
    def name(self) -> str:
        return to_text(self.event.name)

    def line(self) -> str:
        """Return the event's line in synthetic_events."""
        fields = "; ".join(field.declaration for field in self.event.synthetic_fields)
        return f"{self.name}\t{to_text(fields)}\n"

    def show(self) -> str:
        return f"s:{SYSTEM}/{self.line()}"

    def is_busy(self) -> bool:
        return self.event.hist_references != 0

    def matches(self, group: str | None, event: str, words: Sequence[str]) -> bool:
        """Return True if this event is the one that a command names by `group` and `event` for removal.

        `group` is None if the command names no group. As in Linux, the words after the name are ignored.
        """
        del words
        return self.event.name == event and group in (None, SYSTEM)

    def release(self) -> None:
        """Remove the event; see SyntheticEvents.remove().

        Raises: KernelError EBUSY (the event is in use).
        """
        self._owner.remove(self)


class SyntheticEvents(EventKind[_Entry]):
    """All synthetic events of a kernel. Mirrors: kernel/trace/trace_events_synth.c (v6.1)."""

    def __init__(self, commands: EventCommands, word_size: int) -> None:
        super().__init__(commands)
        self._word_size = word_size

    def find(self, name: str) -> SyntheticEvent | None:
        """Return the synthetic event called `name`, or None if there is no such event.

        Mirrors: kernel/trace/trace_events_synth.c:find_synth_event (v6.1).
        """
        entry = self._find(name)
        return None if entry is None else entry.event

    def _find(self, name: str) -> _Entry | None:
        named = self._listed.named(name) if name else ()
        return next((entry for entry in named if isinstance(entry, _Entry)), None)

    def records(self, start: int = 0) -> Iterator[str]:
        """Return the lines of synthetic_events from line `start` on, counted from 0."""
        return (entry.line() for entry in islice(self._own, start, None))

    def remove(self, entry: _Entry) -> None:
        """Remove a synthetic event.

        Raises: KernelError EBUSY (the event is enabled, or in use by a histogram or other user).
        Mirrors: kernel/trace/trace_events_synth.c:synth_event_release (v6.1).
        """
        event = entry.event
        if event.hist_references or event.references or event.is_enabled:
            raise KernelError(
                errno.EBUSY, f"{event.name}: the event is in use; disable it and its histograms"
            )
        self._unlist(entry)
        event.is_gone = True
        self._forget(event)

    # Commands

    def _execute(self, command: str) -> None:
        """Execute a command: `NAME FIELD[;FIELD]...` creates an event, and `!NAME ...` removes it.

        Raises: KernelError ENOENT (no event to remove), and the errors of create() and remove().
        Mirrors: kernel/trace/trace_events_synth.c:create_or_delete_synth_event (v6.1).
        """
        command = command.lstrip(SPACES)
        if not command:
            return
        if not command.startswith("!"):
            self._create(command, LastCommandLog(self.error_log, _LOCATION, command))
            return
        name = _split_name(command)[0][1:]
        entry = self._find(name)
        if entry is None:
            raise KernelError(errno.ENOENT, f"{name!r}: no such synthetic event; see synthetic_events")
        self.remove(entry)

    def create(self, command: str) -> bool:
        """Create an event from `s:[synthetic/]NAME FIELD[;FIELD]...`.

        Return False if the command is for another kind of event, else True.
        Raises: KernelError EINVAL (invalid command), EEXIST (the name is used), ENOSPC or ENOMEM (a limit is
        reached).
        Mirrors: kernel/trace/trace_events_synth.c:create_synth_event (v6.1).
        """
        command = command.lstrip(SPACES)
        if not command:
            return True
        if not command.startswith("s:"):
            return False
        log = LastCommandLog(self.error_log, _LOCATION, command)
        rest = command[2:]
        if _split_name(command)[1] is None:
            raise log.error(SynthError.INVALID_CMD)
        if "/" in rest:
            if not rest.startswith(f"{SYSTEM}/"):
                raise log.error(SynthError.INVALID_DYN_CMD)
            rest = rest.removeprefix(f"{SYSTEM}/")
        self._create(rest, log)
        return True

    def _create(self, text: str, log: LastCommandLog) -> None:
        """Create an event from `NAME FIELD[;FIELD]...`. A field is `TYPE NAME`; there is at least one.

        Mirrors: kernel/trace/trace_events_synth.c:check_command, __create_synth_event (v6.1).
        """
        name, fields = _split_name(text)
        is_whole = fields is not None and len(argv_split(text.partition(";")[0])) >= 3
        if not name or not (is_whole or text.startswith("!")):
            raise log.error(SynthError.INVALID_CMD)
        if not is_good_name(name):
            raise log.error(SynthError.BAD_NAME, name)
        if self.find(name) is not None:
            raise log.error(SynthError.EVENT_EXISTS, name, errno.EEXIST)
        separator = " " if InterfaceRule.SYNTH_FMT_BLANKS in self.interface else ", "
        event = SyntheticEvent(name, _parse_fields(fields or "", self._word_size, log), separator)
        self._check_capacity()
        entry = _Entry(event, self, self.filter_words.memory.charge_text(text))
        self.registry.add(event)
        self._list(entry)


def _split_name(text: str) -> tuple[str, str | None]:
    """Split `text` at the first blank, and return the text before and after the blanks there.

    The text after them is None if `text` has no blank.
    """
    name, rest = split_at(text)
    return name, None if rest is None else rest.lstrip(SPACES)


def _parse_fields(text: str, word_size: int, log: LastCommandLog) -> list[SyntheticField]:
    """Parse the fields of a command. Semicolons are optional, because a field ends with its name.

    Raises: KernelError EINVAL (an invalid field, no field, or too many fields); error_log shows the error.
    """
    found: list[SyntheticField] = []
    for part in text.split(";"):
        words = argv_split(part)
        while words:
            field, taken = _parse_field(words, word_size, log)
            if len(found) == FIELDS_MAX:
                raise log.error(SynthError.TOO_MANY_FIELDS)
            found.append(field)
            words = words[taken:]
    if not found:
        raise log.error(SynthError.INVALID_CMD)
    return found


def _parse_field(words: Sequence[str], word_size: int, log: LastCommandLog) -> tuple[SyntheticField, int]:
    """Parse the field at the start of `words`. Return the field, and the number of words in its definition.

    Raises: KernelError EINVAL (invalid field); error_log shows the error.
    Mirrors: kernel/trace/trace_events_synth.c:parse_synth_field (v6.1).
    """
    size = 2 if words[0] == "unsigned" else 1
    if len(words) <= size:
        raise log.error(SynthError.INCOMPLETE_TYPE if size == 2 else SynthError.INVALID_FIELD, words[0])
    type_, declared = words[size - 1 : size + 1]
    name, bracket, array = declared.partition("[")
    if not is_good_name(name):
        raise log.error(SynthError.BAD_NAME, declared)
    try:
        field = make_field(f"{' '.join(words[:size])}{bracket}{array}", name, word_size)
    except KernelError:
        if bracket:
            raise log.error(SynthError.INVALID_ARRAY_SPEC, declared) from None
        raise log.error(SynthError.INVALID_TYPE, type_) from None
    if field is None:
        raise log.error(SynthError.INVALID_TYPE, type_)
    return field, size + 1
