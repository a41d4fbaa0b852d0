"""The mirror: for each host process that uses us, a guest task of the same pid, name and owner."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.host.buffers import UserBuffers
from emulated_kernel.host.cells import GuestCells
from emulated_kernel.host.executive import Executive, GuestTask
from emulated_kernel.host.processes import Fork, ProcessWatch
from emulated_kernel.host.programs import program_of
from emulated_kernel.host.syscalls import check

SIGCHLD = 17
INIT_PID = 1
PID_MAX = 4194304
"""All pids are below. Mirrors: include/linux/threads.h:PID_MAX_LIMIT (v6.1)."""
KTHREADD_PID = 2
MAX_UNNAMED = 8
EXEC_WITHIN = 1.0
"""Seconds from a fork in which an execve is looked for; later its process's own requests tell."""
MAX_TASKS = 500
"""Beyond that many, a process that forks away from us leaves no task: its memory is the guest's."""


class UserMemory(Protocol):
    word_size: int

    def write(self, va: int, data: bytes) -> None: ...


class TaskMirror:
    """Keeps the guest's tasks in step with the host's processes. Callers hold the control lock."""

    def __init__(
        self,
        executive: Executive,
        cells: GuestCells,
        memory: UserMemory,
        buffers: UserBuffers,
        watch: ProcessWatch,
        find_task: Callable[[int], int],
        numbers: Mapping[str, int],
        init: GuestTask,
    ) -> None:
        self._executive = executive
        self._cells = cells
        self._memory = memory
        self._buffers = buffers
        self._watch = watch
        self._find_task = find_task
        self._nr = numbers
        self._own_pid = os.getpid()
        self.before_request: Callable[[], None] = lambda: None
        """Called before each request of a host process, while the guest stands still."""
        self.on_fork: Callable[[int, int], None] = lambda _parent, _child: None
        """Told the pids of a fork, once the guest has made it."""
        self.on_exit: Callable[[int], None] = lambda _pid: None
        """Told the pid of a process that ended, once its task did."""
        self.find_program: Callable[[int, str], str | None] = program_of
        """The path of the program that gave a process its name, if one did."""
        self.init = init
        self._by_pid: dict[int, GuestTask] = {INIT_PID: init}
        self._unnamed: deque[GuestTask] = deque(maxlen=MAX_UNNAMED)
        """Forked lately and named like their parents: most of them are about to run execve."""
        self._unnamed_until = 0.0
        self._last_client = init
        executive.on_death = self._forget

    def __iter__(self) -> Iterator[GuestTask]:
        return iter(self._by_pid.values())

    def _forget(self, task: GuestTask) -> None:
        if self._by_pid.get(task.pid) is task:
            del self._by_pid[task.pid]
        if task in self._unnamed:
            self._unnamed.remove(task)
        if self._last_client is task:
            self._last_client = self.init

    def task_of(self, pid: int, uid: int, gid: int) -> GuestTask:
        """The task of the process that makes a request; what happened on the host before comes first.

        A request without a process (the host kernel's own, pid 0) is init's, and so is one for whose
        process the guest has no memory: files that free some must stay within reach.
        """
        self.before_request()
        self.catch_up()
        if pid <= INIT_PID:
            return self.init
        task = self._by_pid.get(pid)
        comm = self._watch.comm(pid)
        if task is None:
            task = self._adopt_or_stand_in(pid, comm or "?", uid, gid)
        else:
            self._set_owner(task, uid, gid)
            self._set_comm(task, comm)
        self._last_client = task
        return task

    def known(self, pid: int) -> GuestTask:
        """The task that the process's last request was made by."""
        return self._by_pid.get(pid, self.init)

    def _adopt_or_stand_in(self, pid: int, comm: str, uid: int, gid: int) -> GuestTask:
        try:
            return self._adopt(pid, comm, uid, gid)
        except KernelError as error:
            if error.errno != errno.ENOMEM:
                raise
            return self.init

    def worker(self) -> GuestTask:
        """The daemon's own task, for calls that may kill it; then the next one takes its place."""
        return self._by_pid.get(self._own_pid) or self._adopt(self._own_pid, "kprobefs", 0, 0)

    def resident(self, pid: int, comm: str) -> GuestTask:
        """A task of the daemon's, of a pid that no process of the host has. Raises: KernelError ENOMEM."""
        return self._by_pid.get(pid) or self._create(pid, comm, 0, 0)

    def unused_pid(self) -> int:
        """The highest pid that no task has; a process of the host may get it as soon as it is given up."""
        pid = PID_MAX - 1
        while pid in self._by_pid:
            pid -= 1
        return pid

    def catch_up(self) -> None:
        """Let the guest see the forks and exits of host processes since the last request."""
        for fork in self._watch.forks():
            self._fork(fork)
        for pid in self._watch.exited():
            self.exit(pid)
        if self._unnamed:
            self._look_for_execs()

    def _look_for_execs(self) -> None:
        """Each look costs a microsecond a task: what kept its name for long is no more asked for it."""
        if monotonic() > self._unnamed_until:
            self._unnamed.clear()
        for task in list(self._unnamed):
            self._set_comm(task, self._watch.comm(task.pid))

    def _fork(self, fork: Fork) -> None:
        """A host fork becomes kernel_clone in the parent's task."""
        if fork.pid in self._by_pid:
            return
        child = self.clone(self._parent(fork), fork.pid)
        if child is None:
            return
        if not fork.alive or len(self._by_pid) > MAX_TASKS:
            self.exit(child.pid)
            return
        self._watch.follow(child.pid)
        self._unnamed.append(child)
        self._unnamed_until = monotonic() + EXEC_WITHIN
        self._set_owner(child, fork.uid, fork.gid)
        self._set_comm(child, fork.comm)

    def clone(self, parent: GuestTask, pid: int) -> GuestTask | None:
        """kernel_clone in a task; the child of that pid, None where there was none.

        Raises: KernelError EIO.
        """
        self._cells.set_field(parent.addr, "host_clone_pid", pid)
        if self._executive.syscall(parent, self._nr["clone"], SIGCHLD, 0, 0, 0, 0) != pid:
            return None
        child = GuestTask(pid, self._find_task(pid), parent.comm, parent.uid, parent.gid)
        self._executive.add(child)
        self._by_pid[pid] = child
        self.on_fork(parent.pid, pid)
        return child

    def _parent(self, fork: Fork) -> GuestTask:
        """The task to fork in; init's where the parent has ended or can't be told."""
        parent: GuestTask | None = self._last_client
        # Whose parent can't be told has ended already: most likely the last client forked it.
        if fork.parent is not None:
            parent = self._by_pid.get(fork.parent) or self._bystander(fork.parent, fork)
        # A parent that sleeps in a blocking read: on the host another thread of it forked.
        return self.init if parent is None or parent.request is not None else parent

    def _bystander(self, pid: int, fork: Fork) -> GuestTask | None:
        """A process that forked, and that was no client so far; its owner is taken from the child."""
        comm = self._watch.comm(pid) if pid > KTHREADD_PID else None
        return None if comm is None else self._adopt_or_stand_in(pid, comm, fork.uid, fork.gid)

    def _adopt(self, pid: int, comm: str, uid: int, gid: int) -> GuestTask:
        """A process first seen at its request: a task without a fork, since that lies in the past."""
        task = self._create(pid, comm, uid, gid)
        self._watch.follow(pid)
        return task

    def _create(self, pid: int, comm: str, uid: int, gid: int) -> GuestTask:
        with self._buffers.borrowed() as name:
            self._memory.write(name, _comm_bytes(comm))
            number = self._nr["host_task_create"]
            addr = self._executive.syscall(self.init, number, pid, INIT_PID, name, uid, gid)
        addr = check(addr, self._memory.word_size)
        task = GuestTask(pid, addr, comm, uid, gid)
        self._executive.add(task)
        self._by_pid[pid] = task
        return task

    def _set_owner(self, task: GuestTask, uid: int, gid: int) -> None:
        """The process took another identity, as it may after a fork."""
        if (uid, gid) != (task.uid, task.gid):
            self._cells.set_owner(task.addr, uid, gid)
            task.uid, task.gid = uid, gid

    def _set_comm(self, task: GuestTask, comm: str | None) -> None:
        """The process ran execve, or named itself anew; one that sleeps in a call keeps its name."""
        if not comm or comm == task.comm or task.request is not None:
            return
        if task in self._unnamed:
            self._unnamed.remove(task)
        program = self.find_program(task.pid, comm)
        with self._buffers.borrowed() as name:
            if program is not None:
                self._memory.write(name, os.fsencode(program) + b"\0")
                self._executive.syscall(task, self._nr["execve"], name, 0, 0)
            else:
                self._memory.write(name, _comm_bytes(comm))
                self._executive.syscall(task, self._nr["host_set_comm"], 0, name)
        task.comm = comm

    def exit(self, pid: int) -> None:
        """A host process ended: its task runs do_exit."""
        task = self._by_pid.get(pid)
        if task is None or task is self.init:
            return
        self._executive.exit(task, self._nr["exit"])
        self._forget(task)
        self.on_exit(pid)


def _comm_bytes(comm: str) -> bytes:
    """A name as task_struct.comm holds it: 15 bytes of any kind, and a NUL."""
    return comm.encode("utf-8", "surrogateescape")[:15] + b"\0"
