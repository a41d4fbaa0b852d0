"""set_event_pid and set_event_notrace_pid: which tasks' events a trace array records."""

from __future__ import annotations

import errno
from collections.abc import Callable

from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.text.get_user import take_word
from emulated_kernel.trace.text.numbers import kstrtoul
from emulated_kernel.util.errors import KernelError

PID_LIMIT = 1 << 30
"""Pids are below. Mirrors: kernel/trace/pid_list.h:MAX_PID (v6.1)."""
_PID_MASK = (1 << 32) - 1
_SWITCH = "sched_switch"


class PidList:
    """A list of pids as files show and take it; an empty one filters nothing."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is called when it has others."""
        self.pids: frozenset[int] = frozenset()
        self._changed = changed

    def _set(self, pids: frozenset[int]) -> None:
        if pids != self.pids:
            self.pids = pids
            self._changed()

    def write(self, data: bytes) -> int:
        """Add the pids of one write(2), or none of them if one is wrong; bytes taken.

        Raises: KernelError EINVAL (no number), EPERM (too big). Mirrors: trace_pid_write (v6.1).
        """
        pids = set(self.pids)
        done = 0
        while done < len(data):
            word, size = take_word(data[done:])
            done += size
            if not word:
                break
            pids.add(_pid(word))
        self._set(frozenset(pids))
        return done

    def clear(self) -> None:
        """Opening for writing with O_TRUNC."""
        self._set(frozenset())

    def records(self) -> list[str]:
        """The lines of the file."""
        return [f"{pid}\n" for pid in sorted(self.pids)]

    def follow(self, parent: int, child: int) -> None:
        """The child of a task on the list is on it too."""
        if parent in self.pids:
            self._set(self.pids | {child})

    def forget(self, pid: int) -> None:
        """A task that ended leaves the list."""
        if pid in self.pids:
            self._set(self.pids - {pid})


class EventPids:
    """The two lists of a trace array. Mirrors: kernel/trace/trace_events.c:ignore_task_cpu (v6.1)."""

    def __init__(self, changed: Callable[[], None], kind: type[PidList] = PidList) -> None:
        """`changed` is called when what `ignores` says may have changed; `kind`: of the lists."""
        self.traced = kind(changed)
        """Only these tasks' events are recorded, if there are any."""
        self.untraced = kind(changed)
        """These tasks' events are not."""

    @property
    def is_active(self) -> bool:
        """Whether there is anything to ask for."""
        return bool(self.traced.pids or self.untraced.pids)

    def ignores(self, pid: int) -> bool:
        """Whether events of this task are left out. Mirrors: trace_ignore_this_task (v6.1)."""
        traced = self.traced.pids
        return (bool(traced) and pid not in traced) or pid in self.untraced.pids

    def ignores_switch(self, before: int, after: int) -> bool:
        """Whether a switch between two tasks is left out: only if both are, on the same list's account.

        Mirrors: kernel/trace/trace_events.c:event_filter_pid_sched_switch_probe_pre (v6.1).
        """
        traced = self.traced.pids
        untraced = self.untraced.pids
        both = {before, after}
        return (bool(traced) and not both & traced) or both <= untraced

    def leaves_out(self, event: TraceEvent, payload: bytes, pid: int) -> bool:
        """Whether an event that task `pid` made isn't recorded; `payload` follows the common fields.

        The scheduler's events count for the other task too: who is switched to, and who is woken up.
        Mirrors: kernel/trace/trace_events.c:event_filter_pid_sched_wakeup_probe_pre (v6.1).
        """
        other = event.other_task(payload)
        if other is None:
            return self.ignores(pid)
        if event.name == _SWITCH:
            return self.ignores_switch(pid, other)
        return self.ignores(pid) and self.ignores(other)

    def follow(self, parent: int, child: int) -> None:
        """A fork, where option event-fork is on."""
        self.traced.follow(parent, child)
        self.untraced.follow(parent, child)

    def forget(self, pid: int) -> None:
        """A task's end, where option event-fork is on."""
        self.traced.forget(pid)
        self.untraced.forget(pid)


def _pid(word: bytes) -> int:
    try:
        pid = kstrtoul(word.decode("latin-1")) & _PID_MASK
    except KernelError as error:
        raise KernelError(errno.EINVAL, "not a pid") from error
    if pid >= PID_LIMIT:
        raise KernelError(errno.EPERM, "no such pid can be")
    return pid
