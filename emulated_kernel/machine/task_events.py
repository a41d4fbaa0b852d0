"""TaskObserver and TaskEvents: callbacks for requests and for the life of the guest's tasks."""

from __future__ import annotations

from collections.abc import Callable

Observers = list[Callable[[], None]]
CallObservers = list[Callable[..., None]]
"""Functions to call at the start of a system call.

They are called without arguments or with `keeps_names`; see TaskObserver.call_begins().
"""
PidObservers = list[Callable[[int], None]]


class TaskObserver:
    """Base class of observers, which override the methods of the events that they need.

    The guest is stopped during each call of a method.
    """

    def request_begins(self) -> None:
        """Handle the arrival of a host process's request, before the process's guest task is looked up."""

    def call_begins(self, *, keeps_names: bool = False) -> None:
        """Handle the start of a system call, before it is passed to the guest.

        `keeps_names`: True if the call, such as read(2), can neither rename nor create a task.
        """

    def call_ended(self) -> None:
        """Handle the end of a system call: the call has returned, or its task sleeps in the call."""

    def forked(self, parent: int, child: int) -> None:
        """Handle a fork; `parent` and `child` are pids."""

    def renamed(self, pid: int, comm: str) -> None:
        """Handle a change of the name of the task `pid` to `comm`.

        The built-in kernel doesn't report this event.
        """

    def exiting(self, task: int) -> None:
        """Handle the start of a task's exit; `task` is the address of its task_struct."""

    def freed(self, task: int) -> None:
        """Handle the release of an exited task's task_struct at address `task`."""

    def exited(self, pid: int) -> None:
        """Handle the removal of a task whose host process has ended; no later event has this pid."""

    def died(self, pid: int) -> None:
        """Handle the death of the task `pid`: by exit, by a signal or by an oops."""


class TaskEvents:
    """The observers of one guest: for each event, the methods of the observers that override it."""

    def __init__(self) -> None:
        self.request_begins: Observers = []
        self.call_begins: CallObservers = []
        self.call_ended: Observers = []
        self.forked: list[Callable[[int, int], None]] = []
        self.renamed: list[Callable[[int, str], None]] = []
        self.exiting: PidObservers = []
        self.freed: PidObservers = []
        self.exited: PidObservers = []
        self.died: PidObservers = []

    def watch(self, *observers: TaskObserver) -> None:
        """Add observers. At an event they are called in this order, after all earlier observers."""
        for observer in observers:
            for event, callbacks in vars(self).items():
                if getattr(type(observer), event) is not getattr(TaskObserver, event):
                    callbacks.append(getattr(observer, event))
