"""The mirror: for each host process that uses us, a guest task of the same pid, name and owner."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator, Sequence
from time import monotonic, thread_time

from emulated_kernel.guests.builtin.builtin_kernel import BuiltinKernel
from emulated_kernel.guests.builtin.runner.guest_runner import GuestRunner, GuestTask
from emulated_kernel.guests.builtin.runner.syscalls import check
from emulated_kernel.guests.common.host_processes import EXEC_WITHIN, Fork, ProcessWatch
from emulated_kernel.guests.common.programs import program_of
from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.errors import KernelError

FORK_FLAGS = 0x01200011
"""CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID and SIGCHLD: what the C library's fork() passes to clone(2)."""
INIT_PID = 1
PID_MAX = 4194304
"""All pids are below. Mirrors: include/linux/threads.h:PID_MAX_LIMIT (v6.1)."""
KTHREADD_PID = 2
MAX_UNNAMED = 8
MAX_TASKS = 500
"""Beyond that many, a process that forks away from us leaves no task: its memory is the guest's."""
UNRELATED_SHARE, UNRELATED_MOST = 0.25, 0.1
"""Of the time, and CPU seconds of a request at most, for forks and exits of others than clients.

Beyond it forks are left out, and exits wait.
"""


class ProcessTracker(TaskObserver):
    """Keeps the guest's tasks in step with the host's processes."""

    def __init__(
        self, kernel: BuiltinKernel, executive: GuestRunner, watch: ProcessWatch, init: GuestTask
    ) -> None:
        self._kernel = kernel
        self._memory = kernel.machine.memory
        self._executive = executive
        self._events = executive.events
        self._buffers = kernel.buffers
        self._cpus = kernel.machine.config.cpus
        self._watch = watch
        self.call_of = watch.call
        """The system call in which a process waits for us, None where that can't be known."""
        self.next_fd = watch.next_fd
        """The descriptor that a process's open(2) will return, None where that can't be known."""
        self._nr = kernel.syscall_numbers
        self._own_pid = watch.number(os.getpid())
        self.init = init
        self._by_pid: dict[int, GuestTask] = {INIT_PID: init}
        self._unnamed: deque[GuestTask] = deque(maxlen=MAX_UNNAMED)
        """Forked lately and named like their parents: most of them are about to run execve."""
        self._unnamed_until = 0.0
        self._clients: set[int] = set()
        """Processes that have made a request."""
        self._ended: dict[int, None] = {}
        """Processes whose tasks are still to exit."""
        self._credit, self._credited = UNRELATED_MOST, monotonic()
        """Seconds that strangers have left, and when more were last given to them."""
        self._events.watch(self)

    def __iter__(self) -> Iterator[GuestTask]:
        return iter(self._by_pid.values())

    def died(self, pid: int) -> None:
        """See TaskEvents."""
        task = self._by_pid.pop(pid, None)
        self._clients.discard(pid)
        if task is not None and task in self._unnamed:
            self._unnamed.remove(task)

    def task_of(self, pid: int, uid: int, gid: int) -> GuestTask:
        """The task of the process that makes a request; what happened on the host before comes first.

        A request without a process (the host kernel's own, pid 0) is init's, and so is one for whose
        process the guest has no memory: files that free some must stay within reach. Raises: KernelError EIO
        (the guest's own data lead nowhere).
        """
        for tell in self._events.request_begins:
            tell()
        try:
            self.catch_up(pid)
            if pid <= INIT_PID:
                return self.init
            pid = self._watch.number(pid)
            self._clients.add(pid)
            task = self._by_pid.get(pid)
            comm = self._watch.comm(pid)
            if task is None:
                task = self._adopt_or_stand_in(pid, comm or "?", uid, gid)
            else:
                self._set_owner(task, uid, gid)
                self._set_comm(task, comm)
            if self._cpus > 1 and task.request is None:
                self._pin(task)
        except MemoryFault as fault:
            raise KernelError(errno.EIO, f"the task list leads to {fault}") from fault
        return task

    def _pin(self, task: GuestTask) -> None:
        """A process that may run on one CPU of the host runs on one of the guest's: so it calls for it."""
        pinned = self._watch.pinned_to(task.pid)
        cpu = None if pinned is None else pinned % self._cpus
        if cpu == task.cpu:
            return
        mask = (1 << self._cpus) - 1 if cpu is None else 1 << cpu
        with self._buffers.borrowed() as buffer:
            self._memory.write(buffer, mask.to_bytes(8, "little"))
            self._executive.syscall(task, self._nr["sched_setaffinity"], 0, 8, buffer)
        task.cpu = cpu

    def known(self, pid: int) -> GuestTask:
        """The task that the process's last request was made by."""
        return self._by_pid.get(self._watch.number(pid), self.init) if pid > INIT_PID else self.init

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

    def catch_up(self, client: int = 0) -> None:
        """Let the guest see the forks and exits of host processes since the last request.

        Those of clients all: strangers have a share of the time, where tracers make a fork take long.
        """
        forks: list[Fork] = []
        if self._watch.has_news():
            forks = self._watch.forks()
            self._ended.update(dict.fromkeys(self._watch.exited()))
        if forks or self._ended:
            now = monotonic()
            begun = thread_time()
            credit = min(UNRELATED_MOST, self._credit + UNRELATED_SHARE * (now - self._credited))
            self._forks(forks, client, begun + credit)
            self._exits(client, begun + credit)
            self._credit = max(0.0, credit - (thread_time() - begun))
            self._credited = now
        if self._unnamed:
            self._look_for_execs()

    def _forks(self, forks: list[Fork], client: int, until: float) -> None:
        """Of clients all, and those that led to this one."""
        ancestors = _ancestors(forks, client)
        for fork in forks:
            if thread_time() < until or fork.pid in ancestors or fork.parent in self._clients:
                self._fork(fork)

    def _exits(self, client: int, until: float) -> None:
        """Of clients all, and of whoever had the number of this one."""
        is_over = False
        for pid in list(self._ended):
            if not is_over or pid == client or pid in self._clients:
                del self._ended[pid]
                self.exit(pid)
                is_over = thread_time() > until

    def _look_for_execs(self) -> None:
        """Reading a name costs a microsecond a task: a task that has kept its name for long is left out."""
        if monotonic() > self._unnamed_until:
            self._unnamed.clear()
        for task in list(self._unnamed):
            self._set_comm(task, self._watch.comm(task.pid))

    def _fork(self, fork: Fork) -> None:
        """A host fork becomes kernel_clone in the parent's task; one whose parent isn't known isn't told."""
        parent = self._parent(fork)
        if fork.pid in self._by_pid or parent is None:
            return
        if parent in self._unnamed and fork.comm != parent.comm:
            # A shell that was just executed: what it forked came after that.
            self._set_comm(parent, self._watch.comm(parent.pid))
        child = self.clone(parent, fork.pid)
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
        self._kernel.set_field(parent.addr, "host_clone_pid", pid)
        if self._executive.syscall(parent, self._nr["clone"], FORK_FLAGS, 0, 0, 0, 0) != pid:
            return None
        found = self._kernel.find_task(pid)
        child = GuestTask(pid, found, parent.comm, parent.uid, parent.gid, parent.cpu)
        self._executive.add(child)
        self._by_pid[pid] = child
        for tell in self._events.forked:
            tell(parent.pid, pid)
        return child

    def _parent(self, fork: Fork) -> GuestTask | None:
        """The task to fork in; None where it has ended or can't be told."""
        if fork.parent is None:
            return None
        parent = self._by_pid.get(fork.parent) or self._bystander(fork.parent, fork)
        # A parent that sleeps in a blocking read: on the host another thread of it forked.
        return None if parent is None or parent.request is not None else parent

    def _bystander(self, pid: int, fork: Fork) -> GuestTask | None:
        """A process that forked, and that was no client so far; its owner is taken from the child."""
        comm = self._watch.comm(pid) if pid > KTHREADD_PID else None
        return None if comm is None else self._adopt_or_stand_in(pid, comm, fork.uid, fork.gid)

    def _adopt(self, pid: int, comm: str, uid: int, gid: int) -> GuestTask:
        """A process first seen at its request: a task without a fork, where that lies in the past."""
        parent = self._by_pid.get(self._watch.parent(pid) or 0)
        task = None if parent is None or parent.request is not None else self.clone(parent, pid)
        if task is None:
            task = self._create(pid, comm, uid, gid)
        else:
            self._set_owner(task, uid, gid)
            self._set_comm(task, comm)
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
            self._kernel.set_owner(task.addr, uid, gid)
            task.uid = uid
            task.gid = gid

    def _set_comm(self, task: GuestTask, comm: str | None) -> None:
        """The process ran execve, or named itself anew; one that sleeps in a call keeps its name."""
        if not comm or comm == task.comm or task.request is not None:
            return
        if task in self._unnamed:
            self._unnamed.remove(task)
        program = program_of(self._watch.host_pid(task.pid), comm)
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
        self._executive.exit(task, self._nr["exit_group"])
        self.died(pid)
        for tell in self._events.exited:
            tell(pid)


def _ancestors(forks: Sequence[Fork], pid: int) -> set[int]:
    """A process and those that it comes from, as far as these forks tell."""
    parents = {fork.pid: fork.parent for fork in forks}
    found: set[int] = set()
    each: int | None = pid
    while each is not None and each not in found:
        found.add(each)
        each = parents.get(each)
    return found


def _comm_bytes(comm: str) -> bytes:
    """A name as task_struct.comm holds it: 15 bytes of any kind, and a NUL."""
    return comm.encode("utf-8", "surrogateescape")[:15] + b"\0"
