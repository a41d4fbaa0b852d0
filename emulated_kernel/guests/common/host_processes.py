"""What happened on the host since the last request: processes forked, ended, renamed by exec."""

from __future__ import annotations

import errno
import os
import select
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from time import monotonic

from emulated_kernel.guests.common.client_call import ClientCall, client_call, next_fd
from emulated_kernel.guests.common.families import Families
from emulated_kernel.guests.common.fork_events import ForkEvents
from emulated_kernel.guests.common.proc import fields, read
from emulated_kernel.util.fast_dataclass import dataclass

EXEC_WITHIN = 1.0
"""Seconds after a fork in which an execve is looked for; later the process's own requests name it."""
MAX_FORKS_PER_LOOK = 64
"""More forks than this between two requests are not followed one by one; only the latest are."""
_OPEN_COMMS = 64
_CHECK = 0.1
"""Seconds between two looks whether the host's kernel still tells: another listener may have ended that."""
_UNTOLD = 3
"""Looks in a row that find new pids of which nothing was told: one of them may be on its way."""
_BEGINS_WITHIN = 1.0
"""Seconds from a pid that somebody got to its process, which only then is told of and in /proc."""
_PIDFD_THREAD = os.O_EXCL
"""pidfd_open(2): of a thread that leads no process; since Linux 6.9."""


@dataclass(frozen=True)
class Fork:
    """A process that the host forked; `alive` is False when it has ended already."""

    pid: int
    parent: int | None
    """None where nobody can tell: it had ended before it could be looked at, or was left to init."""
    comm: str
    uid: int
    gid: int
    alive: bool


class ProcessWatch:
    """How the mirror learns of host processes; of this one, that nothing happens: for the API and for tests.

    call() and next_fd() take the host's pid, the others what number() made of it.
    """

    def number(self, pid: int) -> int:
        """The pid that a process of the host has in the guest."""
        return pid

    def host_pid(self, number: int) -> int:
        """The way back."""
        return number

    def parent(self, number: int) -> int | None:  # noqa: ARG002
        """Who has just forked the process, in the guest's pids, if forks() doesn't tell; None: nobody."""
        return None

    def has_news(self) -> bool:
        """Whether forks() or exited() may tell something; comm() is of today behind that."""
        return False

    def forks(self) -> list[Fork]:
        """Processes forked since the last call, oldest first; threads are left out."""
        return []

    def exited(self) -> list[int]:
        """Followed processes that have ended since the last call."""
        return []

    def comm(self, pid: int) -> str | None:  # noqa: ARG002
        """The process's name now, None when it has ended."""
        return None

    def follow(self, pid: int) -> None:
        """Report this process, or thread of one, in `exited` once it has ended."""

    def pinned_to(self, pid: int) -> int | None:  # noqa: ARG002
        """The one CPU of several that the process may run on, None if it has more."""
        return None

    def call(self, pid: int, uid: int) -> ClientCall | None:  # noqa: ARG002
        """The system call in which it waits for us, None where that can't be known."""
        return None

    def next_fd(self, pid: int) -> int | None:  # noqa: ARG002
        """The descriptor that its open(2) will return, None where that can't be known."""
        return None

    def close(self) -> None:
        """Give back what it holds."""


class HostProcesses(ProcessWatch):
    """Watches the host: one epoll call a look where its kernel tells of changes, else reads of /proc."""

    def __init__(self, *, sees_forks: bool = True) -> None:
        """`sees_forks`: forks() is called."""
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
        self._comms: OrderedDict[int, int] = OrderedDict()
        self._lost: list[int] = []
        self._fork_events = _fork_events() if sees_forks else None
        self._is_told = self._fork_events is not None
        """Nothing new is what it says by saying nothing."""
        if self._fork_events is not None:
            self._epoll.register(self._fork_events.fileno(), select.EPOLLIN)
        self._next_check = 0.0
        self._untold = 0
        self._names: dict[int, str] = {}
        """Of those that are followed, as long as no change is told."""
        self._parents: dict[int, int] = {}
        """As the host's kernel told, of processes that are still to be looked at."""
        self._beginning: dict[int, float] = {}
        """New pids of which it hasn't told, and that nobody has: until when they may be processes to come."""
        self._families = Families()
        """Of clients, on a host that tells of no forks."""

    def _read_last_pid(self) -> int:
        return int(os.pread(self._loadavg, 64, 0).rsplit(None, 1)[-1])

    def has_news(self) -> bool:
        if not self._is_told or self._lost or self._epoll.poll(0):
            return True
        return monotonic() >= self._next_check

    def _hear(self, events: ForkEvents) -> bool:
        """Take in what was told; whether anything was."""
        parents, named = events.take()
        self._parents.update(parents)
        if named is None:
            self._names.clear()
            return True
        for pid in named:
            self._names.pop(pid, None)
        if named:
            self._is_told = True
            self._untold = 0
        return bool(named)

    def _check(self, *, was_told: bool) -> None:
        """There are new pids; whether what is told can be relied on, or each look has to be one at /proc."""
        self._untold = 0 if was_told else self._untold + 1
        if self._untold >= _UNTOLD:
            self._is_told = False
            self._names.clear()

    def forks(self) -> list[Fork]:
        was_told = self._fork_events is not None and self._hear(self._fork_events)
        self._next_check = monotonic() + _CHECK
        seen = os.pread(self._loadavg, 64, 0)
        if seen == self._seen and not self._beginning:
            return []
        self._seen = seen
        last = int(seen.rsplit(None, 1)[-1])
        if last == self._last_pid and not self._beginning:
            return []
        pids = list(_pids_between(self._last_pid, last, self._pid_max))
        latest = pids[-MAX_FORKS_PER_LOOK:]
        self._last_pid = last
        if self._fork_events is not None and pids:
            self._check(was_told=self._hear(self._fork_events) or was_told)
        found = self._looked_at([*self._beginning, *latest])
        self._parents = {pid: parent for pid, parent in self._parents.items() if pid > last}
        if self._fork_events is None:
            found = self._forked_unseen(found, is_all=latest == pids)
        return found

    def _looked_at(self, pids: list[int]) -> list[Fork]:
        """Which of them are processes; those that may only be about to be are looked at the next time."""
        now = monotonic()
        before = self._beginning
        self._beginning = {}
        found = []
        for pid in pids:
            fork = self._look_at(pid)
            if fork is None:
                continue
            until = before.get(pid, now + _BEGINS_WITHIN)
            if self._fork_events is not None and fork.parent is None and not fork.alive and now < until:
                self._beginning[pid] = until
            else:
                found.append(fork)
        return found

    def _forked_unseen(self, found: list[Fork], *, is_all: bool) -> list[Fork]:
        """With the one parent that can be told by what clients have waited for.

        If one process alone has come and gone, it is what a client has waited for that had none before.
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
        # Whoever lost its parent is init's child, and so says nothing.
        if parent is None and (claimed := int(known["PPid"])) > 1:
            parent = claimed
        return Fork(pid, parent, known["Name"], uid, gid, alive)

    def follow(self, pid: int) -> None:
        if pid in self._pidfds:
            return
        # It has ended meanwhile, or there are too many to follow: better no task than one for ever.
        try:
            fd = _open_pidfd(pid)
        except OSError:
            self._lost.append(pid)
            return
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except OSError:
            os.close(fd)
            self._lost.append(pid)
            return
        self._pidfds[pid], self._pid_of[fd] = fd, pid

    def exited(self) -> list[int]:
        events = self._epoll.poll(0)
        if not events and not self._lost:
            return []
        ended = [self._pid_of[fd] for fd, _ in events if fd in self._pid_of]
        for pid in ended:
            self._unfollow(pid)
        lost = self._lost
        self._lost = []
        for pid in lost:
            self._families.forget(pid)
        return ended + lost

    def _unfollow(self, pid: int) -> None:
        fd = self._pidfds.pop(pid)
        del self._pid_of[fd]
        self._families.forget(pid)
        self._names.pop(pid, None)
        os.close(fd)
        comm = self._comms.pop(pid, None)
        if comm is not None:
            os.close(comm)

    def comm(self, pid: int) -> str | None:
        """See ProcessWatch. An open file a process makes a look 1 us."""
        name = self._names.get(pid)
        if name is not None:
            return name
        name = self._look_at_comm(pid)
        if name is not None and self._is_told and pid in self._pidfds:
            self._names[pid] = name
        return name

    def _look_at_comm(self, pid: int) -> str | None:
        if self._fork_events is None:
            self._families.add(pid)
        fd = self._comms.get(pid)
        try:
            if fd is not None:
                return _comm(os.pread(fd, 16, 0))
        except OSError:
            # It has ended; another one may have its number by now.
            os.close(self._comms.pop(pid))
        try:
            return _comm(os.pread(self._open_comm(pid), 16, 0))
        except OSError:
            return None

    def _open_comm(self, pid: int) -> int:
        fd = os.open(f"/proc/{pid}/comm", os.O_RDONLY | os.O_CLOEXEC)
        self._comms[pid] = fd
        if len(self._comms) > _OPEN_COMMS:
            os.close(self._comms.popitem(last=False)[1])
        return fd

    def pinned_to(self, pid: int) -> int | None:
        try:
            allowed = os.sched_getaffinity(pid)
        except OSError:
            return None
        return min(allowed) if len(allowed) == 1 < self._cpus else None

    def call(self, pid: int, uid: int) -> ClientCall | None:
        """See client_call(). Not of others: who reads memory that they made can be kept waiting for ever."""
        return client_call(pid) if uid in (0, self._uid) else None

    def next_fd(self, pid: int) -> int | None:
        return next_fd(pid)

    def close(self) -> None:
        for fd in (self._loadavg, *self._pidfds.values(), *self._comms.values()):
            os.close(fd)
        self._epoll.close()
        if self._fork_events is not None:
            self._fork_events.close()


def _fork_events() -> ForkEvents | None:
    try:
        return ForkEvents()
    except OSError:
        return None


def parent_of(pid: int) -> int | None:
    """The parent of a process of the host, or of the process that a thread belongs to."""
    claimed = fields(read(f"/proc/{pid}/status") or "").get("PPid")
    return None if claimed is None else int(claimed)


def _pids_between(before: int, last: int, pid_max: int) -> Iterator[int]:
    """The pids after `before` up to `last`; the counter may have wrapped at `pid_max`."""
    if last >= before:
        return iter(range(before + 1, last + 1))
    return iter([*range(before + 1, pid_max), *range(300, last + 1)])


def _open_pidfd(pid: int) -> int:
    """A pidfd of a process, or of a thread: FUSE tells who of them asks. Raises: OSError."""
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
    # An older kernel: a thread's end is only seen with its process's.
    leader = fields(read(f"/proc/{pid}/status") or "").get("Tgid", "")
    if not leader:
        raise ProcessLookupError(errno.ESRCH, "the thread has ended")
    return os.pidfd_open(int(leader))


@lru_cache(_OPEN_COMMS)
def _comm(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape").removesuffix("\n")
