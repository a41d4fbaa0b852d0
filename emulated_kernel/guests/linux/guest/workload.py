"""LinuxWorkload: a task of a distribution's kernel that makes system calls, which probes can see."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import suppress
from errno import EINTR, EIO

from emulated_kernel.guests.common.workloads import WorkloadKind
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import Blocked, LinuxTask, LinuxTasks
from emulated_kernel.guests.linux.initramfs import BUFFER, TMPFS
from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault
from emulated_kernel.util.errors import KernelError

FILE_SIZE = 5120
"""Size in bytes of the file that a round of the workload FILES writes; more than a page."""
MESSAGE_SIZE = 512
"""Size of a message in bytes; less than the capacity of a pipe or connection."""
SLEEP_NS = 1_000_000
PATIENCE = 1_000_000
"""Maximum microseconds of guest time that a call sleeps before its round fails."""
PROGRAM = "/bin/true"
CHILD_PID = 4_190_000
"""Pid of the child that a round of the workload FORK creates, if no task has this pid."""
_AF_INET = 2
_STREAM = 1
_DATAGRAM = 2
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_LOOPBACK = 0x7F000001
_PORTS = {WorkloadKind.TCP: 7000, WorkloadKind.UDP: 7001, WorkloadKind.LOSS: 7002}
_SOL_SOCKET = 1
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_DROP_ALL = struct.pack("<HBBI", 0x06, 0, 0, 0)
"""A socket filter that keeps 0 bytes of each packet: BPF_RET | BPF_K."""
_LOSS_NS = 500_000_000
"""Nanoseconds for which packets are lost, so that a retransmission calls tcp_retransmit_skb().

The first retransmission may be a tail loss probe, which does not call this function. The loss lasts until
after the second retransmission, which calls it.
Mirrors: net/ipv4/tcp_output.c:tcp_send_loss_probe (v6.1).
"""


class LinuxWorkload:
    """A workload of one kind, made by a task of a Linux guest; see guests/common/workloads.py:Workload.

    Lock: held, for all methods.
    """

    def __init__(
        self,
        tasks: LinuxTasks,
        syscalls: LinuxSyscalls,
        execute: Callable[[LinuxTask, str, str], None],
        kind: WorkloadKind,
        pid: int,
    ) -> None:
        """Prepare a workload of the given kind. The first round creates its task.

        `execute`: makes a task execute a program; it takes the task, the program's path and the task's new
        name. `pid`: pid that the workload's task gets if it is free.
        """
        self._tasks = tasks
        self._sys = syscalls
        self._execute = execute
        self._kind = kind
        self._pid = pid
        self._task: LinuxTask | None = None
        self._socket = -1
        """Descriptor of the socket that all rounds share; -1 while there is none."""
        self._path = f"{TMPFS}/.load-{pid}"
        self._round: Callable[[LinuxTask], None] = {
            WorkloadKind.FORK: self._fork,
            WorkloadKind.FILES: self._files,
            WorkloadKind.PIPE: self._pipe,
            WorkloadKind.TCP: self._tcp,
            WorkloadKind.LOSS: self._tcp,
            WorkloadKind.UDP: self._udp,
            WorkloadKind.TIMERS: self._sleep,
        }[kind]

    def round(self) -> None:
        """Make the calls of one round; if the task was killed, replace it first.

        Raises: KernelError (with the errno of a failed call), EINTR (a call slept for too long), EIO (the
        guest has died, or data came back changed).
        """
        try:
            task = self._task
            if task is None or not task.alive:
                task = self._tasks.fork(self._tasks.init, self._pid)
                self._tasks.set_comm(task, f"load/{self._kind.value}")
                self._task = task
            self._round(task)
        except Blocked:
            assert task is not None
            self._tasks.exit(task)
            raise KernelError(EINTR, "a call slept for too long, so its task was killed") from None
        except (GuestFault, MemoryFault) as fault:
            raise KernelError(EIO, f"the guest has died: {fault}") from fault

    def end(self) -> None:
        """Remove the task and its files from the guest."""
        if self._tasks.machine.death:
            return
        with suppress(KernelError, GuestFault, MemoryFault):
            if self._socket >= 0:
                self._sys.close(self._tasks.init, self._socket)
        self._socket = -1
        for path in (self._path, f"{self._path}.new"):
            with suppress(KernelError, GuestFault, MemoryFault):
                self._sys.on_path(self._tasks.init, "unlinkat", path, 0)
        with suppress(KernelError, GuestFault, MemoryFault):
            if self._task is not None:
                self._tasks.exit(self._task)

    def _fork(self, task: LinuxTask) -> None:
        child = self._tasks.fork(task, CHILD_PID)
        try:
            self._execute(child, PROGRAM, os.path.basename(PROGRAM))
        finally:
            self._tasks.exit(child)

    def _files(self, task: LinuxTask) -> None:
        content = bytes(range(256)) * (FILE_SIZE // 256)
        fd = self._sys.open(task, self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._sys.write(task, fd, content, None)
            _expect(self._read(task, fd, FILE_SIZE, 0), content)
        finally:
            self._sys.close(task, fd)
        self._sys.on_paths(task, "renameat", self._path, f"{self._path}.new")
        self._sys.on_path(task, "unlinkat", f"{self._path}.new", 0)

    def _pipe(self, task: LinuxTask) -> None:
        self._call(task, "pipe2", BUFFER, 0)
        source, sink = struct.unpack("<ii", self._tasks.copy_from_user(task, BUFFER, 8))
        try:
            self._send(task, sink, source, b"p" * MESSAGE_SIZE)
        finally:
            self._sys.close(task, source)
            self._sys.close(task, sink)

    def _tcp(self, task: LinuxTask) -> None:
        if self._socket < 0:
            listener = self._bound(task, _STREAM)
            self._call(task, "listen", listener, 8)
            self._socket = listener
        opened = [self._call(task, "socket", _AF_INET, _STREAM, 0)]
        try:
            self._call(task, "connect", opened[0], BUFFER, self._put_address(task))
            opened.append(self._call(task, "accept4", self._socket, 0, 0, 0))
            client, served = opened
            if self._kind is WorkloadKind.LOSS:
                self._lose(task, client, served, b"?" * MESSAGE_SIZE)
            else:
                self._send(task, client, served, b"?" * MESSAGE_SIZE)
            self._send(task, served, client, b"!" * MESSAGE_SIZE)
        finally:
            for fd in opened:
                self._sys.close(task, fd)

    def _udp(self, task: LinuxTask) -> None:
        if self._socket < 0:
            self._socket = self._bound(task, _DATAGRAM)
            self._call(task, "connect", self._socket, BUFFER, self._put_address(task))
        self._send(task, self._socket, self._socket, b"u" * MESSAGE_SIZE)

    def _lose(self, task: LinuxTask, sink: int, source: int, message: bytes) -> None:
        """Send `message` through the socket `sink`, and make the socket `source` lose the first packets.

        For _LOSS_NS nanoseconds, a socket filter of `source` drops all packets. TCP then retransmits, and the
        message is read from `source`.
        """
        # struct sock_fprog: the number of instructions and their address.
        program = struct.pack("<HxxxxxxQ", 1, BUFFER + 16) + _DROP_ALL
        self._tasks.copy_to_user(task, BUFFER, program)
        self._call(task, "setsockopt", source, _SOL_SOCKET, _SO_ATTACH_FILTER, BUFFER, 16)
        self._sys.write(task, sink, message, None)
        self._nanosleep(task, _LOSS_NS)
        self._tasks.copy_to_user(task, BUFFER, bytes(4))
        self._call(task, "setsockopt", source, _SOL_SOCKET, _SO_DETACH_FILTER, BUFFER, 4)
        _expect(self._read(task, source, len(message), None), message)

    def _sleep(self, task: LinuxTask) -> None:
        self._nanosleep(task, SLEEP_NS)

    def _nanosleep(self, task: LinuxTask, nanoseconds: int) -> None:
        self._tasks.copy_to_user(task, BUFFER, struct.pack("<2q", 0, nanoseconds))
        self._call(task, "nanosleep", BUFFER, 0)

    def _bound(self, task: LinuxTask, kind: int) -> int:
        """Switch on the loopback device; return the descriptor of a new socket, bound to a loopback address.

        `kind`: type of the socket, such as SOCK_STREAM.
        """
        fd = self._call(task, "socket", _AF_INET, kind, 0)
        try:
            self._tasks.copy_to_user(task, BUFFER, struct.pack("<16sH22x", b"lo", _IFF_UP))
            self._call(task, "ioctl", fd, _SIOCSIFFLAGS, BUFFER)
            self._call(task, "bind", fd, BUFFER, self._put_address(task))
        except (KernelError, Blocked):
            self._sys.close(task, fd)
            raise
        return fd

    def _put_address(self, task: LinuxTask) -> int:
        """Write a loopback address to the task's buffer, and return the size of struct sockaddr_in.

        Each kind of workload has a different port in this address.
        """
        address = struct.pack("<H", _AF_INET) + struct.pack(">HI8x", _PORTS[self._kind], _LOOPBACK)
        self._tasks.copy_to_user(task, BUFFER, address)
        return len(address)

    def _send(self, task: LinuxTask, sink: int, source: int, message: bytes) -> None:
        self._sys.write(task, sink, message, None)
        _expect(self._read(task, source, len(message), None), message)

    def _read(self, task: LinuxTask, fd: int, size: int, offset: int | None) -> bytes:
        count = self._sys.begin_read(task, fd, size, offset, may_block=False)
        return self._sys.read_data(task, count, size)

    def _call(self, task: LinuxTask, name: str, *arguments: int) -> int:
        number = self._tasks.machine.abi.syscalls[name]
        return self._tasks.call(task, number, *arguments, patience=PATIENCE)


def _expect(got: bytes, wanted: bytes) -> None:
    """Check that the bytes `got` are equal to the bytes `wanted`. Raises: KernelError EIO (they differ)."""
    if got != wanted:
        raise KernelError(EIO, f"{len(got)} bytes came back, not the {len(wanted)} that were written")
