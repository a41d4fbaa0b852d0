"""HostProcesses: reports the forks, ends and new names of the host's processes since the last request."""

from __future__ import annotations

import errno
import os
import resource
import select
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from time import monotonic

from emulated_kernel.guests.common.client_call import ClientCall, client_call, next_fd
from emulated_kernel.guests.common.families import Families
from emulated_kernel.guests.common.fork_events import ForkEvents
from emulated_kernel.guests.common.proc import fields, read
from emulated_kernel.guests.common.process_memory import ProcessMemory
from emulated_kernel.guests.common.programs import program_of
from emulated_kernel.util.fast_dataclass import dataclass, replace

EXEC_TIMEOUT = 1.0
"""Seconds after a fork during which the child's name is checked for an execve.

Later, a request of the process itself shows its name.
"""
MAX_FORKS_PER_LOOK = 64
"""Maximum number of forks that are handled at one request; if there are more, the older ones are left out."""
_OPEN_COMMS = 64
"""Maximum number of files /proc/PID/comm that are kept open."""
_PIDFDS = 1024
"""Maximum number of open pidfds. The ends of further processes are found by start times in /proc."""
_SPARE = 24
"""Number of free descriptors that must remain for other uses after a pidfd is opened."""
_UNKNOWN = "?"
"""Replacement for the start time of a process whose file in /proc could not be read."""
_STARTS_PER_LOOK = 32
"""Number of processes without a pidfd whose start times are checked at a request; a check takes 10 us."""
_CHECK = 0.1
"""Seconds between two checks whether the host's kernel still reports process events.

Another program that listens to these events can make the kernel stop reporting them.
"""
_MAX_LOOKS_WITHOUT_EVENT = 3
"""Number of successive looks with new pids but no event, after which each look reads /proc.

Fewer such looks do not show that the host's kernel has stopped reporting events, since an event may still be
on its way.
"""
_START_TIMEOUT = 1.0
"""Maximum seconds from the allocation of a pid until its process appears in events or in /proc."""
_PIDFD_THREAD = os.O_EXCL
"""Flag of pidfd_open(2) that allows a thread which is not a thread group leader; since Linux 6.9."""


@dataclass(frozen=True)
class Fork:
    """A process that was forked on the host; `alive` is False if it has ended already."""

    pid: int
    parent: int | None
    """Pid of the parent; None if the process ended before its status was read, or is init's child now."""
    comm: str
    uid: int
    gid: int
    alive: bool


class ProcessWatch:
    """Interface that reports host processes to the process tracker.

    This base class reports no events; the Python API and tests use it. The methods call(), next_fd() and
    program() take pids of the host. These methods can take a tenth of a second, so their caller must not hold
    the control lock. All other methods need the lock, unless they say that they do not use it. They take and
    return pids of the guest, except for number() and host_pid(), which convert pids.
    """

    def set_wait_context(self, waiting: Callable[[], AbstractContextManager[object]]) -> None:
        """Set the function that makes the context manager for each long read of another process's memory.

        A read takes long if the memory's pages are not available at once.
        """

    def number(self, pid: int) -> int:
        """Return the guest's pid of a host process."""
        return pid

    def own_number(self) -> int:
        """Return the guest's pid of the process that this code runs in."""
        return self.number(os.getpid())

    def host_pid(self, number: int) -> int:
        """Return the host's pid of the process that has the pid `number` in the guest."""
        return number

    def parent(self, number: int) -> int | None:  # noqa: ARG002
        """Return the guest's pid of the parent of process `number`.

        Return None if the parent is unknown, or if forks() reports the parents of new processes.
        """
        return None

    def has_events(self) -> bool:
        """Return True if forks() or exited() may have new events.

        If the result is False, comm() is up to date. Otherwise comm() is up to date after calls of forks()
        and exited().
        """
        return False

    def forks(self) -> list[Fork]:
        """Return the processes forked since the last call, oldest first, without threads.

        Processes whose parents are not followed may be left out.
        """
        return []

    def exited(self) -> list[int]:
        """Return the pids of followed processes that have ended since the last call."""
        return []

    def comm(self, pid: int) -> str | None:  # noqa: ARG002
        """Return the current name of the process, or None if it has ended."""
        return None

    def known_comm(self, pid: int) -> str | None:
        """Return the known name of the process, or None if comm() must read it. Lock: not used.

        The name is up to date if has_events(), called afterwards without the lock, returns False.
        """
        return self.comm(pid)

    def follow(self, pid: int) -> None:
        """Follow a process or thread, so that exited() reports its end."""

    def has_ended(self, pid: int) -> bool:  # noqa: ARG002
        """Return True if a followed process has ended; exited() does not report its end afterwards.

        exited() may report an end late. If a request comes with the pid of a process that has ended, another
        process has got this pid.
        """
        return False

    def pinned_to(self, pid: int) -> int | None:  # noqa: ARG002
        """Return the CPU to which the process is pinned, or None if it may run on several CPUs.

        If the host has only one CPU, return None.
        """
        return None

    def call(self, pid: int, uid: int, instead: str | None = None) -> ClientCall | None:  # noqa: ARG002
        """Return the system call in which the process waits for kprobefs, or None if it is unknown.

        `uid`: user of the process. `instead`: see client_call().
        """
        return None

    def next_fd(self, pid: int) -> int | None:  # noqa: ARG002
        """Return the descriptor that the process's open(2) will return, or None if it is unknown."""
        return None

    def program(self, pid: int, comm: str) -> str | None:  # noqa: ARG002
        """Return the path of the program whose execve named the process `comm`, or None if it is unknown."""
        return None

    def close(self) -> None:
        """Close all files that the watch has open."""


class HostProcesses(ProcessWatch):
    """Watches the host's processes.

    The caller looks for changes at each client's request. If the host's kernel reports events, a look without
    news costs one epoll call. If it reports none, each look reads /proc.
    """

    def __init__(self, *, sees_forks: bool = True) -> None:
        """Start to watch the host's processes.

        `sees_forks`: True if the caller will call forks(). If False, fork events are not received, and
        changes are found by reads of /proc.
        """
        self._loadavg = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        self._seen = b""
        self._last_pid = self._read_last_pid()
        self._pid_max = int(read("/proc/sys/kernel/pid_max") or 1 << 22)
        self._own = os.getpid()
        self._uid = os.geteuid()
        self._cpus = len(os.sched_getaffinity(0))
        self._epoll = select.epoll()
        self._pidfds: dict[int, int] = {}
        self._pid_of: dict[int, int] = {}
        self._starts: OrderedDict[int, str] = OrderedDict()
        """Pid of a followed process without a pidfd -> its start time, in the order of their last checks."""
        self._max_pidfds, self._max_comms = _descriptor_bounds()
        self._comms: OrderedDict[int, int] = OrderedDict()
        self._lost: list[int] = []
        self._fork_events = _fork_events() if sees_forks else None
        self._relies_on_events = self._fork_events is not None
        """Whether the host's kernel reports all events. If it does, no event means no change."""
        if self._fork_events is not None:
            self._epoll.register(self._fork_events.fileno(), select.EPOLLIN)
        self._next_check = 0.0
        self._looks_without_event = 0
        """Number of successive looks at the processes that found new pids without any event."""
        self._names: dict[int, str] = {}
        """Pid of a followed process -> its name, until an event reports a change."""
        self._parents: dict[int, int] = {}
        """Pid of a new process whose status must still be read -> its parent's pid, from an event."""
        self._beginning: dict[int, float] = {}
        """Allocated pid that has neither a fork event nor a process in /proc yet -> deadline.

        The deadline is a monotonic time in seconds. Until then, the event or the process may still appear.
        """
        self._families = Families()
        """Families of clients, from which parents are inferred on hosts that report no forks."""
        self._memory = ProcessMemory()

    def _read_last_pid(self) -> int:
        return int(os.pread(self._loadavg, 64, 0).rsplit(None, 1)[-1])

    def has_events(self) -> bool:
        # A request may come after the mount has ended.
        if self._epoll.closed:
            return False
        if not self._relies_on_events or self._lost or self._starts or self._epoll.poll(0):
            return True
        return monotonic() >= self._next_check

    def _take_events(self, events: ForkEvents) -> bool:
        """Process the events that have arrived; return True if there was at least one event."""
        parents, named = events.take()
        self._parents.update(parents)
        if named is None:
            self._names.clear()
            return True
        for pid in named:
            self._names.pop(pid, None)
        if named:
            self._relies_on_events = True
            self._looks_without_event = 0
        return bool(named)

    def _check(self, *, had_events: bool) -> None:
        """Stop relying on events if the last _MAX_LOOKS_WITHOUT_EVENT looks found new pids but no event.

        Call this in each look that finds new pids. When events are no longer relied on, each look reads
        /proc. `had_events`: whether this look has found events.
        """
        self._looks_without_event = 0 if had_events else self._looks_without_event + 1
        if self._looks_without_event >= _MAX_LOOKS_WITHOUT_EVENT:
            self._relies_on_events = False
            self._names.clear()

    def forks(self) -> list[Fork]:
        had_events = self._fork_events is not None and self._take_events(self._fork_events)
        self._next_check = monotonic() + _CHECK
        seen = os.pread(self._loadavg, 64, 0)
        if seen == self._seen and not self._beginning:
            return []
        self._seen = seen
        last = int(seen.rsplit(None, 1)[-1])
        if last == self._last_pid and not self._beginning:
            return []
        pids = list(_pids_between(self._last_pid, last, self._pid_max))
        self._last_pid = last
        if self._fork_events is not None and pids:
            self._check(had_events=self._take_events(self._fork_events) or had_events)
        pids = self._related(pids)
        latest = pids[-MAX_FORKS_PER_LOOK:]
        found = self._looked_at([*self._beginning, *latest])
        self._parents = {pid: parent for pid, parent in self._parents.items() if pid > last}
        if self._fork_events is None:
            found = self._forked_unseen(found, is_all=latest == pids)
        return found

    def _related(self, pids: list[int]) -> list[int]:
        """Return those `pids` whose parent is unknown, is a followed process, or is also in the result."""
        found: dict[int, None] = {}
        for pid in pids:
            parent = self._parents.get(pid)
            if parent is None or self._follows(parent) or parent in found:
                found[pid] = None
        return list(found)

    def _looked_at(self, pids: list[int]) -> list[Fork]:
        """Return a Fork for each of `pids`, except for threads and for this process itself.

        With fork events, a pid may have neither an event nor an entry in /proc yet. Such a pid is kept in
        `_beginning` for the next look. After _START_TIMEOUT seconds, a pid that still has neither counts as
        an ended process.
        """
        now = monotonic()
        before = self._beginning
        self._beginning = {}
        found = []
        for pid in pids:
            fork = self._look_at(pid)
            if fork is None:
                continue
            until = before.get(pid, now + _START_TIMEOUT)
            if self._fork_events is not None and fork.parent is None and not fork.alive and now < until:
                self._beginning[pid] = until
            else:
                found.append(fork)
        return found

    def _forked_unseen(self, found: list[Fork], *, is_all: bool) -> list[Fork]:
        """Return the forks in `found`; replace an unknown parent of an ended process if it can be inferred.

        The parent can be inferred if exactly one process in `found` has ended with an unknown parent, and
        exactly one client has waited for a new child. `is_all`: whether `found` has all processes that were
        forked since the last call of forks(); if it is False, nothing is inferred.
        """
        waited = self._families.who_waited()
        gone = [fork for fork in found if not fork.alive and fork.parent is None]
        is_all = is_all and self._read_last_pid() == self._last_pid
        if not is_all or len(gone) != 1 or len(waited) != 1:
            return found
        return [replace(fork, parent=waited[0]) if fork is gone[0] else fork for fork in found]

    def _look_at(self, pid: int) -> Fork | None:
        parent = self._parents.get(pid)
        status = read(f"/proc/{pid}/status")
        if status is None:
            return Fork(pid, parent, "", 0, 0, alive=False)
        known = fields(status)
        if int(known["Tgid"]) != pid or pid == self._own:
            return None
        uid = int(known["Uid"].split()[0])
        gid = int(known["Gid"].split()[0])
        alive = not known["State"].startswith(("Z", "X"))
        # A process whose parent has ended is a child of init, so pid 1 reveals nothing.
        if parent is None and (claimed := int(known["PPid"])) > 1:
            parent = claimed
        return Fork(pid, parent, known["Name"], uid, gid, alive)

    def follow(self, pid: int) -> None:
        if self._follows(pid) or self._follow_by_pidfd(pid):
            return
        start = _start_time(pid)
        if start is None:
            self._lost.append(pid)
        else:
            self._starts[pid] = start

    def _follows(self, pid: int) -> bool:
        return pid in self._pidfds or pid in self._starts

    def _follow_by_pidfd(self, pid: int) -> bool:
        """Follow a process by a pidfd; return False if no pidfd can be opened or the process has ended."""
        if len(self._pidfds) >= self._max_pidfds:
            return False
        try:
            fd = _open_pidfd(pid)
        except OSError:
            return False
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except OSError:
            os.close(fd)
            return False
        self._pidfds[pid] = fd
        self._pid_of[fd] = pid
        return True

    def exited(self) -> list[int]:
        ended = [self._pid_of[fd] for fd, _ in self._epoll.poll(0) if fd in self._pid_of]
        for pid in list(self._starts)[:_STARTS_PER_LOOK]:
            if self._runs_on(pid):
                self._starts.move_to_end(pid)
            else:
                ended.append(pid)
        ended += self._lost
        self._lost = []
        for pid in ended:
            self._unfollow(pid)
        return ended

    def has_ended(self, pid: int) -> bool:
        if pid not in self._starts or self._runs_on(pid):
            return False
        self._unfollow(pid)
        return True

    def _runs_on(self, pid: int) -> bool:
        """Return True if a process without a pidfd may still run; False if it has certainly ended."""
        before = self._starts[pid]
        now = _start_time(pid)
        if now is None:
            return False
        if before == _UNKNOWN:
            self._starts[pid] = now
        return _UNKNOWN in (before, now) or before == now

    def _unfollow(self, pid: int) -> None:
        self._starts.pop(pid, None)
        self._families.forget(pid)
        self._names.pop(pid, None)
        fd = self._pidfds.pop(pid, None)
        if fd is not None:
            del self._pid_of[fd]
            os.close(fd)
        comm = self._comms.pop(pid, None)
        if comm is not None:
            os.close(comm)

    def comm(self, pid: int) -> str | None:
        """Return the current name of the process, or None if it has ended.

        The files /proc/PID/comm stay open, up to a limit, so a read of an open one takes 1 us.
        """
        name = self._names.get(pid)
        if name is not None:
            return name
        name = self._look_at_comm(pid)
        if name is not None and self._relies_on_events and self._follows(pid):
            self._names[pid] = name
        return name

    def known_comm(self, pid: int) -> str | None:
        return self._names.get(pid)

    def _look_at_comm(self, pid: int) -> str | None:
        if self._fork_events is None:
            self._families.add(pid)
        fd = self._comms.get(pid)
        try:
            if fd is not None:
                return _comm(os.pread(fd, 16, 0))
        except OSError:
            # The process has ended, and another process may have its pid already.
            os.close(self._comms.pop(pid))
        try:
            fd = os.open(f"/proc/{pid}/comm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        self._comms[pid] = fd
        try:
            return _comm(os.pread(fd, 16, 0))
        except OSError:
            return None
        finally:
            if len(self._comms) > self._max_comms:
                os.close(self._comms.popitem(last=False)[1])

    def pinned_to(self, pid: int) -> int | None:
        try:
            allowed = os.sched_getaffinity(pid)
        except OSError:
            return None
        return min(allowed) if len(allowed) == 1 < self._cpus else None

    def call(self, pid: int, uid: int, instead: str | None = None) -> ClientCall | None:
        """Return the system call in which a process of root or the daemon's user waits; see client_call().

        Return None for a process of another user, which could delay each read of its memory up to the
        timeout.
        """
        return client_call(pid, self._memory, instead) if uid in (0, self._uid) else None

    def next_fd(self, pid: int) -> int | None:
        return next_fd(pid)

    def program(self, pid: int, comm: str) -> str | None:
        try:
            is_own = os.stat(f"/proc/{pid}").st_uid in (0, self._uid)
        except OSError:
            return None
        return program_of(pid, comm, self._memory if is_own else None)

    def set_wait_context(self, waiting: Callable[[], AbstractContextManager[object]]) -> None:
        self._memory.waiting = waiting

    def close(self) -> None:
        self._memory.close()
        for fd in (self._loadavg, *self._pidfds.values(), *self._comms.values()):
            os.close(fd)
        self._epoll.close()
        if self._fork_events is not None:
            self._fork_events.close()


def _descriptor_bounds() -> tuple[int, int]:
    """Return the maximum number of pidfds, and the maximum number of open files /proc/PID/comm.

    Both depend on this process's limit of open files.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return _PIDFDS, _OPEN_COMMS
    free = max(0, most - len(os.listdir("/proc/self/fd")) - _SPARE)
    comms = min(_OPEN_COMMS, free // 4)
    return min(_PIDFDS, free - comms), comms


def _start_time(pid: int) -> str | None:
    """Return the start time of a process or thread in clock ticks since the boot, or None if it has ended.

    Return _UNKNOWN if the file can't be read for lack of a descriptor or of memory.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            values = file.read().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return _UNKNOWN
    return None if values[0] in ("Z", "X") else values[19]


def _fork_events() -> ForkEvents | None:
    try:
        return ForkEvents()
    except OSError:
        return None


def parent_of(pid: int) -> int | None:
    """Return the pid of the parent of a process, or of a thread's process; None if /proc is unreadable."""
    claimed = fields(read(f"/proc/{pid}/status") or "").get("PPid")
    return None if claimed is None else int(claimed)


def _pids_between(before: int, last: int, pid_max: int) -> Iterator[int]:
    """Return the pids after `before` up to `last`; the kernel's pid counter may have wrapped at `pid_max`."""
    if last >= before:
        return iter(range(before + 1, last + 1))
    return iter([*range(before + 1, pid_max), *range(300, last + 1)])


def _open_pidfd(pid: int) -> int:
    """Return a pidfd of the process or thread `pid`; FUSE reports the pid of the thread that makes a request.

    On a kernel without pidfds of threads, return that of the thread's process. Raises: OSError (the process
    or thread has ended, or no descriptor is free).
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
    try:
        return os.pidfd_open(pid, _PIDFD_THREAD)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # On an older kernel, a thread's end is noticed only when its process ends.
    leader = fields(read(f"/proc/{pid}/status") or "").get("Tgid", "")
    if not leader:
        raise ProcessLookupError(errno.ESRCH, "the thread has ended")
    return os.pidfd_open(int(leader))


@lru_cache(_OPEN_COMMS)
def _comm(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape").removesuffix("\n")
