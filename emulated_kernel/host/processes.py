"""What happened on the host since the last request: processes forked, ended, renamed by exec."""

from __future__ import annotations

import errno
import os
import select
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

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
    """None when the process had ended before it could be looked at."""
    comm: str
    uid: int
    gid: int
    alive: bool


class ProcessWatch(Protocol):
    """How the mirror learns of host processes; tests put a scripted one in its place."""

    def forks(self) -> list[Fork]: ...

    def exited(self) -> list[int]: ...

    def comm(self, pid: int) -> str | None: ...

    def follow(self, pid: int) -> None: ...

    def close(self) -> None: ...


class HostProcesses:
    """Watches /proc cheaply: one read of the last pid and one epoll call a look, about 3 us."""

    def __init__(self) -> None:
        self._loadavg = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        self._seen = b""
        self._last_pid = self._read_last_pid()
        self._pid_max = int(_read("/proc/sys/kernel/pid_max") or 1 << 22)
        self._own = os.getpid()
        self._epoll = select.epoll()
        self._pidfds: dict[int, int] = {}
        self._pid_of: dict[int, int] = {}
        self._comms: OrderedDict[int, int] = OrderedDict()
        self._lost: list[int] = []

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
        pids = list(_pids_between(self._last_pid, last, self._pid_max))
        self._last_pid = last
        found = (self._look_at(pid) for pid in pids[-MAX_FORKS_PER_LOOK:])
        return [fork for fork in found if fork is not None]

    def _look_at(self, pid: int) -> Fork | None:
        status = _read(f"/proc/{pid}/status")
        if status is None:
            return Fork(pid, None, "", 0, 0, alive=False)
        fields = _fields(status)
        if int(fields["Tgid"]) != pid or pid == self._own:
            return None
        uid, gid = int(fields["Uid"].split()[0]), int(fields["Gid"].split()[0])
        alive = not fields["State"].startswith(("Z", "X"))
        return Fork(pid, int(fields["PPid"]), fields["Name"], uid, gid, alive)

    def follow(self, pid: int) -> None:
        """Report this process, or thread of one, in `exited` once it has ended."""
        if pid in self._pidfds:
            return
        try:
            fd = _open_pidfd(pid)
        except OSError:
            # It has ended meanwhile, or there are too many to follow: better no task than one for ever.
            self._lost.append(pid)
            return
        self._pidfds[pid], self._pid_of[fd] = fd, pid
        self._epoll.register(fd, select.EPOLLIN)

    def exited(self) -> list[int]:
        """Followed processes that have ended since the last call."""
        events = self._epoll.poll(0)
        if not events and not self._lost:
            return []
        ended = [self._pid_of[fd] for fd, _ in events]
        for pid in ended:
            self._unfollow(pid)
        lost, self._lost = self._lost, []
        return ended + lost

    def _unfollow(self, pid: int) -> None:
        fd = self._pidfds.pop(pid)
        del self._pid_of[fd]
        os.close(fd)
        comm = self._comms.pop(pid, None)
        if comm is not None:
            os.close(comm)

    def comm(self, pid: int) -> str | None:
        """The process's name now, None when it has ended. An open file a process makes this 1 us."""
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

    def close(self) -> None:
        for fd in (self._loadavg, *self._pidfds.values(), *self._comms.values()):
            os.close(fd)
        self._epoll.close()


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

    def forks(self) -> list[Fork]:
        return []

    def exited(self) -> list[int]:
        return []

    def comm(self, pid: int) -> str | None:  # noqa: ARG002
        return None

    def follow(self, pid: int) -> None:
        pass

    def close(self) -> None:
        pass
