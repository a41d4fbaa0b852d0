"""ProcessTracker: keeps a guest task for each host process, with the process's pid, name and owner."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator
from time import monotonic

from emulated_kernel.guests.builtin.builtin_kernel import BuiltinKernel
from emulated_kernel.guests.builtin.runner.guest_runner import GuestRunner, GuestTask
from emulated_kernel.guests.builtin.runner.syscalls import check
from emulated_kernel.guests.common.client_facts import UNKNOWN, ClientFacts
from emulated_kernel.guests.common.host_processes import EXEC_TIMEOUT, Fork, ProcessWatch
from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client

FORK_FLAGS = 0x01200011
"""Flags that the C library's fork() passes to clone(2): CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID, SIGCHLD."""
INIT_PID = 1
PID_MAX = 4194304
"""Upper bound of the guest's pids, exclusive.

Mirrors: include/linux/threads.h:PID_MAX_LIMIT (v6.1).
"""
MAX_UNNAMED = 8
"""Maximum number of newly forked tasks whose processes are checked for a new name, which an execve gives."""
MAX_TASKS = 500
"""Maximum number of tasks; above it, a task ends right after its fork, since tasks take guest memory."""
MAX_EXITS = 64
"""Maximum number of exits that are replayed in one request; further exits wait for the next request."""


class ProcessTracker(TaskObserver):
    """Keeps the guest's tasks in step with the host's processes.

    Pids are those of the guest, unless a text says that a pid is one on the host.
    """

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
        self._nr = kernel.syscall_numbers
        self._own_pid = watch.own_number()
        self._stand_in_pid: int | None = None
        """Pid of the task that has replaced the daemon's own task as worker; None if none has."""
        self.init = init
        self._by_pid: dict[int, GuestTask] = {INIT_PID: init}
        self._unnamed: deque[GuestTask] = deque(maxlen=MAX_UNNAMED)
        """Recently forked tasks that still have their parents' names; most will soon call execve(2)."""
        self._unnamed_until = 0.0
        """Time of time.monotonic() until which the names of the tasks in `_unnamed` are checked."""
        self._forked: list[Fork] = []
        """Forks that must still be replayed, oldest first."""
        self._ended: dict[int, None] = {}
        """Pids of ended processes whose tasks must still exit, in the order in which the processes ended."""
        self._events.watch(self)

    def __iter__(self) -> Iterator[GuestTask]:
        return iter(self._by_pid.values())

    def died(self, pid: int) -> None:
        """Remove the task with the pid `pid`, which has ended, from the tracker."""
        task = self._by_pid.pop(pid, None)
        if task is not None and task in self._unnamed:
            self._unnamed.remove(task)

    def facts(
        self, client: Client, unshown: str | None, instead: str | None = None, *, needs_fd: bool = True
    ) -> ClientFacts:
        """Read the facts about a client that the guest needs. Lock: not used; the reads can take 0.2 s.

        `unshown`: the name that unshown_program() has returned; if it is None, the program's path is not
        read. `instead`: see client_call(). `needs_fd`: if the client's call is an open(2), also find the
        descriptor that the call will return.
        """
        watch = self._watch
        pid = client.pid
        call = watch.call(pid, client.uid, instead) if client.is_calling else None
        opens = call is not None and call.opens and instead != ""
        next_fd = watch.next_fd(pid) if needs_fd and opens else None
        program = watch.program(pid, unshown) if unshown else None
        return ClientFacts(call, next_fd, unshown or "", program)

    def unshown_program(self, pid: int) -> str | None:
        """Return the name that a client got by an execve(2) that the guest has not repeated yet. Lock: held.

        Return None if there is no such execve, or if the client has ended. `pid`: the client's pid on the
        host.
        """
        if pid <= INIT_PID:
            return None
        self._look(pid)
        number = self._watch.number(pid)
        task = self._by_pid.get(number)
        comm = self._watch.comm(number)
        return comm if task is None or task.has_executed or comm != task.comm else None

    def task_of(self, client: int, uid: int, gid: int, facts: ClientFacts = UNKNOWN) -> GuestTask:
        """Repeat earlier forks and exits in the guest; return the task of the process that makes a request.

        `client`: pid on the host of this process. Pid 0 stands for the host's kernel, for which init's task
        is returned. Also return init's task if the guest lacks the memory for a task, since files that free
        memory must stay usable.

        Raises: KernelError EIO (the guest's task list is corrupted).
        """
        for notify in self._events.request_begins:
            notify()
        try:
            self.catch_up(client)
            if client <= INIT_PID:
                return self.init
            pid = self._watch.number(client)
            task = self._by_pid.get(pid)
            comm = self._watch.comm(pid)
            if task is None:
                task = self._adopt_or_stand_in(pid, comm or "?", uid, gid)
            else:
                self._set_owner(task, uid, gid)
            if comm != task.comm or task.has_executed or facts.program is not None:
                self._repeat_execve(task, comm, facts)
            if self._cpus > 1 and task.request is None:
                self._pin(task)
        except MemoryFault as fault:
            raise KernelError(errno.EIO, f"the task list leads to {fault}") from fault
        return task

    def _pin(self, task: GuestTask) -> None:
        """Pin a task to a guest CPU if its process is pinned to one host CPU; else unpin the task."""
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
        """Return the task of the process `pid` on the host; init's task if the process has none."""
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
        """Return the daemon's own task, which makes calls that may kill their task.

        Create it if it is missing.
        """
        if self._stand_in_pid is not None:
            return self.resident(self._stand_in_pid, "kprobefs")
        return self._by_pid.get(self._own_pid) or self._adopt(self._own_pid, "kprobefs", 0, 0)

    def replace_worker(self) -> None:
        """Make worker() return another task from now on, because the current one sleeps for ever.

        Hazard: a host process with the highest possible pid would make its requests in the new task.
        """
        self._stand_in_pid = self.unused_pid()

    def resident(self, pid: int, comm: str) -> GuestTask:
        """Return a task of the daemon, such as a workload's, by its pid; create the task if it is missing.

        `comm`: name for a new task. No host process may have the pid. Raises: KernelError ENOMEM (the guest
        lacks the memory).
        """
        return self._by_pid.get(pid) or self._create(pid, comm, 0, 0)

    def unused_pid(self) -> int:
        """Return the highest pid that no task has.

        Hazard: a host process can have the same pid, so the task that gets it should end soon.
        """
        pid = PID_MAX - 1
        while pid in self._by_pid:
            pid -= 1
        return pid

    def catch_up(self, client: int = 0) -> None:
        """Replay in the guest the forks and exits of clients and of their descendants since the last request.

        `client`: pid on the host of the process that makes the request; 0 if there is none.
        """
        self._look(client)
        while self._forked:
            self._fork(self._forked.pop(0))
        if self._ended:
            self._exits(self._watch.number(client) if client > INIT_PID else 0)
        if self._unnamed:
            self._look_for_execs()

    def has_news(self) -> bool:
        """Return True if forks, names or exits of the host's processes must be replayed. Lock: held."""
        self._look(0)
        return bool(self._forked or self._ended) or self._has_new_name()

    def _has_new_name(self) -> bool:
        """Return True if a recently forked process has got a new name by executing a program."""
        if monotonic() > self._unnamed_until:
            return False
        names = ((task.comm, self._watch.comm(task.pid)) for task in self._unnamed)
        return any(comm and comm != known for known, comm in names)

    def _look(self, client: int) -> None:
        """Take new forks and exits from the ProcessWatch, and queue them for replay.

        `client`: pid on the host of the process that makes the request; 0 if there is none. If this pid
        belonged to another process before, queue the exit of that process.
        """
        if self._watch.has_events():
            self._forked += self._watch.forks()
            self._ended.update(dict.fromkeys(self._watch.exited()))
        if client > INIT_PID:
            pid = self._watch.number(client)
            if pid in self._by_pid and self._watch.has_ended(pid):
                self._ended[pid] = None

    def _exits(self, client: int) -> None:
        """Replay at most MAX_EXITS queued exits in the guest, oldest first.

        `client`: the guest's pid of the process that makes the request. If an earlier process had this pid,
        first replay the exit of that process, too.
        """
        for pid in [client, *list(self._ended)[:MAX_EXITS]]:
            if pid in self._ended:
                del self._ended[pid]
                self.exit(pid)

    def _look_for_execs(self) -> None:
        """Rename recently forked tasks whose processes have called execve(2) since the fork.

        Reading a name takes 1 us, so only tasks forked within EXEC_TIMEOUT seconds are checked.
        """
        if monotonic() > self._unnamed_until:
            self._unnamed.clear()
        for task in list(self._unnamed):
            self._follow_name(task, self._watch.comm(task.pid))

    def _fork(self, fork: Fork) -> None:
        """Replay a host's fork in the guest: make the parent's task call kernel_clone.

        Do nothing if the parent has no task that can fork, or if the child has a task already.
        """
        parent = self._parent(fork)
        if fork.pid in self._by_pid or parent is None:
            return
        if parent in self._unnamed and fork.comm != parent.comm:
            # The parent is a shell that was executed before it forked.
            self._follow_name(parent, self._watch.comm(parent.pid))
        child = self.clone(parent, fork.pid)
        if child is None:
            return
        if not fork.alive or len(self._by_pid) > MAX_TASKS:
            self.exit(child.pid)
            return
        self._watch.follow(child.pid)
        self._unnamed.append(child)
        self._unnamed_until = monotonic() + EXEC_TIMEOUT
        self._set_owner(child, fork.uid, fork.gid)
        self._follow_name(child, fork.comm)

    def clone(self, parent: GuestTask, pid: int) -> GuestTask | None:
        """Make a task fork a child with the pid `pid`; return the child's task, or None if the fork failed.

        Raises: KernelError EIO (the guest's task list lacks the new task).
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
        for notify in self._events.forked:
            notify(parent.pid, pid)
        return child

    def _parent(self, fork: Fork) -> GuestTask | None:
        """Return the task of a fork's parent.

        Return None if the parent is unknown, has ended or is in a system call.
        """
        parent = None if fork.parent is None else self._by_pid.get(fork.parent)
        # If the parent sleeps in a blocking read, another thread of its process has forked.
        return None if parent is None or parent.request is not None else parent

    def _adopt(self, pid: int, comm: str, uid: int, gid: int) -> GuestTask:
        """Return a new task for a process whose first known event is a request.

        The parent's task forks the new task, if the parent is known and can fork. If not, the task is
        created without a fork.
        """
        parent = self._by_pid.get(self._watch.parent(pid) or 0)
        task = None if parent is None or parent.request is not None else self.clone(parent, pid)
        if task is None:
            task = self._create(pid, comm, uid, gid)
        else:
            self._set_owner(task, uid, gid)
        self._watch.follow(pid)
        return task

    def _create(self, pid: int, comm: str, uid: int, gid: int) -> GuestTask:
        with self._buffers.borrowed() as name:
            self._memory.write(name, _comm_bytes(comm))
            number = self._nr["host_task_create"]
            addr = self._runner.syscall(self.init, number, pid, INIT_PID, name, uid, gid)
        addr = check(addr, self._memory.word_size)
        self._kernel.give_mm(addr)
        task = GuestTask(pid, addr, comm, uid, gid)
        self._runner.add(task)
        self._by_pid[pid] = task
        return task

    def _set_owner(self, task: GuestTask, uid: int, gid: int) -> None:
        """Set the task's user and group to `uid` and `gid`, if they differ from those of the task."""
        if (uid, gid) != (task.uid, task.gid):
            self._kernel.set_owner(task.addr, uid, gid)
            task.uid = uid
            task.gid = gid

    def _follow_name(self, task: GuestTask, comm: str | None) -> None:
        """Rename a task whose process has changed its name; do not repeat the execve(2) that changed it.

        The guest repeats the execve at the process's own request. Then the program's path is known, and
        whether a trace shows the execve does not depend on other processes' requests. A task in a system call
        keeps its name.
        """
        if not comm or comm == task.comm or task.request is not None:
            return
        self._rename(task, comm)
        task.has_executed = True

    def _rename(self, task: GuestTask, comm: str) -> None:
        if task in self._unnamed:
            self._unnamed.remove(task)
        with self._buffers.borrowed() as name:
            self._memory.write(name, _comm_bytes(comm))
            self._runner.syscall(task, self._nr["host_set_comm"], 0, name)
        task.comm = comm

    def _repeat_execve(self, task: GuestTask, comm: str | None, facts: ClientFacts) -> None:
        """Repeat the execve(2) that gave a client its name.

        If the program's path is unknown, only rename the task. `comm`: the client's name; None if the client
        has ended.
        """
        if task is self.init or task.request is not None:
            return
        if comm and facts.program is not None and facts.comm == comm and _is_new_name(task, comm):
            if task in self._unnamed:
                self._unnamed.remove(task)
            with self._buffers.borrowed() as name:
                self._memory.write(name, os.fsencode(facts.program) + b"\0")
                self._runner.syscall(task, self._nr["execve"], name, 0, 0)
            task.comm = comm
        if comm and comm != task.comm:
            self._rename(task, comm)
        task.has_executed = False

    def exit(self, pid: int) -> None:
        """Make the task with the pid `pid` call exit_group(2), because its host process has ended.

        Do nothing if there is no such task, or if it is init's task.
        """
        task = self._by_pid.get(pid)
        if task is None or task is self.init:
            return
        self._runner.exit(task, self._nr["exit_group"])
        self.died(pid)
        for notify in self._events.exited:
            notify(pid)


def _is_new_name(task: GuestTask, comm: str) -> bool:
    return task.has_executed or comm != task.comm


def _comm_bytes(comm: str) -> bytes:
    """Encode a name as in task_struct.comm: at most 15 bytes and a NUL."""
    return comm.encode("utf-8", "surrogateescape")[:15] + b"\0"
