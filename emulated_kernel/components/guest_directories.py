"""GuestDirectories: creates events' directories also in the guest, by calls of guest functions.

So the probes of these functions are hit, as in Linux: there, registering an event calls tracefs_create_dir,
or since 6.7 eventfs_create_dir, for its group and for the event itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.registry import EventRegistry, EventWatcher
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_named_tuple import NamedTuple

_ERRORS = (1 << 64) - 4095
"""The lowest function result that is a negative errno in place of a pointer (Linux: ERR_PTR)."""


class DirectoryFunctions(NamedTuple):
    """The functions by which a kernel creates and removes directories of events, and their arguments."""

    makes: str
    removes: str
    above_groups: int = 0
    """Address of the guest's object for the directory in which groups are created; 0: tracefs's root."""
    more: tuple[int, ...] = ()
    """Further arguments of the function that creates a directory, after the name and the parent."""


DENTRIES = DirectoryFunctions("tracefs_create_dir", "tracefs_remove")


def eventfs_functions(events: int) -> DirectoryFunctions:
    """Return the functions of a kernel with eventfs. `events`: address of the eventfs_inode of events/.

    The directories that these functions create have no files.
    """
    return DirectoryFunctions("eventfs_create_dir", "eventfs_remove_dir", events, (0, 0, 0))


class GuestDirectories(EventWatcher):
    """Creates directories in the guest for new groups and events, and removes the directories.

    A directory is created only if text of the guest is patched at that time; otherwise no probe can notice
    the call.
    Deviates: the daemon's task calls the functions, because the task that writes the definition sleeps
    meanwhile.
    """

    def __init__(
        self,
        registry: EventRegistry,
        call: Callable[..., int],
        is_watched: Callable[[], bool],
        is_running: Callable[[], bool],
        functions: DirectoryFunctions = DENTRIES,
    ) -> None:
        """Watch the events that `registry` adds and removes.

        `call(name, *arguments)` calls a guest function and returns its result. `is_watched` returns True if
        text of the guest is patched. `is_running` returns True while the guest runs; no function can be
        called then. `functions`: the guest functions that create and remove directories.
        """
        self._registry = registry
        self._functions = functions
        self._function = call
        self._is_watched = is_watched
        self._is_running = is_running
        self._groups: dict[str, int] = {}
        self._events: dict[TraceEvent, int] = {}
        registry.watch(self)

    def event_added(self, event: TraceEvent) -> None:
        """Create a new event's directory; for the first event of a group, first create the group's directory.

        Do nothing if no text is patched or the guest runs.
        """
        # In a hit, no guest function can be called.
        if not self._is_watched() or self._is_running():
            return
        if event.group not in self._groups:
            self._groups[event.group] = self._make(event.group, self._functions.above_groups)
        self._events[event] = self._make(event.name, self._groups[event.group])

    def _make(self, name: str, parent: int) -> int:
        """Create the directory `name` in the directory whose object has the address `parent`.

        Return the address of the new directory's object, or 0 if the guest did not create the directory.
        """
        found = self._call(self._functions.makes, name, parent, *self._functions.more)
        return found if found < _ERRORS else 0

    def event_removed(self, event: TraceEvent) -> None:
        """Remove the directory of an event.

        After the last event of a group, remove the group's directory, too. Ignore directories that were not
        created in the guest.
        """
        directory = self._events.pop(event, 0)
        group = 0 if self._registry.has_group(event.group) else self._groups.pop(event.group, 0)
        for dentry in (directory, group):
            if dentry and not self._is_running():
                self._call(self._functions.removes, dentry)

    def _call(self, function: str, *args: int | str) -> int:
        """Call a guest function and return its result.

        Return 0 if the guest is dead, lacks the function, or dies in the call.
        """
        with suppress(KernelError, GuestFault):
            return self._function(function, *args)
        return 0
