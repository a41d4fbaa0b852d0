"""The events of one trace array: switched one by one, in groups, and by lines of set_event."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable

from emulated_kernel.trace.events.event import Recorder, TraceEvent
from emulated_kernel.trace.events.event_pids import PidList
from emulated_kernel.trace.events.registry import EventRegistry
from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.text.get_user import take_word
from emulated_kernel.util.errors import KernelError

_ANY = ("", "*")


class ArrayEvents:
    """What one trace array has enabled; `recorder` stands for it.

    `expand` is called before anything is enabled. Callers serialise: Linux holds event_mutex.
    Mirrors: kernel/trace/trace_events.c (v6.1).
    """

    def __init__(self, registry: EventRegistry, recorder: Recorder, expand: Callable[[], None]) -> None:
        self.registry = registry
        self.recorder = recorder
        self.expand = expand
        self._older = registry.registered

    def is_enabled(self, event: TraceEvent) -> bool:
        """Whether this array has the event's hits come."""
        return self.recorder in event.recorders

    def enabled_text(self, event: TraceEvent) -> str:
        """An event's `enable` file, without its newline. Raises: KernelError ENODEV."""
        event.check_alive()
        return event.file(self.recorder).enabled_text()

    def set_enabled(self, event: TraceEvent, enabled: bool) -> None:
        """Record the event or not; either makes the buffers grow.

        Raises: KernelError ENODEV (the event was removed), what starting it raises.
        """
        event.check_alive()
        self.expand()
        if enabled:
            event.file(self.recorder).enable()
        elif self.recorder in event.recorders:
            event.file(self.recorder).disable()

    def set_all(self, events: Iterable[TraceEvent], enabled: bool) -> None:
        """Switch all of `events`. Linux: one that fails doesn't keep the others from it.

        Raises: KernelError (of the first that failed).
        """
        failure: KernelError | None = None
        for event in list(events):
            try:
                self.set_enabled(event, enabled)
            except KernelError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def switchable(self, among: Iterable[TraceEvent] | None = None) -> Iterable[TraceEvent]:
        """Events that can be enabled at all: those that came after the array, newest first; then the others.

        Mirrors: kernel/trace/trace_events.c:__trace_add_event_dirs, trace_create_new_event (v6.1).
        """
        return (event for event in self.registry.listed(self._older, among) if event.is_switchable)

    def set_enabled_text(self, events: Iterable[TraceEvent]) -> str:
        """ "0", "1", "X" (some are enabled) or "?" (none can be).

        Mirrors: kernel/trace/trace_events.c:system_enable_read (v6.1).
        """
        states = {self.is_enabled(event) for event in events if event.is_switchable}
        return "?" if not states else "X" if len(states) > 1 else f"{states.pop():d}"

    # The set_event file

    def records(self) -> list[str]:
        """The events whose hits come, a line each; trace_marker's while it has a trigger."""
        return [f"{e.group}:{e.name}\n" for e in self.registry.listed(self._older) if self._is_listed(e)]

    def _is_listed(self, event: TraceEvent) -> bool:
        if event.is_switchable:
            return self.is_enabled(event)
        file = event.files.get(self.recorder)
        return file is not None and bool(file.triggers)

    def write(self, data: bytes) -> int:
        """One write(2) to set_event: its first word, "!" before it disables; bytes taken, which may be fewer.

        Raises: KernelError EINVAL (no such event), what switching one raises.
        Mirrors: kernel/trace/trace_events.c:ftrace_event_write (v6.1).
        """
        self.expand()
        word, size = take_word(data)
        if word:
            text = bytes_to_text(word)
            self._choose(text.removeprefix("!"), not text.startswith("!"))
        return size

    def _choose(self, word: str, enabled: bool) -> None:
        """`GROUP:EVENT`, where `*` or nothing is any; or the name of a group or of events.

        Mirrors: kernel/trace/trace_events.c:ftrace_set_clr_event (v6.1).
        """
        group, colon, name = word.partition(":")

        def means(event: TraceEvent) -> bool:
            if not colon:
                return word in (event.group, event.name)
            return group in (*_ANY, event.group) and name in (*_ANY, event.name)

        chosen = [event for event in self.switchable() if means(event)]
        if not chosen:
            raise KernelError(errno.EINVAL, "no such event")
        self.set_all(chosen, enabled)

    def clear(self) -> None:
        """Disable all: opening set_event with O_TRUNC."""
        for event in self.switchable():
            if self.recorder in event.recorders:
                event.file(self.recorder).disable()

    def forget(self) -> None:
        """The trace array goes: nothing of it is kept with the events."""
        self.clear()
        for event in self.registry:
            event.forget(self.recorder)


class EventPidsFile:
    """set_event_pid or set_event_notrace_pid. Mirrors: kernel/trace/trace_events.c:event_pid_write (v6.1)."""

    def __init__(self, events: ArrayEvents, pids: PidList) -> None:
        self.records = pids.records
        self.clear = pids.clear
        self._events = events
        self._pids = pids

    def write(self, data: bytes) -> int:
        """See PidList.write(); the buffers grow before."""
        self._events.expand()
        return self._pids.write(data)
