"""For each host process that makes requests a task of the guest: its name, owner and, if free, pid."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from emulated_kernel.guests.common.host_processes import EXEC_WITHIN, ProcessWatch
from emulated_kernel.guests.common.programs import program_of
from emulated_kernel.guests.linux.guest.execve import ExecObserver
from emulated_kernel.guests.linux.guest.tasks import LinuxTask, LinuxTasks
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client

_MAX_TASKS = 500
"""Processes beyond that many share a task: each takes 64 KiB of the guest's memory."""
_SHARED = 0
"""Pid of the processes that share one, and of those that another pid namespace hides."""


class LinuxClients:
    """Keeps the guest's tasks in step with those processes, and with what they fork.

    Who has mounted (`owner`) is root in the guest: its files are his.
    """

    def __init__(
        self, tasks: LinuxTasks, watch: ProcessWatch, owner: int, settle: Callable[[], None]
    ) -> None:
        """`settle`: does what clients have asked for so far, before the guest learns of what came next."""
        self._tasks = tasks
        self._settle = settle
        self._executions = ExecObserver(tasks)
        self._watch = watch
        self._owner = owner
        self._by_pid: dict[int, LinuxTask] = {}
        self._unnamed: dict[int, float] = {}
        """Forked lately and named like their parents, by pid, and until when an execve is looked for."""

    def task_of(self, client: Client) -> LinuxTask:
        """The task that makes a client's request; what happened on the host before comes first.

        One that is shared (see is_shared()) mustn't sleep, for others' calls wait behind it.
        """
        if self._unnamed or self._watch.has_news():
            self.catch_up()
        pid, uid, gid, _ = client
        task = self._by_pid.get(pid)
        if task is None or not task.alive or pid < 0:
            task = self._new_task(pid)
        owner = (0, 0) if uid == self._owner else (uid, gid)
        if owner != task.owner:
            self._settle()
            self._tasks.set_creds(task, *owner)
        comm = self._watch.comm(pid)
        if comm and comm != task.comm:
            try:
                self._rename(task, pid, comm)
            except KernelError:
                # Of what it executed; the process goes on.
                return self._new_task(pid)
        return task

    def _new_task(self, pid: int) -> LinuxTask:
        """Of a process that has none that lives: its own, or the one that is shared."""
        task = self.known(pid) if pid > 0 else None
        if task is None:
            pid = _SHARED if pid <= 0 or len(self._by_pid) >= _MAX_TASKS else pid
            task = self.known(pid) or self._adopt(pid)
        return task

    def _rename(self, task: LinuxTask, pid: int, comm: str | None) -> None:
        """The process ran execve, or named itself anew. Raises: KernelError ESRCH (it has ended of that)."""
        if not comm or comm == task.comm:
            return
        self._settle()
        self._unnamed.pop(pid, None)
        program = None if self.is_shared(task) else program_of(self._watch.host_pid(pid), comm)
        if program is None:
            self._tasks.set_comm(task, comm)
        else:
            self._executions.execute(task, program, comm)

    def is_shared(self, task: LinuxTask) -> bool:
        """Whether it makes the calls of more than one process."""
        return task is self._by_pid.get(_SHARED)

    def known(self, pid: int) -> LinuxTask | None:
        """The task of a process, if it has one that lives."""
        task = self._by_pid.get(pid)
        if task is not None and not task.alive:
            del self._by_pid[pid]
            return None
        return task

    def _adopt(self, pid: int) -> LinuxTask:
        """A process that is first seen at its request: what it ran lies in the past."""
        task = self._fork(self._tasks.init, pid)
        comm = self._watch.comm(pid)
        if comm:
            self._tasks.set_comm(task, comm)
        return task

    def _fork(self, parent: LinuxTask, pid: int) -> LinuxTask:
        self._settle()
        task = self._by_pid[pid] = self._tasks.fork(parent, pid)
        if pid != _SHARED:
            self._watch.follow(pid)
        return task

    def catch_up(self) -> None:
        """Let the guest see what its clients forked, and which of them have ended."""
        for fork in self._watch.forks():
            if fork.parent is None:
                continue
            parent = self.known(fork.parent)
            if parent is None or parent.pending or self.known(fork.pid) or len(self._by_pid) >= _MAX_TASKS:
                continue
            # Who makes this request has nothing to do with a fork that the guest has no room for.
            with suppress(KernelError):
                if fork.comm != parent.comm:
                    # A shell that was just executed: what it forked came after that.
                    self._rename(parent, fork.parent, self._watch.comm(fork.parent))
                child = self._fork(parent, fork.pid)
                self._unnamed[fork.pid] = monotonic() + EXEC_WITHIN
                self._rename(child, fork.pid, fork.comm)
        for pid in self._watch.exited():
            self._settle()
            self.end(pid)
        if self._unnamed:
            self._look_for_execs()

    def _look_for_execs(self) -> None:
        """Reading a name costs a microsecond a task: a task that has kept its name for long is left out."""
        now = monotonic()
        for pid, until in list(self._unnamed.items()):
            task = self.known(pid)
            if task is None or now > until:
                del self._unnamed[pid]
            elif not task.pending:
                with suppress(KernelError):
                    self._rename(task, pid, self._watch.comm(pid))

    def end(self, pid: int) -> None:
        """The process has ended, or doesn't wait any more for the call that its task sleeps in."""
        task = self._by_pid.pop(pid, None)
        if task is not None:
            try:
                self._tasks.exit(task)
            except KernelError:
                # A task that can't be killed ends when its call does.
                task.alive = False

    def close(self) -> None:
        """Watch no more."""
        self._watch.close()
