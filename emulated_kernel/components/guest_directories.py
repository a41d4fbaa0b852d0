"""Directories of events inside the guest: who probes tracefs_create_dir sees them made, as on Linux."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.registry import EventRegistry, EventWatcher
from emulated_kernel.util.errors import KernelError

MAKES = "tracefs_create_dir"
_REMOVES = "tracefs_remove"


class GuestDirectories(EventWatcher):
    """A directory for each group, and one in it for each event, that was made while somebody could see it.

    Deviates: the task that makes them is the daemon's, not the writer's, which sleeps meanwhile.
    """

    def __init__(
        self,
        registry: EventRegistry,
        call: Callable[..., int],
        is_watched: Callable[[], bool],
        is_running: Callable[[], bool],
    ) -> None:
        """`call`: a function of the guest's, by its name; `is_running`: the guest is within one already."""
        self._registry = registry
        self._function = call
        self._is_watched = is_watched
        self._is_running = is_running
        self._groups: dict[str, int] = {}
        self._events: dict[TraceEvent, int] = {}
        registry.watch(self)

    def event_added(self, event: TraceEvent) -> None:
        """An event was registered."""
        # Inside a hit nothing can be called.
        if not self._is_watched() or self._is_running():
            return
        if event.group not in self._groups:
            self._groups[event.group] = self._call(MAKES, event.group, 0)
        self._events[event] = self._call(MAKES, event.name, self._groups[event.group])

    def event_removed(self, event: TraceEvent) -> None:
        """An event was removed; the last one takes its group along."""
        directory = self._events.pop(event, 0)
        group = 0 if self._registry.has_group(event.group) else self._groups.pop(event.group, 0)
        for dentry in (directory, group):
            if dentry and not self._is_running():
                self._call(_REMOVES, dentry)

    def _call(self, function: str, *args: int | str) -> int:
        """0 where the guest is dead, lacks the function, or died of a probe in it."""
        with suppress(KernelError, GuestFault):
            return self._function(function, *args)
        return 0
