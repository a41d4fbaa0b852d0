"""TaskObserver: who is told of requests, and of a guest's tasks; TaskEvents tells."""

from __future__ import annotations

from collections.abc import Callable

Observers = list[Callable[[], None]]
PidObservers = list[Callable[[int], None]]


class TaskObserver:
    """Overrides what it wants to be told of. The guest doesn't run meanwhile."""

    def request_begins(self) -> None:
        """A request of a host process has come in; its guest task isn't looked up yet."""

    def call_begins(self) -> None:
        """A system call is about to go to the guest."""

    def call_ended(self) -> None:
        """The system call has returned, or its task sleeps in it."""

    def forked(self, parent: int, child: int) -> None:
        """A task has another one made for it; their pids."""

    def renamed(self, pid: int, comm: str) -> None:
        """A task has another name. Ours saves names where its tasks run, and tells nobody."""

    def exiting(self, task: int) -> None:
        """The task of that address begins to end."""

    def freed(self, task: int) -> None:
        """The task of that address has ended, and the kernel is about to forget it."""

    def exited(self, pid: int) -> None:
        """The task of a process that ended has ended too, and is heard of no more."""

    def died(self, pid: int) -> None:
        """A task has ended: by exit, by a signal or by an oops."""


class TaskEvents:
    """The observers of one guest by event, in the order in which they came; those alone that override it."""

    def __init__(self) -> None:
        self.request_begins: Observers = []
        self.call_begins: Observers = []
        self.call_ended: Observers = []
        self.forked: list[Callable[[int, int], None]] = []
        self.renamed: list[Callable[[int, str], None]] = []
        self.exiting: PidObservers = []
        self.freed: PidObservers = []
        self.exited: PidObservers = []
        self.died: PidObservers = []

    def watch(self, observer: TaskObserver) -> None:
        """Tell it from now on."""
        for event, observers in vars(self).items():
            if getattr(type(observer), event) is not getattr(TaskObserver, event):
                observers.append(getattr(observer, event))
