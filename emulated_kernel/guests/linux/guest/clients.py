"""LinuxClients: keeps a guest task for each client process, with the process's name, owner and pid.

A task has the pid of its process only if that pid is free in the guest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from emulated_kernel.guests.common.client_facts import ClientFacts, facts_of
from emulated_kernel.guests.common.host_processes import EXEC_TIMEOUT, Fork, ProcessWatch
from emulated_kernel.guests.linux.guest.execve import ExecObserver
from emulated_kernel.guests.linux.guest.tasks import LinuxTask, LinuxTasks
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client

_MAX_TASKS = 500
"""Maximum number of processes that have a task each; further processes share one task.

A task takes 64 KiB of guest memory.
"""
_SHARED = 0
"""Key in `_by_pid` of the task that several processes share; all other keys are pids.

It is the task of the processes beyond _MAX_TASKS and of those that are hidden in another pid namespace.
"""


class LinuxClients:
    """Keeps the guest's tasks in step with client processes and the children that they fork.

    The user who created the mount (`owner`) is root in the guest. So this user owns the guest's files that
    root owns.
    """

    def __init__(
        self,
        tasks: LinuxTasks,
        watch: ProcessWatch,
        owner: int,
        settle: Callable[[], None],
        lock: ControlLock,
    ) -> None:
        """Start with no tasks. `lock`: the control lock.

        `owner`: user id of the user who created the mount. `settle`: function that completes the earlier
        requests of clients. It is called before the guest repeats a later fork, exit, execve or change of
        owner of a client.
        """
        self._tasks = tasks
        self._lock = lock
        self._settle = settle
        self._executions = ExecObserver(tasks)
        self._watch = watch
        # lock.waiting is set later, by the FUSE server.
        watch.set_wait_context(lambda: lock.waiting())  # noqa: PLW0108
        self._owner = owner
        self._by_pid: dict[int, LinuxTask] = {}
        self._forked: list[Fork] = []
        """Forks that must still be repeated in the guest, oldest first."""
        self._ended: list[int] = []
        """Pids of ended processes whose tasks must still end in the guest."""
        self._is_closed = False
        self._unnamed: dict[int, float] = {}
        """Pid of a recently forked process -> time.monotonic() until which its new name is looked for."""

    def informed(self, client: Client) -> Client:
        """Return `client`, with the process's name and program path if they are new to the guest.

        They are new if the guest has not yet repeated the process's latest execve(2).
        Lock: taken to look for forks, exits and the process's new name, unless nothing has changed. It is not
        held while the program's path is read, which can take 0.1 s.
        """
        pid = client.pid
        task = self._by_pid.get(pid)
        watch = self._watch
        # Only the first request after an execve needs the lock for this.
        is_same = task is not None and not task.has_executed and (watch.known_comm(pid) or "") == task.comm
        if is_same and not watch.has_events():
            return client
        with self._lock.observing():
            unshown = self._unshown_program(pid)
        if unshown is None:
            return client
        program = watch.program(pid, unshown)
        return client._replace(facts=ClientFacts(comm=unshown, program=program))

    def _unshown_program(self, pid: int) -> str | None:
        """Return the process name (comm) of a client whose latest execve(2) the guest has not repeated.

        Return None if the guest has repeated the execve, or does not know the process yet.
        """
        if pid <= 0 or self._is_closed:
            return None
        self._look(pid)
        task = self._by_pid.get(pid)
        if task is None and all(fork.pid != pid for fork in self._forked):
            return None
        comm = self._watch.comm(pid)
        return comm if task is None or task.has_executed or comm != task.comm else None

    def task_of(self, client: Client, *, is_informed: bool = False) -> LinuxTask:
        """Repeat earlier forks and exits in the guest; return the task that makes a client's request.

        `is_informed`: True if informed() has already looked for forks and exits at this request. If False,
        look for them now.

        A shared task (see is_shared()) must not sleep, because calls of other clients wait for it.
        """
        pid = client.pid
        if self._unnamed or self._forked or self._ended or (not is_informed and self._watch.has_events()):
            self._look(pid)
            self.catch_up()
        task = self._by_pid.get(pid)
        if task is None or not task.alive or pid < 0:
            task = self._new_task(pid)
        owner = (0, 0) if client.uid == self._owner else (client.uid, client.gid)
        if owner != task.owner:
            self._settle()
            self._tasks.set_creds(task, *owner)
        comm = self._watch.comm(pid)
        if comm and (comm != task.comm or task.has_executed):
            try:
                self._repeat_execve(task, comm, facts_of(client))
            except KernelError:
                # The task has died of the execve that was repeated; its process goes on.
                return self._new_task(pid)
        return task

    def _new_task(self, pid: int) -> LinuxTask:
        """Return a live task for a process that has none: a new one, or the task that processes share.

        Processes share a task if they have no pid here, or if _MAX_TASKS processes have tasks; see
        is_shared().
        """
        task = self.known(pid) if pid > 0 else None
        if task is None:
            pid = _SHARED if pid <= 0 or len(self._by_pid) >= _MAX_TASKS else pid
            task = self.known(pid) or self._adopt(pid)
        return task

    def _follow_name(self, task: LinuxTask, comm: str | None) -> None:
        """Name a task `comm`, its process's new name; do not repeat the execve(2) that changed the name.

        Do nothing if `comm` is None, or is the task's name already.

        The guest repeats the execve at the process's own request. Then the program's path is known, and
        whether a trace shows the execve does not depend on other processes' requests.
        """
        if comm and comm != task.comm:
            self._settle()
            self._tasks.set_comm(task, comm)
            task.has_executed = True

    def _repeat_execve(self, task: LinuxTask, comm: str, facts: ClientFacts) -> None:
        """Repeat the execve(2) that gave a client its name; if its program is unknown, only rename the task.

        Raises: KernelError ESRCH (the execve has killed the task).
        """
        self._settle()
        self._unnamed.pop(task.pid, None)
        task.has_executed = False
        if facts.program is not None and facts.comm == comm and not self.is_shared(task):
            self._executions.execute(task, facts.program, comm)
        elif comm != task.comm:
            self._tasks.set_comm(task, comm)

    def execute(self, task: LinuxTask, program: str, comm: str) -> None:
        """Repeat the execve(2) of `program` by a task, and name the task `comm`.

        Raises: KernelError ESRCH (the execve has killed the task).
        """
        self._executions.execute(task, program, comm)

    def is_shared(self, task: LinuxTask) -> bool:
        """Return True if the task makes calls for several processes."""
        return task is self._by_pid.get(_SHARED)

    def known(self, pid: int) -> LinuxTask | None:
        """Return the live task of the process `pid`, or None if the process has none."""
        task = self._by_pid.get(pid)
        if task is not None and not task.alive:
            del self._by_pid[pid]
            return None
        return task

    def _adopt(self, pid: int) -> LinuxTask:
        """Fork from init the task of a process for which the guest has repeated no fork; return the task.

        `pid`: pid of the process, or _SHARED for the task that processes share.
        """
        task = self._fork(self._tasks.init, pid)
        comm = self._watch.comm(pid)
        if comm:
            self._tasks.set_comm(task, comm)
        return task

    def _fork(self, parent: LinuxTask, pid: int) -> LinuxTask:
        self._settle()
        task = self._tasks.fork(parent, pid)
        self._by_pid[pid] = task
        if pid != _SHARED:
            self._watch.follow(pid)
        return task

    def has_news(self) -> bool:
        """Return True if the guest must still repeat a fork, exit or new name of a client. Lock: held."""
        self._look(0)
        return bool(self._forked or self._ended) or self._has_new_name()

    def _has_new_name(self) -> bool:
        """Return True if a recently forked process has executed a program, so that its name has changed."""
        for pid in self._unnamed:
            task = self._by_pid.get(pid)
            comm = self._watch.comm(pid)
            if task is not None and comm and comm != task.comm:
                return True
        return False

    def _look(self, client: int) -> None:
        """Queue the forks and exits that the process watch has seen since the last call.

        `client`: pid of the process that makes the request, or 0 if no process does. If the watch finds that
        this process has ended, queue its exit as well.
        """
        if self._watch.has_events():
            self._forked += self._watch.forks()
            self._ended += self._watch.exited()
        if client in self._by_pid and self._watch.has_ended(client):
            self._ended.append(client)

    def catch_up(self) -> None:
        """Repeat in the guest the queued forks and exits of client processes.

        Also rename the tasks of recently forked processes whose names have changed.
        """
        while self._forked:
            fork = self._forked.pop(0)
            if fork.parent is None:
                continue
            parent = self.known(fork.parent)
            if parent is None or parent.pending or self.known(fork.pid) or len(self._by_pid) >= _MAX_TASKS:
                continue
            # The client of this request is not responsible for a fork that fails for lack of guest memory.
            with suppress(KernelError):
                if fork.comm != parent.comm:
                    # The parent has executed a program, such as a shell, before it forked this child.
                    self._follow_name(parent, self._watch.comm(fork.parent))
                child = self._fork(parent, fork.pid)
                self._unnamed[fork.pid] = monotonic() + EXEC_TIMEOUT
                self._follow_name(child, fork.comm)
        while self._ended:
            self._settle()
            self.end(self._ended.pop(0))
        if self._unnamed:
            self._look_for_execs()

    def _look_for_execs(self) -> None:
        """Rename the tasks of recently forked processes whose names have changed since the fork.

        Reading a name takes a microsecond, so tasks that were forked long ago are skipped.
        """
        now = monotonic()
        for pid, until in list(self._unnamed.items()):
            task = self.known(pid)
            if task is None or now > until:
                del self._unnamed[pid]
            elif not task.pending:
                with suppress(KernelError):
                    self._follow_name(task, self._watch.comm(pid))

    def end(self, pid: int) -> None:
        """End the guest task of the host process `pid`.

        Call this if the process has ended, or no longer waits for the call in which the task sleeps.
        """
        task = self._by_pid.pop(pid, None)
        if task is not None:
            try:
                self._tasks.exit(task)
            except KernelError:
                # A task that cannot be killed now ends when its call returns.
                task.alive = False

    def close(self) -> None:
        """Stop watching processes. Lock: held."""
        self._is_closed = True
        self._watch.close()
