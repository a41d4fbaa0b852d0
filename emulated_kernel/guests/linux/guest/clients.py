"""LinuxClients: maps host processes that make requests to guest tasks of the same name, owner and pid.

The pid is equal only if it is free in the guest.
"""

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
"""Limit of processes with their own task; further ones share a task. A task takes 64 KiB of guest memory."""
_SHARED = 0
"""Pseudo-pid of the shared task. Processes that another pid namespace hides use it too."""


class LinuxClients:
    """Keeps the guest's tasks in step with client processes and the children that they fork.

    The user who created the mount (`owner`) is root in the guest, and so owns its files.
    """

    def __init__(
        self, tasks: LinuxTasks, watch: ProcessWatch, owner: int, settle: Callable[[], None]
    ) -> None:
        """Start with no tasks.

        `settle`: completes the clients' earlier requests, before the guest learns of a later event.
        """
        self._tasks = tasks
        self._settle = settle
        self._executions = ExecObserver(tasks)
        self._watch = watch
        self._owner = owner
        self._by_pid: dict[int, LinuxTask] = {}
        self._unnamed: dict[int, float] = {}
        """Pid of a recently forked process with its parent's name -> time until which it may call execve."""

    def task_of(self, client: Client) -> LinuxTask:
        """Return the task that makes a client's request, after applying earlier events on the host.

        A shared task (see is_shared()) must not sleep, because calls of other clients wait for it.
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
                # The task has died of the execve that was repeated; its process goes on.
                return self._new_task(pid)
        return task

    def _new_task(self, pid: int) -> LinuxTask:
        """Return a live task for a process that has none: its own, or the shared task."""
        task = self.known(pid) if pid > 0 else None
        if task is None:
            pid = _SHARED if pid <= 0 or len(self._by_pid) >= _MAX_TASKS else pid
            task = self.known(pid) or self._adopt(pid)
        return task

    def _rename(self, task: LinuxTask, pid: int, comm: str | None) -> None:
        """Repeat an execve or a name change of the host process in its guest task.

        Raises: KernelError ESRCH (the execve has killed the task).
        """
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
        """Return True if the task makes calls for several processes."""
        return task is self._by_pid.get(_SHARED)

    def known(self, pid: int) -> LinuxTask | None:
        """Return the process's task if it has a live one."""
        task = self._by_pid.get(pid)
        if task is not None and not task.alive:
            del self._by_pid[pid]
            return None
        return task

    def _adopt(self, pid: int) -> LinuxTask:
        """Return a new task for a process whose first event is a request; its earlier execve is unknown."""
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

    def catch_up(self) -> None:
        """Apply the forks and exits of client processes in the guest."""
        for fork in self._watch.forks():
            if fork.parent is None:
                continue
            parent = self.known(fork.parent)
            if parent is None or parent.pending or self.known(fork.pid) or len(self._by_pid) >= _MAX_TASKS:
                continue
            # The client of this request is not responsible for a fork that fails for lack of guest memory.
            with suppress(KernelError):
                if fork.comm != parent.comm:
                    # The parent has executed a program, such as a shell, before it forked this child.
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
        """Apply execves of recently forked processes.

        Reading a name costs a microsecond per task, so tasks that have kept their name for long are skipped.
        """
        now = monotonic()
        for pid, until in list(self._unnamed.items()):
            task = self.known(pid)
            if task is None or now > until:
                del self._unnamed[pid]
            elif not task.pending:
                with suppress(KernelError):
                    self._rename(task, pid, self._watch.comm(pid))

    def end(self, pid: int) -> None:
        """End a process's task.

        The process has ended, or no longer waits for the call in which the task sleeps.
        """
        task = self._by_pid.pop(pid, None)
        if task is not None:
            try:
                self._tasks.exit(task)
            except KernelError:
                # A task that cannot be killed now ends when its call returns.
                task.alive = False

    def close(self) -> None:
        """Stop watching processes."""
        self._watch.close()
