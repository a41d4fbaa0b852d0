"""An event in one trace array: its triggers, and the soft mode that keeps it on without recording."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.ports import ProbeHit, RawEntry, Recorder

if TYPE_CHECKING:
    from emulated_kernel.trace.event import TraceEvent
    from emulated_kernel.trace.trigger import Trigger


class EventFile:
    """Mirrors: include/linux/trace_events.h:struct trace_event_file (v6.1).

    The event counts as enabled in soft mode too: its hits come, for triggers to see them, and are
    recorded unless it is soft-disabled. Callers serialize: Linux holds event_mutex.
    """

    def __init__(self, event: TraceEvent, recorder: Recorder) -> None:
        self.event = event
        self.recorder = recorder
        self.triggers: list[Trigger] = []
        self.soft_disabled = False
        self.is_special = False
        """Whether a hit has to go through fire(). Kept, not asked for: each hit looks."""
        self._soft_references = 0
        self._trigger_references = 0

    @property
    def soft_mode(self) -> bool:
        """Whether triggers, here or elsewhere, need it to be on."""
        return self._soft_references > 0

    @property
    def enabled(self) -> bool:
        """Whether hits come at all."""
        return self.recorder in self.event.recorders

    def enabled_text(self) -> str:
        """The enable file, without its newline. Mirrors: kernel/trace/trace_events.c:event_enable_read."""
        records = self.enabled and not self.soft_disabled
        return f"{records:d}{'*' if self.soft_disabled or self.soft_mode else ''}"

    # Enabling; mirrors kernel/trace/trace_events.c:__ftrace_event_enable_disable (v6.1)

    def enable(self) -> None:
        """Record hits. Raises: KernelError of the event."""
        self.soft_disabled = False
        self.event.enable(self.recorder)

    def disable(self) -> None:
        """Record no hits; in soft mode they still come."""
        if not self.soft_mode:
            self.event.disable(self.recorder)
        self.soft_disabled = self.soft_mode

    def enable_soft(self) -> None:
        """One user more for whom hits have to come. Raises: KernelError of the event."""
        self._soft_references += 1
        if self._soft_references > 1:
            return
        if not self.enabled:
            self.soft_disabled = True
            try:
                self.event.enable(self.recorder)
            except KernelError:
                self._soft_references, self.soft_disabled = 0, False
                raise
        self._changed()

    def disable_soft(self) -> None:
        """One user less."""
        self._soft_references -= 1
        if self._soft_references:
            return
        if self.soft_disabled:
            self.event.disable(self.recorder)
        self.soft_disabled = False
        self._changed()

    # Triggers

    def add(self, trigger: Trigger, *, last: bool = False) -> None:
        """Put a trigger on the list, before the others or behind them. Raises: KernelError of the event.

        Mirrors: kernel/trace/trace_events_trigger.c:register_trigger,
        trace_event_trigger_enable_disable (v6.1).
        """
        self.triggers.insert(len(self.triggers) if last else 0, trigger)
        try:
            self._trigger_references += 1
            if self._trigger_references == 1:
                self.enable_soft()
        except KernelError:
            self._trigger_references -= 1
            self.triggers.remove(trigger)
            raise
        self._changed()

    def remove(self, trigger: Trigger) -> None:
        """Take a trigger off the list, and let go of what it holds."""
        self.triggers.remove(trigger)
        self._trigger_references -= 1
        if not self._trigger_references:
            self.disable_soft()
        self._changed()
        trigger.released()

    def _changed(self) -> None:
        self.is_special = self.soft_mode or bool(self.triggers)
        self.event.changed()

    # Hits

    @property
    def needs_entry(self) -> bool:
        """Whether a trigger has to see the entry. Mirrors: update_cond_flag (v6.1)."""
        return any(trigger.needs_entry for trigger in self.triggers)

    def fire(self, payload: bytes, hit: ProbeHit) -> None:
        """Run the triggers and record the hit, unless it is soft-disabled or the filter rejects it.

        Mirrors: __trace_trigger_soft_disabled, __event_trigger_test_discard (v6.1).
        """
        recorder = self.recorder
        deferred: list[Trigger] = []
        if self.needs_entry:
            # What triggers do to the buffers doesn't move the entry that they have seen.
            place = recorder.reserve()
            deferred = self.run_on_entry(recorder.entry(self.event, payload, hit), hit)
        else:
            for trigger in tuple(self.triggers):
                if not trigger.paused:
                    trigger.fire(hit, None)
            place = recorder.reserve()
        if place is not None and not self.soft_disabled and self.event.passes_filter(recorder, payload, hit):
            recorder.commit(place, self.event, payload, hit)
        self.run_deferred(deferred, hit)

    def run_on_entry(self, entry: RawEntry, hit: ProbeHit) -> list[Trigger]:
        """Run those whose filter accepts the entry; returns those that wait for it to be written.

        Mirrors: event_triggers_call (v6.1).
        """
        deferred: list[Trigger] = []
        for trigger in tuple(self.triggers):
            if trigger.paused or not trigger.accepts(entry):
                continue
            if trigger.is_post:
                deferred.append(trigger)
            else:
                trigger.fire(hit, entry)
        return deferred

    @staticmethod
    def run_deferred(deferred: Iterable[Trigger], hit: ProbeHit) -> None:
        """The entry is written. Mirrors: event_triggers_post_call (v6.1)."""
        for trigger in deferred:
            if not trigger.paused:
                trigger.fire(hit, None)
