"""TaskEvents: who is told at fork, exit and system-call boundaries of the guest's tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from emulated_kernel.dataclass import dataclass

Observers = list[Callable[[], None]]
PidObservers = list[Callable[[int], None]]


@dataclass(frozen=True, eq=False)
class TaskEvents:
    """The observers of one guest by event, in the order of their calls. The guest doesn't run meanwhile."""

    request_begins: Observers = field(default_factory=list)
    """A request of a host process has come in; its guest task isn't looked up yet."""
    call_begins: Observers = field(default_factory=list)
    """A system call is about to go to the guest."""
    call_ended: Observers = field(default_factory=list)
    """The system call has returned, or its task sleeps in it."""
    forked: list[Callable[[int, int], None]] = field(default_factory=list)
    """The guest has made a task for a process that the host forked; the pids of parent and child."""
    exited: PidObservers = field(default_factory=list)
    """The task of a process that ended on the host has ended too; its pid."""
    died: PidObservers = field(default_factory=list)
    """A task has ended: by exit, by a signal or by an oops; its pid."""
