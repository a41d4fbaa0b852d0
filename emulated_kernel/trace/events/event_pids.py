"""set_event_pid and set_event_notrace_pid: lists of the tasks whose events a trace array records."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from itertools import islice

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.filter.words import NO_WORDS
from emulated_kernel.trace.text.get_user import take_word
from emulated_kernel.trace.text.numbers import kstrtoul
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import Charge, MemoryBudget

PID_LIMIT = 1 << 30
"""Exclusive upper bound of the pids in a list. Mirrors: kernel/trace/pid_list.h:MAX_PID (v6.1)."""
BYTES_PER_PID = 200
"""Maximum memory of the host, in bytes, that one pid in a list takes.

This covers the pid in a set and in a sorted list, and the Charge object that counts it in the budget.
"""
_PID_MASK = (1 << 32) - 1
_SWITCH = "sched_switch"


class PidList:
    """A list of pids that is read and written through a file. An empty list excludes no task."""

    def __init__(self, changed: Callable[[], None], memory: MemoryBudget = NO_WORDS.memory) -> None:
        """Create an empty list.

        `changed` is called after each change of the list. The list's memory counts in the budget `memory`.
        """
        self.pids = set[int]()
        self._changed = changed
        self._memory = memory
        self._charges: list[Charge] = []
        self._sorted: list[int] | None = None
        """The pids in ascending order; None after a change, until they are read."""

    def _note_change(self) -> None:
        self._sorted = None
        self._changed()

    def write(self, data: bytes) -> int:
        """Add the pids in the text `data` of one write, and return the number of bytes taken.

        If a pid is invalid, add none of the pids.
        Raises: KernelError EINVAL (a word is not a number), EPERM (a pid is too big), ENOMEM.
        Mirrors: kernel/trace/trace.c:trace_pid_write (v6.1).
        """
        added = set[int]()
        done = 0
        while done < len(data):
            word, size = take_word(data, done)
            done += size
            if not word:
                break
            added.add(_pid(word))
        added -= self.pids
        if added:
            self._charges.append(self._memory.charge(BYTES_PER_PID * len(added)))
            self.pids |= added
            self._note_change()
        return done

    def clear(self) -> None:
        """Remove all pids, as opening the file with O_TRUNC does."""
        if self.pids:
            self.pids = set()
            self._charges = []
            self._note_change()

    def records(self) -> list[str]:
        """Return the lines of the file, one for each pid in ascending order."""
        return [*self.records_from(0)]

    def records_from(self, start: int) -> Iterator[str]:
        """Return the lines of the file from line `start` on; the first line has the number 0."""
        if self._sorted is None:
            self._sorted = sorted(self.pids)
        return (f"{pid}\n" for pid in islice(self._sorted, start, None))

    def follow(self, parent: int, child: int) -> None:
        """Add the pid of a new child if its parent's pid is on the list."""
        if parent in self.pids and child not in self.pids:
            self.pids.add(child)
            self._note_change()

    def forget(self, pid: int) -> None:
        """Remove the pid of a task that has ended."""
        if pid in self.pids:
            self.pids.remove(pid)
            self._note_change()


class EventPids:
    """The two pid lists of a trace array, for its events or for its function tracer.

    Mirrors: kernel/trace/trace_events.c:ignore_task_cpu (v6.1).
    """

    def __init__(
        self,
        changed: Callable[[], None],
        kind: type[PidList] = PidList,
        memory: MemoryBudget = NO_WORDS.memory,
    ) -> None:
        """Create two empty lists of class `kind`, whose memory counts in the budget `memory`.

        `changed` is called when the results of ignores() may have changed.
        """
        self.traced = kind(changed, memory)
        """The list set_event_pid or set_ftrace_pid. If it is not empty, only its tasks are recorded."""
        self.untraced = kind(changed, memory)
        """The list set_event_notrace_pid or set_ftrace_notrace_pid. Its tasks are not recorded."""

    @property
    def is_active(self) -> bool:
        """Whether at least one of the lists has a pid; otherwise no task is excluded."""
        return bool(self.traced.pids or self.untraced.pids)

    def ignores(self, pid: int) -> bool:
        """Return True if the lists exclude the task `pid`.

        Mirrors: kernel/trace/trace.c:trace_ignore_this_task (v6.1).
        """
        traced = self.traced.pids
        return (bool(traced) and pid not in traced) or pid in self.untraced.pids

    def ignores_switch(self, before: int, after: int) -> bool:
        """Return True if a task switch is not recorded: one of the two lists excludes both of its tasks.

        `before`, `after`: pids of the tasks.
        Mirrors: kernel/trace/trace_events.c:event_filter_pid_sched_switch_probe_pre (v6.1).
        """
        traced = self.traced.pids
        untraced = self.untraced.pids
        both = {before, after}
        return (bool(traced) and not both & traced) or both <= untraced

    def is_filtered(self, event: TraceEvent, payload: bytes, pid: int) -> bool:
        """Return True if an event of task `pid` is not recorded, because the lists exclude the task.

        `payload` is the entry without its common fields.
        An event of the scheduler may concern a second task, which is switched to or woken up. Such an event
        is recorded unless the lists exclude both tasks; for a switch, see ignores_switch().
        Mirrors: kernel/trace/trace_events.c:event_filter_pid_sched_wakeup_probe_pre (v6.1).
        """
        other = event.other_task(payload)
        if other is None:
            return self.ignores(pid)
        if event.name == _SWITCH:
            return self.ignores_switch(pid, other)
        return self.ignores(pid) and self.ignores(other)

    def follow(self, parent: int, child: int) -> None:
        """Add a forked child to each list that contains its parent.

        Called only if the trace option for these lists is on: event-fork or function-fork.
        """
        self.traced.follow(parent, child)
        self.untraced.follow(parent, child)

    def forget(self, pid: int) -> None:
        """Remove an exited task from the lists.

        Called only if the trace option for these lists is on: event-fork or function-fork.
        """
        self.traced.forget(pid)
        self.untraced.forget(pid)


def _pid(word: bytes) -> int:
    text = word.decode("latin-1")
    try:
        pid = kstrtoul(text) & _PID_MASK
    except KernelError as error:
        raise KernelError(errno.EINVAL, f"pid list: {error.strerror}") from error
    if pid >= PID_LIMIT:
        raise KernelError(errno.EPERM, f"pid list: pid {text} is too big; pids are less than {PID_LIMIT}")
    return pid
