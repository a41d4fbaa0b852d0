"""What happened on the host since the last request: processes forked, ended, renamed by exec."""

from __future__ import annotations

import errno
import os
import select
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from emulated_kernel.dataclass import dataclass
from emulated_kernel.host.client_call import ClientCall, client_call, next_fd
from emulated_kernel.host.mirror.fork_events import ForkEvents

MAX_FORKS_PER_LOOK = 64
"""More forks than this between two requests are not followed one by one; only the latest are."""
_OPEN_COMMS = 64
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


class ProcessWatch(Protocol):
    """How the mirror learns of host processes; tests put a scripted one in its place.

    call() and next_fd() take the host's pid, the others what number() made of it.
    """

    def number(self, pid: int) -> int:
        """The pid that a process of the host has in the guest."""

    def host_pid(self, number: int) -> int:
        """The way back."""

    def parent(self, number: int) -> int | None:
        """Who has just forked the process, in the guest's pids, if forks() doesn't tell; None: nobody."""

    def forks(self) -> list[Fork]: ...

    def exited(self) -> list[int]: ...

    def comm(self, pid: int) -> str | None: ...

    def follow(self, pid: int) -> None: ...

    def pinned_to(self, pid: int) -> int | None: ...

    def call(self, pid: int, uid: int) -> ClientCall | None: ...

    def next_fd(self, pid: int) -> int | None: ...

    def close(self) -> None: ...


class HostProcesses:
    """Watches /proc cheaply: one read of the last pid and one epoll call a look, about 3 us."""

    def __init__(self, *, sees_forks: bool = True) -> None:
        """`sees_forks`: forks() is called."""
        self._loadavg = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        self._seen = b""
        self._last_pid = self._read_last_pid()
        self._pid_max = int(_read("/proc/sys/kernel/pid_max") or 1 << 22)
        self._own = os.getpid()
        self._uid = os.geteuid()
        self._cpus = len(os.sched_getaffinity(0))
        self._epoll = select.epoll()
        self._pidfds: dict[int, int] = {}
        self._pid_of: dict[int, int] = {}
        self._comms: OrderedDict[int, int] = OrderedDict()
        self._lost: list[int] = []
        self._fork_events = _fork_events() if sees_forks else None
        self._parents: dict[int, int] = {}
        """As the host's kernel told, of processes that are still to be looked at."""
        self._latest = 0
        """The pid whose name was asked for last: the last client."""
        self._reaped: dict[int, int] = {}
        """Page faults of the children that a client had waited for, on a host that tells of no forks."""

    def number(self, pid: int) -> int:
        """The same."""
        return pid

    def host_pid(self, number: int) -> int:
        """The same."""
        return number

    def parent(self, number: int) -> int | None:  # noqa: ARG002
        """Nobody: a process seen first at its request was forked in the past."""
        return None

    def _read_last_pid(self) -> int:
        return int(os.pread(self._loadavg, 64, 0).rsplit(None, 1)[-1])

    def forks(self) -> list[Fork]:
        """Processes forked since the last call, oldest first; threads are left out."""
        seen = os.pread(self._loadavg, 64, 0)
        if seen == self._seen:
            return []
        self._seen = seen
        last = int(seen.rsplit(None, 1)[-1])
        if last == self._last_pid:
            return []
        pids = list(_pids_between(self._last_pid, last, self._pid_max))[-MAX_FORKS_PER_LOOK:]
        self._last_pid = last
        if self._fork_events is not None:
            self._parents.update(self._fork_events.parents())
        found = [fork for pid in pids if (fork := self._look_at(pid)) is not None]
        self._parents = {pid: parent for pid, parent in self._parents.items() if pid > last}
        if self._fork_events is None and any(not fork.alive and fork.parent is None for fork in found):
            parent = self._latest if self._has_reaped(self._latest) else None
            found = [fork if fork.alive or fork.parent else replace(fork, parent=parent) for fork in found]
        return found

    def _has_reaped(self, pid: int) -> bool:
        """Whether the process has waited for a child since the last look: its children's page faults tell."""
        before, now = self._reaped.get(pid), _faults_of_children(pid)
        if now is not None:
            self._reaped[pid] = now
        return before is not None and now is not None and now > before

    def _look_at(self, pid: int) -> Fork | None:
        parent = self._parents.get(pid)
        status = _read(f"/proc/{pid}/status")
        if status is None:
            return Fork(pid, parent, "", 0, 0, alive=False)
        fields = _fields(status)
        if int(fields["Tgid"]) != pid or pid == self._own:
            return None
        uid, gid = int(fields["Uid"].split()[0]), int(fields["Gid"].split()[0])
        alive = not fields["State"].startswith(("Z", "X"))
        # Whoever lost its parent is init's child, and so says nothing.
        if parent is None and (claimed := int(fields["PPid"])) > 1:
            parent = claimed
        return Fork(pid, parent, fields["Name"], uid, gid, alive)

    def follow(self, pid: int) -> None:
        """Report this process, or thread of one, in `exited` once it has ended."""
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
        """Followed processes that have ended since the last call."""
        events = self._epoll.poll(0)
        if not events and not self._lost:
            return []
        ended = [self._pid_of[fd] for fd, _ in events]
        for pid in ended:
            self._unfollow(pid)
        lost, self._lost = self._lost, []
        for pid in lost:
            self._reaped.pop(pid, None)
        return ended + lost

    def _unfollow(self, pid: int) -> None:
        fd = self._pidfds.pop(pid)
        del self._pid_of[fd]
        self._reaped.pop(pid, None)
        os.close(fd)
        comm = self._comms.pop(pid, None)
        if comm is not None:
            os.close(comm)

    def comm(self, pid: int) -> str | None:
        """The process's name now, None when it has ended. An open file a process makes this 1 us."""
        self._latest = pid
        if self._fork_events is None and pid not in self._reaped:
            self._reaped[pid] = _faults_of_children(pid) or 0
        fd = self._comms.get(pid)
        try:
            if fd is not None:
                return _read_comm(fd)
        except OSError:
            # It has ended; another one may have its number by now.
            os.close(self._comms.pop(pid))
        try:
            return _read_comm(self._open_comm(pid))
        except OSError:
            return None

    def _open_comm(self, pid: int) -> int:
        fd = os.open(f"/proc/{pid}/comm", os.O_RDONLY | os.O_CLOEXEC)
        self._comms[pid] = fd
        if len(self._comms) > _OPEN_COMMS:
            os.close(self._comms.popitem(last=False)[1])
        return fd

    def pinned_to(self, pid: int) -> int | None:
        """The one CPU of several that the process may run on, None if it has more."""
        try:
            allowed = os.sched_getaffinity(pid)
        except OSError:
            return None
        return min(allowed) if len(allowed) == 1 < self._cpus else None

    def call(self, pid: int, uid: int) -> ClientCall | None:
        """See client_call(). Not of others: who reads memory that they made can be kept waiting for ever."""
        return client_call(pid) if uid in (0, self._uid) else None

    def next_fd(self, pid: int) -> int | None:
        """See next_fd()."""
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


def _faults_of_children(pid: int) -> int | None:
    """Minor page faults of all children that the process has waited for."""
    line = _read(f"/proc/{pid}/stat")
    return None if line is None else int(line.rpartition(")")[2].split()[8])


def parent_of(pid: int) -> int | None:
    """The parent of a process of the host, or of the process that a thread belongs to."""
    claimed = _fields(_read(f"/proc/{pid}/status") or "").get("PPid")
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
    leader = _fields(_read(f"/proc/{pid}/status") or "").get("Tgid", "")
    if not leader:
        raise ProcessLookupError(errno.ESRCH, "the thread has ended")
    return os.pidfd_open(int(leader))


def _fields(status: str) -> dict[str, str]:
    """The lines of a /proc/PID/status; the name comes first, so that none in it hides another."""
    return dict(line.split(":\t", 1) for line in status.split("\n") if ":\t" in line)


def _read_comm(fd: int) -> str:
    return os.pread(fd, 16, 0).decode("utf-8", "surrogateescape").removesuffix("\n")


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return None


class NoProcesses:
    """A host on which nothing happens: for the Python API and for tests."""

    def number(self, pid: int) -> int:
        return pid

    def host_pid(self, number: int) -> int:
        return number

    def parent(self, number: int) -> int | None:  # noqa: ARG002
        return None

    def forks(self) -> list[Fork]:
        return []

    def exited(self) -> list[int]:
        return []

    def comm(self, pid: int) -> str | None:  # noqa: ARG002
        return None

    def follow(self, pid: int) -> None:
        pass

    def pinned_to(self, pid: int) -> int | None:  # noqa: ARG002
        return None

    def call(self, pid: int, uid: int) -> ClientCall | None:  # noqa: ARG002
        return None

    def next_fd(self, pid: int) -> int | None:  # noqa: ARG002
        return None

    def close(self) -> None:
        pass
