"""Directories of events inside the guest: who probes tracefs_create_dir sees them made, as on Linux."""

from __future__ import annotations

from contextlib import suppress

from emulated_kernel.errors import KernelError
from emulated_kernel.host.guest import Guest
from emulated_kernel.machine.machine import Machine
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.registry import EventRegistry, EventWatcher

_CREATE, _REMOVE = "tracefs_create_dir", "tracefs_remove"


class GuestDirectories(EventWatcher):
    """A directory for each group, and one in it for each event, that was made while somebody could see it.

    Deviates: the task that makes them is the daemon's, not the writer's, which sleeps meanwhile.
    """

    def __init__(self, guest: Guest, registry: EventRegistry, machine: Machine) -> None:
        self._guest = guest
        self._registry = registry
        self._machine = machine
        self._groups: dict[str, int] = {}
        self._events: dict[TraceEvent, int] = {}
        registry.watch(self)

    def event_added(self, event: TraceEvent) -> None:
        """An event was registered."""
        # Inside a hit nothing can be called.
        if not self._guest.is_watched or self._machine.is_running:
            return
        if event.group not in self._groups:
            self._groups[event.group] = self._call(_CREATE, event.group, 0)
        self._events[event] = self._call(_CREATE, event.name, self._groups[event.group])

    def event_removed(self, event: TraceEvent) -> None:
        """An event was removed; the last one takes its group along."""
        directory = self._events.pop(event, 0)
        group = 0 if self._registry.has_group(event.group) else self._groups.pop(event.group, 0)
        for dentry in (directory, group):
            if dentry and not self._machine.is_running:
                self._call(_REMOVE, dentry)

    def _call(self, function: str, *args: int | str) -> int:
        """0 where the guest is dead, lacks the function, or died of a probe in it."""
        with suppress(KernelError):
            return self._guest.call_function(function, *args)
        return 0
