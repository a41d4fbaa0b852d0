"""TaskLife: fork, name, credentials and exit of client tasks, and events about all tasks."""

from __future__ import annotations

from errno import EAGAIN, ESRCH

from emulated_kernel.guests.linux.guest.client_scheduler import ClientScheduler
from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest.linux_task import LinuxTask
from emulated_kernel.guests.linux.guest.task_table import TaskTable
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.task_events import TaskEvents
from emulated_kernel.util.errors import KernelError

_CLONE_FILES = 0x400
_SIGCHLD = 17
_SIGKILL = 9
_COMM_SIZE = 16
_ALL_CAPABILITIES = (1 << 40) - 1


class TaskLife:
    """Creates, changes and ends client tasks, and calls the observers of forks and exits of all tasks.

    Raises: KernelError (with the errno of a system call), GuestFault (the guest has died).
    """

    def __init__(
        self,
        machine: LinuxMachine,
        facts: KernelOffsets,
        structs: KernelStructs,
        table: TaskTable,
        scheduler: ClientScheduler,
        events: TaskEvents,
    ) -> None:
        self._machine = machine
        self._numbers = machine.abi.syscalls
        self._syscall = machine.abi.stub.syscall
        self._structs = structs
        self._table = table
        self._scheduler = scheduler
        self._events = events
        self._next_pid = structs.member(facts.symbols["init_pid_ns"], "pid_namespace.idr.idr_next")
        self._forking: tuple[int, int] | None = None
        """(address of the parent's task_struct, pid for the child) until a fork chooses the child's pid.

        The value is None at other times.
        """
        self._others_next: int | None = None
        """Saved value of the kernel's next pid, while the awaited child's pid replaces it; otherwise None."""
        machine.call_at(facts.symbols["alloc_pid"], self._numbering)
        machine.call_at(facts.symbols["do_exit"], self._exiting)
        machine.call_at(facts.symbols["wake_up_new_task"], self._forked)
        machine.call_at(facts.symbols["delayed_put_task_struct"], self._freed)

    # Requests of the host

    def fork(self, parent: LinuxTask, pid: int) -> LinuxTask:
        """Fork a child of a task and return the child. If `pid` is free, the child gets it.

        Raises: KernelError (with the errno of clone(2), such as EAGAIN or ENOMEM).
        """
        known = set(self._table.by_address)
        self._forking = parent.address, pid
        self._scheduler.begin(parent, self._syscall, self._numbers["clone"], (_CLONE_FILES | _SIGCHLD,))
        child: LinuxTask | None = None

        def is_done() -> bool:
            nonlocal child
            arrived = self._scheduler.current
            if arrived is not None and arrived.address not in known:
                child = arrived
            return not parent.pending and (child is not None or parent.result < 0)

        if not self._scheduler.run_until(is_done):
            self._scheduler.give_up(f"task {parent.pid} doesn't come back from its fork")
        self._forking = None
        self._number_others()
        if child is None:
            raise KernelError(-parent.result if parent.result < 0 else EAGAIN)
        child.owner = parent.owner
        child.comm = parent.comm
        return child

    def exit(self, task: LinuxTask, init: LinuxTask) -> None:
        """End a task whose process has ended on the host. If the task sleeps in a call, `init` kills it.

        If a task waits for ever for a lock in the guest, it cannot be killed, and stays in the guest.
        """
        if not task.alive:
            return
        scheduler = self._scheduler
        scheduler.cancel_service(task)
        if task.pending:
            scheduler.call(init, self._numbers["kill"], task.pid, _SIGKILL)
            scheduler.switch(None)
        else:
            scheduler.begin(task, self._syscall, self._numbers["exit_group"], (0,))
        scheduler.run_until(lambda: not task.alive)

    def set_comm(self, task: LinuxTask, comm: str) -> None:
        """Set the name of the task to `comm`, the name of its process on the host."""
        task.comm = comm
        name = comm.encode("utf-8", "surrogateescape")[: _COMM_SIZE - 1]
        at = self._structs.member(task.address, "task_struct.comm")
        self._structs.store_bytes(at, name.ljust(_COMM_SIZE, b"\0"))
        for notify in self._events.renamed:
            notify(task.pid, comm)

    def set_creds(self, task: LinuxTask, uid: int, gid: int) -> None:
        """Set the credentials of a task. Only uid 0 gets capabilities.

        Linux: a fork copies the credentials, so the credentials of the task's parent do not change.
        """
        structs = self._structs
        task.owner = uid, gid
        cred = structs.word(task.address + structs.offsets["task_struct.cred"])
        structs.store("<8I", structs.member(cred, "cred.uid"), *(uid, gid) * 4)
        capabilities = 0 if uid else _ALL_CAPABILITIES
        for path in ("cred.cap_permitted", "cred.cap_effective"):
            structs.store("<Q", structs.member(cred, path), capabilities)

    # Events in the guest's kernel

    def _numbering(self) -> None:
        """Set the kernel's next pid to the pid of the awaited child, before the kernel chooses a pid.

        Kernel threads that are created before the child get the same pids as without this fork.
        """
        if self._forking is not None and self._table.running() == self._forking[0]:
            self._others_next = self._structs.load_s32(self._next_pid)
            self._structs.store("<I", self._next_pid, self._forking[1])
            self._forking = None

    def _number_others(self) -> None:
        """Restore the kernel's next pid, after the awaited child has got its pid or its clone has failed."""
        if self._others_next is not None:
            self._structs.store("<i", self._next_pid, self._others_next)
            self._others_next = None

    def _forked(self) -> None:
        """Report a fork to the observers before the child executes an instruction."""
        child = self._machine.argument(0)
        parent = self._table.running()
        self._number_others()
        for notify in self._events.forked:
            notify(self._table.pid_of(parent), self._table.pid_of(child))

    def _exiting(self) -> None:
        """Report to the observers that the running task exits. The task never returns to its stub."""
        address = self._table.running()
        for notify in self._events.exiting:
            notify(address)
        task = self._table.by_address.pop(address, None)
        if task is not None:
            task.alive = False
            task.pending = False
            task.result = -ESRCH

    def _freed(self) -> None:
        """Report to the observers that the kernel frees a task_struct. No later event names this task."""
        address = self._machine.argument(0) - self._structs.offsets["task_struct.rcu"]
        pid = self._table.pid_of(address)
        for notify_freed in self._events.freed:
            notify_freed(address)
        for notify_exited in self._events.exited:
            notify_exited(pid)
