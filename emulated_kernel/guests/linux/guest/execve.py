"""ExecObserver: repeats a client's execve(2) in the guest.

Probes see the client's path in the call. The guest executes init's program in place of the client's,
because the guest has no other program. After the call, the task still shares its table of open files with
the other tasks.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from errno import ESRCH

from emulated_kernel.guests.linux.guest.tasks import LinuxTask, LinuxTasks
from emulated_kernel.guests.linux.initramfs import BUFFER, PROGRAM
from emulated_kernel.util.errors import KernelError

_ARGUMENTS = BUFFER + 8192
_OPENS = "do_open_execat"
_UNSHARES = "unshare_files"
_COUNTS = "set_cred_ucounts"
_RESOLVES = "tomoyo_realpath_nofollow"
_NAME = 128
"""Offset in bytes of the path from the start of the struct filename that the host writes."""


class ExecObserver:
    """Repeats the execves of clients in the guest.

    To do so, the observer intercepts functions of the kernel. If the kernel lacks do_open_execat() or
    unshare_files(), the observer only renames the clients' tasks.
    """

    def __init__(self, tasks: LinuxTasks) -> None:
        self._tasks = tasks
        self._machine = tasks.machine
        self._offsets = tasks.facts.offsets
        self._task: LinuxTask | None = None
        """The task that makes an execve at present; None if no task does."""
        self._others: tuple[int, int] | None = None
        """(address of the file table's count of users, number subtracted from it); None if unchanged.

        A user is a task that shares the table.
        """
        self._uid: tuple[int, bytes] | None = None
        """(address of a uid, its real bytes), while root's uid replaces this uid; None at other times."""
        self._returns: set[int] = set()
        """Return addresses of unshare_files() and set_cred_ucounts() at which a hook exists."""
        symbols = tasks.facts.symbols
        self._can_execute = {_OPENS, _UNSHARES} <= symbols.keys()
        if self._can_execute:
            self._machine.call_at(symbols[_OPENS], self._opening)
            self._machine.call_at(symbols[_UNSHARES], self._unsharing)
        if self._can_execute and _COUNTS in symbols:
            self._machine.call_at(symbols[_COUNTS], self._counting)
        if self._can_execute and _RESOLVES in symbols:
            self._machine.call_at(symbols[_RESOLVES], self._resolving)

    def execute(self, task: LinuxTask, path: str, comm: str) -> None:
        """Repeat the execve(2) by which the process of `task` has started the program `path`.

        `comm`: the task's new name. If the task sleeps in a call, or the kernel cannot repeat the execve,
        only rename the task.
        Raises: KernelError ESRCH (the execve has killed the task).
        """
        if self._can_execute and not task.pending:
            with suppress(KernelError):
                self._execve(task, path)
            if not task.alive:
                raise KernelError(ESRCH, f"task {task.pid} was killed by executing {path}")
        self._tasks.set_comm(task, comm)

    def _execve(self, task: LinuxTask, path: str) -> None:
        """Make the task call execve(2) with `path`. Raises: KernelError (with the call's errno)."""
        tasks = self._tasks
        tasks.copy_to_user(task, BUFFER, os.fsencode(path) + b"\0")
        tasks.copy_to_user(task, _ARGUMENTS, struct.pack("<2Q", BUFFER, 0))
        self._task = task
        try:
            tasks.call(task, self._machine.abi.syscalls["execve"], BUFFER, _ARGUMENTS, 0)
        finally:
            self._task = None
            self._unhide()
        tasks.update_page_tables(task)

    def _is_executing(self) -> bool:
        return self._task is not None and self._tasks.running() == self._task.address

    def _opening(self) -> None:
        """Make do_open_execat() open init's program: replace its second argument, a struct filename."""
        if not self._is_executing():
            return
        physical, virtual = self._tasks.host_room
        name = physical + self._offsets["filename.name"]
        text = physical + _NAME
        ram = self._machine.memory.ram
        ram[name : name + 8] = struct.pack("<Q", virtual + _NAME)
        ram[text : text + len(PROGRAM) + 1] = PROGRAM + b"\0"
        self._machine.set_argument(1, virtual)

    def _resolving(self) -> None:
        """Make TOMOYO look up the program of init, because the guest does not have the client's program.

        _opening() has stored the name of init's program.
        """
        if self._is_executing():
            self._machine.set_argument(0, self._tasks.host_room[1] + _NAME)

    def _unsharing(self) -> None:
        """Hide from unshare_files() that tasks share the file table, so that it does not copy the table.

        Hazard: if another task ran and exited before unshare_files() returns, its exit would free the table.
        No other task can run, because unshare_files() does not sleep.
        """
        if not self._is_executing() or self._others is not None:
            return
        assert self._task is not None
        memory = self._machine.memory
        root = self._machine.cpu.root
        table = memory.read_word(root, self._task.address + self._offsets["task_struct.files"])
        count = memory.translate(root, table + self._offsets["files_struct.count"])
        users = struct.unpack_from("<i", memory.ram, count)[0]
        self._others = count, users - 1
        struct.pack_into("<i", memory.ram, count, 1)
        self._unhide_at_return()

    def _counting(self) -> None:
        """Make set_cred_ucounts() read root's uid, so that the task stays in root's count of processes.

        All tasks are counted as root's, regardless of their owners.
        Hazard: when the task exits, Linux decrements the count to which the task's credentials then point.
        Without this method, Linux would decrement the owner's count, which does not include the task.
        """
        if not self._is_executing() or self._uid is not None:
            return
        memory = self._machine.memory
        root = self._machine.cpu.root
        uid = memory.translate(root, self._machine.argument(0) + self._offsets["cred.uid"])
        self._uid = uid, bytes(memory.ram[uid : uid + 4])
        memory.ram[uid : uid + 4] = bytes(4)
        self._unhide_at_return()

    def _unhide_at_return(self) -> None:
        back = self._machine.return_address()
        if back not in self._returns:
            self._returns.add(back)
            self._machine.call_at(back, self._unhide)

    def _unhide(self) -> None:
        if self._uid is not None:
            uid_at, uid = self._uid
            self._uid = None
            self._machine.memory.ram[uid_at : uid_at + 4] = uid
        if self._others is not None:
            count_at, others = self._others
            self._others = None
            ram = self._machine.memory.ram
            struct.pack_into("<i", ram, count_at, struct.unpack_from("<i", ram, count_at)[0] + others)
