"""The mirror: for each host process that uses us, a guest task of the same pid, name and owner."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from emulated_kernel.errors import KernelError
from emulated_kernel.host.buffers import UserBuffers
from emulated_kernel.host.cells import GuestCells
from emulated_kernel.host.executive import Executive, GuestTask
from emulated_kernel.host.processes import Fork, ProcessWatch

SIGCHLD = 17
INIT_PID = 1


class UserMemory(Protocol):
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
        self.init = init
        self._by_pid: dict[int, GuestTask] = {INIT_PID: init}
        executive.on_death = self._forget

    def __iter__(self) -> Iterator[GuestTask]:
        return iter(self._by_pid.values())

    def _forget(self, task: GuestTask) -> None:
        if self._by_pid.get(task.pid) is task:
            del self._by_pid[task.pid]

    def task_of(self, pid: int, uid: int, gid: int) -> GuestTask:
        """The task of the process that makes a request; what happened on the host before comes first.

        A request without a process (the host kernel's own, pid 0) is init's.
        """
        self.catch_up()
        if pid <= INIT_PID:
            return self.init
        task = self._by_pid.get(pid)
        comm = self._watch.comm(pid)
        if task is None:
            return self._adopt(pid, comm or "?", uid, gid)
        if comm is not None and comm != task.comm and task.request is None:
            self._rename(task, comm)
        return task

    def worker(self) -> GuestTask:
        """The daemon's own task, for calls that may kill it; then the next one takes its place."""
        return self._by_pid.get(self._own_pid) or self._adopt(self._own_pid, "kprobefs", 0, 0)

    def catch_up(self) -> None:
        """Let the guest see the forks and exits of host processes since the last request."""
        for fork in self._watch.forks():
            self._fork(fork)
        for pid in self._watch.exited():
            self.exit(pid)

    def _fork(self, fork: Fork) -> None:
        """A host fork becomes kernel_clone in the parent's task."""
        if fork.pid in self._by_pid:
            return
        parent = self._by_pid.get(fork.parent) if fork.parent is not None else self._youngest()
        if parent is None or parent.request is not None:
            # It sleeps in a blocking read: on the host another thread of it forked.
            parent = self.init
        comm = fork.comm or parent.comm
        self._cells.set_field(parent.addr, "host_clone_pid", fork.pid)
        result = self._executive.syscall(parent, self._nr["clone"], SIGCHLD)
        if result != fork.pid:
            return
        child = GuestTask(fork.pid, self._find_task(fork.pid), parent.comm, fork.uid, fork.gid)
        self._executive.add(child)
        self._by_pid[child.pid] = child
        if not fork.alive:
            self.exit(child.pid)
            return
        self._watch.follow(child.pid)
        if comm != child.comm:
            self._rename(child, comm)

    def _youngest(self) -> GuestTask | None:
        """Who most likely forked a process that is gone already: the client seen last."""
        return next(reversed(self._by_pid.values()), None)

    def _adopt(self, pid: int, comm: str, uid: int, gid: int) -> GuestTask:
        """A process first seen at its request: a task without a fork, since that lies in the past."""
        with self._buffers.borrowed() as name:
            self._memory.write(name, comm.encode()[:15] + b"\0")
            number = self._nr["host_task_create"]
            addr = self._executive.syscall(self.init, number, pid, INIT_PID, name, uid, gid)
        addr &= (1 << 64) - 1
        if addr >= (1 << 64) - 4095:
            raise KernelError((1 << 64) - addr, f"no guest task for process {pid}")
        task = GuestTask(pid, addr, comm, uid, gid)
        self._executive.add(task)
        self._by_pid[pid] = task
        self._watch.follow(pid)
        return task

    def _rename(self, task: GuestTask, comm: str) -> None:
        """The process ran execve, or named itself anew."""
        with self._buffers.borrowed() as name:
            self._memory.write(name, comm.encode()[:15] + b"\0")
            self._executive.syscall(task, self._nr["host_set_comm"], 0, name)
        task.comm = comm

    def exit(self, pid: int) -> None:
        """A host process ended: its task runs do_exit."""
        task = self._by_pid.get(pid)
        if task is None or task is self.init:
            return
        self._executive.exit(task, self._nr["exit"])
        self._forget(task)
