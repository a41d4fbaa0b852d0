"""ArrayEvents: enable and disable the events of one trace array, singly, by group, and through set_event."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress

from emulated_kernel.trace.events.event import Recorder, TraceEvent
from emulated_kernel.trace.events.event_pids import PidList
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.text.get_user import take_word
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

_ANY = ("", "*")
_MODULE = ":mod:"


@dataclass(frozen=True)
class _Wanted:
    """The events that a word of set_event names. A field that is None matches any name."""

    match: str | None
    """Name of a group or of events; None if the word has the form GROUP:EVENT or names a whole module."""
    group: str | None
    name: str | None
    module: str | None

    def means(self, event: TraceEvent) -> bool:
        """Return True if the word names the event `event`."""
        if self.module is not None and event.module != self.module.replace("-", "_"):
            return False
        return (
            self.match in (None, event.group, event.name)
            and self.group in (None, event.group)
            and self.name in (None, event.name)
        )

    def covers(self, other: _Wanted) -> bool:
        """Return True if this word names each event that `other` names, and both have the same module."""
        pairs = ((self.match, other.match), (self.group, other.group), (self.name, other.name))
        return self.module == other.module and all(mine in (None, theirs) for mine, theirs in pairs)

    def text(self) -> str:
        """Return the line of set_event that shows the word, while the word's module is not loaded."""
        names = self.match or f"{self.group or '*'}:{self.name or '*'}"
        return f"{names}{_MODULE}{self.module}\n"


def _wanted(word: str, *, takes_module: bool) -> _Wanted:
    """Parse a word of set_event: `GROUP:EVENT` or a name; with `takes_module`, `:mod:MODULE` may follow."""
    names, has_module, module = word.partition(_MODULE) if takes_module else (word, "", "")
    group, colon, name = names.partition(":")
    if colon:
        given = {part: None if part in _ANY else part for part in (group, name)}
        return _Wanted(None, given[group], given[name], module if has_module else None)
    is_any = bool(has_module) and names in _ANY
    return _Wanted(None if is_any else names, None, None, module if has_module else None)


EVENTS_PER_STEP = 64
"""Number of events that are switched before other threads get the control lock."""


class ArrayEvents:
    """Switches events on and off in one trace array, which is `recorder`.

    `expand` expands the ring buffers before an event is switched. Callers hold the control lock, in the place
    of Linux's event_mutex.
    Mirrors: kernel/trace/trace_events.c (v6.1).
    """

    def __init__(
        self,
        registry: EventRegistry,
        recorder: Recorder,
        expand: Callable[[], None],
        has_module: Callable[[str], bool] | None,
    ) -> None:
        """Prepare to switch events in the trace array `recorder`. No event is switched yet.

        `has_module` returns whether the module with the given name is loaded; None if set_event does not
        accept `:mod:MODULE`.
        """
        self._has_module = has_module
        self._awaited: list[_Wanted] = []
        """Words of set_event whose modules are not loaded yet, newest first.

        Mirrors: trace_array.mod_events (v7.2).
        """
        self.registry = registry
        self.recorder = recorder
        self.expand = expand
        self._older = registry.registered

    def is_enabled(self, event: TraceEvent) -> bool:
        """Return True if the event is enabled in this trace array, also if it is only in soft mode."""
        return self.recorder in event.recorders

    def enabled_text(self, event: TraceEvent) -> str:
        """Return the text of an event's `enable` file, without its newline.

        Raises: KernelError ENODEV (the event was removed).
        """
        event.check_alive()
        return event.file(self.recorder).enabled_text()

    def set_enabled(self, event: TraceEvent, enabled: bool) -> None:
        """Enable or disable the recording of an event in this trace array.

        `enabled`: True to enable it, False to disable it. In both cases, the ring buffers are expanded first.
        Raises: KernelError ENODEV (the event was removed), or the error of TraceEvent.start().
        """
        event.check_alive()
        self.expand()
        if enabled:
            event.file(self.recorder).enable()
        elif self.recorder in event.recorders:
            event.file(self.recorder).disable()

    def set_all(self, events: Iterable[TraceEvent], enabled: bool) -> None:
        """Enable or disable all of `events` in one step. Raises: errors of set_all_steps()."""
        for _ in self.set_all_steps(events, enabled):
            pass

    def set_all_steps(self, events: Iterable[TraceEvent], enabled: bool) -> Iterator[None]:
        """Enable or disable all of `events`, and yield after each EVENTS_PER_STEP events.

        Events that were removed between two steps are skipped.
        As in Linux, a failure of one event does not stop the others.
        Raises: KernelError, the error of the first event that failed.
        """
        failure: KernelError | None = None
        for number, event in enumerate(list(events)):
            if number and not number % EVENTS_PER_STEP:
                yield
            if number >= EVENTS_PER_STEP and self.registry.find(event.group, event.name) is not event:
                continue
            try:
                self.set_enabled(event, enabled)
            except KernelError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def switchable(self, among: Iterable[TraceEvent] | None = None) -> Iterable[TraceEvent]:
        """Return the events that can be enabled, in the order of this trace array's list.

        `among`: the events from which to choose; None means all.
        Events that were registered after the trace array was created come first, newest first. The older
        events follow in order of registration.
        Mirrors: kernel/trace/trace_events.c:__trace_add_event_dirs, trace_create_new_event (v6.1).
        """
        return (event for event in self.registry.listed(self._older, among) if event.is_switchable)

    def set_enabled_text(self, events: Iterable[TraceEvent]) -> str:
        """Return the text of a group's `enable` file: "0", "1", "X" (some are enabled) or "?" (none can be).

        Mirrors: kernel/trace/trace_events.c:system_enable_read (v6.1).
        """
        states = {self.is_enabled(event) for event in events if event.is_switchable}
        if not states:
            return "?"
        if len(states) > 1:
            return "X"
        return f"{states.pop():d}"

    # The set_event file

    def records(self) -> list[str]:
        """Return the lines of set_event, one for each enabled event.

        An event that cannot be enabled, such as that of trace_marker, is listed if it has a trigger. The last
        lines are the written words whose modules are not loaded yet.
        """
        enabled = (f"{e.group}:{e.name}\n" for e in self.registry.listed(self._older) if self._is_listed(e))
        return [*enabled, *(wanted.text() for wanted in self._awaited)]

    def _is_listed(self, event: TraceEvent) -> bool:
        if event.is_switchable:
            return self.is_enabled(event)
        file = event.files.get(self.recorder)
        return file is not None and bool(file.triggers)

    def write(self, data: bytes) -> int:
        """Handle one write to set_event in one step, and return the number of bytes of `data` taken.

        Raises: errors of write_steps().
        """
        steps = self.write_steps(data)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                taken: int = end.value
                return taken

    def write_steps(self, data: bytes) -> Generator[None, None, int]:
        """Handle one write to set_event in steps, and return the number of bytes taken.

        Only the first word of `data` is taken. The word names events to enable, or, after a "!", events to
        disable.
        Raises: KernelError EINVAL (no such event), or an error of set_all().
        Mirrors: kernel/trace/trace_events.c:ftrace_event_write (v6.1).
        """
        self.expand()
        word, size = take_word(data)
        if word:
            text = bytes_to_text(word)
            yield from self._choose(text.removeprefix("!"), not text.startswith("!"))
        return size

    def _choose(self, word: str, enabled: bool) -> Iterator[None]:
        """Enable or disable, in steps, the events that `word` names: `GROUP:EVENT`, or a name.

        A name may be that of a group or of events. In `GROUP:EVENT`, a part that is `*` or empty matches any
        name. With `:mod:MODULE` at its end, the word names only events of that module. If the module is not
        loaded, its events are enabled when it is loaded. If `enabled` is False, earlier words for a module
        that is not loaded are dropped; see _forget().
        Mirrors: kernel/trace/trace_events.c:ftrace_set_clr_event (v6.1, v7.2).
        """
        wanted = _wanted(word, takes_module=self._has_module is not None)
        chosen = [event for event in self.switchable() if wanted.means(event)]
        if chosen:
            yield from self.set_all_steps(chosen, enabled)
        elif wanted.module is None or self._has_module is None or self._has_module(wanted.module):
            raise KernelError(errno.EINVAL, f"{word!r}: no such event; see available_events")
        elif enabled:
            self._awaited.insert(0, wanted)
        else:
            self._forget(wanted, word)

    def _forget(self, removed: _Wanted, word: str) -> None:
        """Drop waiting words of set_event, whose modules are not loaded, if `removed` covers them.

        `word` is the text of `removed`.
        Raises: KernelError EINVAL (no waiting word is covered).
        Mirrors: kernel/trace/trace_events.c:remove_cache_mod (v7.2).
        """
        left = [each for each in self._awaited if not removed.covers(each)]
        if len(left) == len(self._awaited):
            raise KernelError(errno.EINVAL, f"{word!r}: no such word waits for a module; see set_event")
        self._awaited = left

    def module_added(self, module: str) -> None:
        """Enable the events of `module` that were written to set_event before the module was loaded.

        Events that cannot be enabled are skipped.
        Mirrors: kernel/trace/trace_events.c:update_mod_cache (v7.2).
        """
        arrived = [each for each in self._awaited if each.module == module]
        self._awaited = [each for each in self._awaited if each.module != module]
        for wanted in arrived:
            with suppress(KernelError):
                self.set_all((event for event in self.switchable() if wanted.means(event)), True)

    def clear(self) -> None:
        """Disable all events, as opening set_event with O_TRUNC does."""
        for event in self.switchable():
            if self.recorder in event.recorders:
                event.file(self.recorder).disable()

    def forget(self) -> None:
        """Disable all events and drop their filters and triggers; the trace array is being removed."""
        self.clear()
        for event in self.registry:
            event.forget(self.recorder)


class EventPidsFile:
    """The file set_event_pid or set_event_notrace_pid, whose writes also expand the ring buffers.

    Mirrors: kernel/trace/trace_events.c:event_pid_write (v6.1).
    """

    def __init__(self, events: ArrayEvents, pids: PidList) -> None:
        self.records_from = pids.records_from
        self.clear = pids.clear
        self._events = events
        self._pids = pids

    def write(self, data: bytes) -> int:
        """Add the pids in `data` to the list, and expand the ring buffers; see PidList.write()."""
        self._events.expand()
        return self._pids.write(data)
