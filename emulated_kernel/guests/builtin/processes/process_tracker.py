"""ProcessTracker: keeps a guest task of the same pid, name and owner for each host process."""

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
"""Flags that the C library's fork() passes to clone(2): CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID, SIGCHLD."""
INIT_PID = 1
PID_MAX = 4194304
"""Upper bound of pids, exclusive. Mirrors: include/linux/threads.h:PID_MAX_LIMIT (v6.1)."""
KTHREADD_PID = 2
MAX_UNNAMED = 8
"""Maximum number of newly forked tasks whose names are watched for an execve."""
MAX_TASKS = 500
"""Maximum number of tasks; above it, a task ends right after its fork, since tasks take guest memory."""
UNRELATED_SHARE = 0.25
"""Share of the time that the guest may spend on forks and exits of unrelated processes.

If it is used up, forks are left out, and exits wait.
"""
UNRELATED_MOST = 0.1
"""Maximum CPU seconds that forks and exits of unrelated processes may take in one request."""


class ProcessTracker(TaskObserver):
    """Keeps the guest's tasks in step with the host's processes."""

    def __init__(
        self, kernel: BuiltinKernel, runner: GuestRunner, watch: ProcessWatch, init: GuestTask
    ) -> None:
        self._kernel = kernel
        self._memory = kernel.machine.memory
        self._runner = runner
        self._events = runner.events
        self._buffers = kernel.buffers
        self._cpus = kernel.machine.config.cpus
        self._watch = watch
        self.call_of = watch.call
        """Returns the system call in which a process waits for kprobefs; see ProcessWatch.call."""
        self.next_fd = watch.next_fd
        """Returns the descriptor that a process's open(2) will return; see ProcessWatch.next_fd."""
        self._nr = kernel.syscall_numbers
        self._own_pid = watch.number(os.getpid())
        self.init = init
        self._by_pid: dict[int, GuestTask] = {INIT_PID: init}
        self._unnamed: deque[GuestTask] = deque(maxlen=MAX_UNNAMED)
        """Tasks that were forked lately and have their parents' names; most will soon call execve(2)."""
        self._unnamed_until = 0.0
        """Monotonic time until which names of `_unnamed` are watched."""
        self._clients: set[int] = set()
        """Pids of the processes that have made a request."""
        self._ended: dict[int, None] = {}
        """Pids of the processes whose tasks must still exit, in the order of their ends."""
        self._credit = UNRELATED_MOST
        """CPU seconds that forks and exits of unrelated processes may still take."""
        self._credited = monotonic()
        """Monotonic time when `_credit` was last increased."""
        self._events.watch(self)

    def __iter__(self) -> Iterator[GuestTask]:
        return iter(self._by_pid.values())

    def died(self, pid: int) -> None:
        """Forget a task that has ended."""
        task = self._by_pid.pop(pid, None)
        self._clients.discard(pid)
        if task is not None and task in self._unnamed:
            self._unnamed.remove(task)

    def task_of(self, pid: int, uid: int, gid: int) -> GuestTask:
        """Return the task of the process that makes a request, after earlier events on the host are replayed.

        Return init's task if the request has no process (pid 0: the host's kernel makes it). Also return it
        if the guest lacks the memory for a task, since files that free memory must stay usable.

        Raises: KernelError EIO (the guest's task list is corrupted).
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
        """Pin a task to one of the guest's CPUs if its process is pinned to one host CPU; else unpin it."""
        pinned = self._watch.pinned_to(task.pid)
        cpu = None if pinned is None else pinned % self._cpus
        if cpu == task.cpu:
            return
        mask = (1 << self._cpus) - 1 if cpu is None else 1 << cpu
        with self._buffers.borrowed() as buffer:
            self._memory.write(buffer, mask.to_bytes(8, "little"))
            self._runner.syscall(task, self._nr["sched_setaffinity"], 0, 8, buffer)
        task.cpu = cpu

    def known(self, pid: int) -> GuestTask:
        """Return the task that made the last request of a process."""
        return self._by_pid.get(self._watch.number(pid), self.init) if pid > INIT_PID else self.init

    def _adopt_or_stand_in(self, pid: int, comm: str, uid: int, gid: int) -> GuestTask:
        """Return a new task for a process, or init's task if the guest lacks memory."""
        try:
            return self._adopt(pid, comm, uid, gid)
        except KernelError as error:
            if error.errno != errno.ENOMEM:
                raise
            return self.init

    def worker(self) -> GuestTask:
        """Return the daemon's own task, in which calls run that may kill it; create it if there is none."""
        return self._by_pid.get(self._own_pid) or self._adopt(self._own_pid, "kprobefs", 0, 0)

    def resident(self, pid: int, comm: str) -> GuestTask:
        """Return the daemon's task of a pid that no host process has; create it if there is none.

        Raises: KernelError ENOMEM.
        """
        return self._by_pid.get(pid) or self._create(pid, comm, 0, 0)

    def unused_pid(self) -> int:
        """Return the highest pid that no task has.

        Hazard: a host process can have the same pid, so the task that gets it must end soon.
        """
        pid = PID_MAX - 1
        while pid in self._by_pid:
            pid -= 1
        return pid

    def catch_up(self, client: int = 0) -> None:
        """Replay in the guest the forks and exits of host processes since the last request.

        All forks and exits of clients are replayed. Unrelated processes get only a share of the time, because
        a fork can take long if it is traced.
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
        """Replay forks by clients, forks that led to this client, and until a deadline all other forks.

        The deadline is a CPU time of the thread.
        """
        ancestors = _ancestors(forks, client)
        for fork in forks:
            if thread_time() < until or fork.pid in ancestors or fork.parent in self._clients:
                self._fork(fork)

    def _exits(self, client: int, until: float) -> None:
        """Replay exits of clients, the exit of a process with this client's pid, and others until a deadline.

        The deadline is a CPU time of the thread.
        """
        is_over = False
        for pid in list(self._ended):
            if not is_over or pid == client or pid in self._clients:
                del self._ended[pid]
                self.exit(pid)
                is_over = thread_time() > until

    def _look_for_execs(self) -> None:
        """Rename new tasks whose processes have called execve(2) since their fork.

        Reading a name takes 1 us, so only tasks forked within EXEC_WITHIN seconds are checked.
        """
        if monotonic() > self._unnamed_until:
            self._unnamed.clear()
        for task in list(self._unnamed):
            self._set_comm(task, self._watch.comm(task.pid))

    def _fork(self, fork: Fork) -> None:
        """Replay a host fork as kernel_clone in the parent's task; ignore it if the parent is unknown."""
        parent = self._parent(fork)
        if fork.pid in self._by_pid or parent is None:
            return
        if parent in self._unnamed and fork.comm != parent.comm:
            # The parent is a shell that was executed before it forked.
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
        """Let a task fork a child with this pid; return the child's task, or None if the fork has failed.

        Raises: KernelError EIO.
        """
        self._kernel.set_field(parent.addr, "host_clone_pid", pid)
        if self._runner.syscall(parent, self._nr["clone"], FORK_FLAGS, 0, 0, 0, 0) != pid:
            return None
        found = self._kernel.find_task(pid)
        if not found:
            raise KernelError(errno.EIO, f"the task list lacks task {pid}, which was made just now")
        child = GuestTask(pid, found, parent.comm, parent.uid, parent.gid, parent.cpu)
        self._runner.add(child)
        self._by_pid[pid] = child
        for tell in self._events.forked:
            tell(parent.pid, pid)
        return child

    def _parent(self, fork: Fork) -> GuestTask | None:
        """Return the task that must fork, or None if it is unknown, has ended or is in a system call."""
        if fork.parent is None:
            return None
        parent = self._by_pid.get(fork.parent) or self._bystander(fork.parent, fork)
        # If the parent sleeps in a blocking read, another thread of its process has forked.
        return None if parent is None or parent.request is not None else parent

    def _bystander(self, pid: int, fork: Fork) -> GuestTask | None:
        """Return a new task for an unrelated process that has forked; its owner is taken from the child."""
        comm = self._watch.comm(pid) if pid > KTHREADD_PID else None
        return None if comm is None else self._adopt_or_stand_in(pid, comm, fork.uid, fork.gid)

    def _adopt(self, pid: int, comm: str, uid: int, gid: int) -> GuestTask:
        """Return a new task for a process that is first seen at its request.

        The parent's task forks it, if the parent is known. If not, the task is created without a fork.
        """
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
            addr = self._runner.syscall(self.init, number, pid, INIT_PID, name, uid, gid)
        addr = check(addr, self._memory.word_size)
        task = GuestTask(pid, addr, comm, uid, gid)
        self._runner.add(task)
        self._by_pid[pid] = task
        return task

    def _set_owner(self, task: GuestTask, uid: int, gid: int) -> None:
        """Set the task's user and group if the process has changed them."""
        if (uid, gid) != (task.uid, task.gid):
            self._kernel.set_owner(task.addr, uid, gid)
            task.uid = uid
            task.gid = gid

    def _set_comm(self, task: GuestTask, comm: str | None) -> None:
        """Rename a task whose process has called execve(2) or has changed its name.

        A task that sleeps in a system call keeps its name.
        """
        if not comm or comm == task.comm or task.request is not None:
            return
        if task in self._unnamed:
            self._unnamed.remove(task)
        program = program_of(self._watch.host_pid(task.pid), comm)
        with self._buffers.borrowed() as name:
            if program is not None:
                self._memory.write(name, os.fsencode(program) + b"\0")
                self._runner.syscall(task, self._nr["execve"], name, 0, 0)
            else:
                self._memory.write(name, _comm_bytes(comm))
                self._runner.syscall(task, self._nr["host_set_comm"], 0, name)
        task.comm = comm

    def exit(self, pid: int) -> None:
        """Let the task of a host process that has ended run do_exit."""
        task = self._by_pid.get(pid)
        if task is None or task is self.init:
            return
        self._runner.exit(task, self._nr["exit_group"])
        self.died(pid)
        for tell in self._events.exited:
            tell(pid)


def _ancestors(forks: Sequence[Fork], pid: int) -> set[int]:
    """Return the pids of a process and of its ancestors, as far as these forks show them."""
    parents = {fork.pid: fork.parent for fork in forks}
    found: set[int] = set()
    ancestor: int | None = pid
    while ancestor is not None and ancestor not in found:
        found.add(ancestor)
        ancestor = parents.get(ancestor)
    return found


def _comm_bytes(comm: str) -> bytes:
    """Return a name as task_struct.comm holds it: at most 15 bytes and a NUL."""
    return comm.encode("utf-8", "surrogateescape")[:15] + b"\0"
