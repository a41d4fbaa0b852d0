"""BackgroundWorkload: a guest task that makes system calls, so that probes have code to hit."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Collection
from contextlib import suppress

from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask
from emulated_kernel.guests.common.request_clock import RequestObserver
from emulated_kernel.guests.common.workloads import WorkloadKind
from emulated_kernel.util.errors import KernelError

FILE_SIZE = 5120
"""Size in bytes of the file that a workload FILES writes in each round; more than a page."""
MESSAGE_SIZE = 512
"""Size of a message in bytes; less than the capacity of a pipe or connection."""
SLEEP_NS = 1_000_000
PROGRAM = "/bin/true"
_AF_INET = 2
_SOCK_STREAM = 1
_PORT = 7000
_LOOPBACK = 0x7F000001


SYSTEM_CALLS: dict[WorkloadKind, tuple[str, ...]] = {
    WorkloadKind.FORK: ("clone", "execve", "exit"),
    WorkloadKind.FILES: ("openat", "write", "pread64", "newfstat", "rename", "unlink", "close"),
    WorkloadKind.PIPE: ("pipe2", "write", "read", "close"),
    WorkloadKind.TCP: ("socket", "bind", "listen", "connect", "accept4", "write", "read", "close"),
    WorkloadKind.TIMERS: ("nanosleep",),
}
"""Kind of a workload -> system calls that it needs."""


def kinds_of(guest: Guest) -> Collection[WorkloadKind]:
    """Return the kinds of workloads for which this guest has all system calls."""
    has = guest.syscalls.has
    return [kind for kind, names in SYSTEM_CALLS.items() if all(has(name) for name in names)]


class BuiltinWorkloads:
    """Creates the workloads of kprobefs's own kernel; see WorkloadHost."""

    def __init__(self, guest: Guest, requests: RequestObserver) -> None:
        self._guest = guest
        self._requests = requests

    @property
    def is_dead(self) -> bool:
        """Whether the guest can't run any more; see WorkloadHost."""
        return self._guest.is_dead

    def kinds(self) -> Collection[WorkloadKind]:
        """Return the kinds of workloads whose system calls the kernel has; see WorkloadHost."""
        return kinds_of(self._guest)

    def workload(self, kind: WorkloadKind, pid: int) -> BackgroundWorkload:
        """Return a workload of the kind `kind`, whose task gets the pid `pid`; see WorkloadHost."""
        return BackgroundWorkload(self._guest, kind, pid)

    def slice_begins(self) -> None:
        """Count the slice as a request, and run the delayed work that is due; see WorkloadHost."""
        self._requests.request_begins()

    def slice_ends(self) -> None:
        """Do nothing, because this kernel has nothing to do after a client's request; see WorkloadHost."""


class BackgroundWorkload:
    """A workload of one kind. One guest task and its children make the workload's system calls.

    The task gets the constructor's `pid`, which no host process may have. After end(), the pids of the task
    and its children are free.
    """

    def __init__(self, guest: Guest, kind: WorkloadKind, pid: int) -> None:
        self._guest = guest
        self._sys = guest.syscalls
        self._memory = guest.kernel.machine.memory
        self._kind = kind
        self._pid = pid
        self._round: Callable[[GuestTask], None] = {
            WorkloadKind.FORK: self._fork,
            WorkloadKind.FILES: self._files,
            WorkloadKind.PIPE: self._pipe,
            WorkloadKind.TCP: self._tcp,
            WorkloadKind.TIMERS: self._sleep,
        }[kind]
        self._path = f"/scratch/.load-{pid}"
        self._listener = -1

    def round(self) -> None:
        """Make the calls of one round; if the task was killed, replace it first.

        Raises: KernelError (a call failed).
        """
        task = self._guest.processes.resident(self._pid, f"load/{self._kind.value}")
        self._round(task)

    def end(self) -> None:
        """Remove the task and its files from the guest."""
        if self._guest.is_dead:
            return
        with suppress(KernelError):
            if self._listener >= 0:
                self._guest.close_file(self._listener)
        self._listener = -1
        for path in (self._path, self._path + ".new"):
            with suppress(KernelError):
                self._sys.with_path(self._guest.processes.init, "unlink", path)
        with suppress(KernelError):
            self._guest.processes.exit(self._pid)

    def _fork(self, task: GuestTask) -> None:
        processes = self._guest.processes
        child = processes.clone(task, processes.unused_pid())
        if child is None:
            raise KernelError(errno.ENOMEM, "no memory for a child")
        try:
            with self._guest.buffers.borrowed() as name:
                self._memory.write(name, PROGRAM.encode() + b"\0")
                self._sys.call(child, "execve", name, 0, 0)
            self._sys.call(child, "getpid")
        finally:
            processes.exit(child.pid)

    def _files(self, task: GuestTask) -> None:
        content = bytes(range(256)) * (FILE_SIZE // 256)
        fd = self._sys.open(task, self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._sys.write(task, fd, content)
            _expect(self._sys.read(task, fd, FILE_SIZE, 0), content)
            self._sys.fstat(task, fd)
        finally:
            self._sys.call(task, "close", fd)
        self._sys.with_paths(task, "rename", self._path, self._path + ".new")
        self._sys.with_path(task, "unlink", self._path + ".new")

    def _pipe(self, task: GuestTask) -> None:
        with self._guest.buffers.borrowed() as ends:
            self._sys.call(task, "pipe2", ends, 0)
            source, sink = struct.unpack("<ii", self._memory.read(ends, 8))
        try:
            self._send(task, sink, source, b"p" * MESSAGE_SIZE)
        finally:
            self._sys.call(task, "close", source)
            self._sys.call(task, "close", sink)

    def _tcp(self, task: GuestTask) -> None:
        if self._listener < 0:
            self._listener = self._listen(task)
        client = self._socket(task)
        served = -1
        try:
            self._with_address(task, "connect", client)
            served = self._sys.call(task, "accept4", self._listener, 0, 0, 0)
            self._send(task, client, served, b"?" * MESSAGE_SIZE)
            self._send(task, served, client, b"!" * MESSAGE_SIZE)
        finally:
            for fd in (client, served):
                if fd >= 0:
                    self._sys.call(task, "close", fd)

    def _listen(self, task: GuestTask) -> int:
        fd = self._socket(task)
        try:
            self._with_address(task, "bind", fd)
            self._sys.call(task, "listen", fd, 8)
        except KernelError:
            self._sys.call(task, "close", fd)
            raise
        return fd

    def _socket(self, task: GuestTask) -> int:
        return self._sys.call(task, "socket", _AF_INET, _SOCK_STREAM, 0)

    def _with_address(self, task: GuestTask, name: str, fd: int) -> None:
        address = struct.pack("<H", _AF_INET) + struct.pack(">HI8x", _PORT, _LOOPBACK)
        with self._guest.buffers.borrowed() as buffer:
            self._memory.write(buffer, address)
            self._sys.call(task, name, fd, buffer, len(address))

    def _send(self, task: GuestTask, sink: int, source: int, message: bytes) -> None:
        self._sys.write(task, sink, message)
        _expect(self._sys.read(task, source, len(message)), message)

    def _sleep(self, task: GuestTask) -> None:
        with self._guest.buffers.borrowed() as request:
            self._memory.write(request, struct.pack("<2q", 0, SLEEP_NS))
            self._sys.call(task, "nanosleep", request, 0)


def _expect(got: bytes, wanted: bytes) -> None:
    """Check that data were read back unchanged. Raises: KernelError EIO."""
    if got != wanted:
        raise KernelError(errno.EIO, f"{len(got)} bytes came back, not the {len(wanted)} that were written")
