"""BuiltinCalls: repeats clients' calls on control files in kprobefs's own kernel.

The guest opens, reads and writes a control file by its own system calls. The file operations of these calls
return to the host, which has the file's content. A call is made only if it can execute patched text, since a
probe could notice it then. If the guest is dead, no call is made, but clients can still read the control
files that say why it died.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.mounts.client_calls import ClientCalls, unless_deadlock
from emulated_kernel.guests.builtin.runner.guest_runner import DeferToGuest, GuestTask
from emulated_kernel.guests.common.client_facts import facts_of
from emulated_kernel.image.call_graph import Calls
from emulated_kernel.kprobes.sight import Sight
from emulated_kernel.util.abi import HostfsOp
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.control_fs import ControlDirectory, ControlFile, GuestCalls, PendingWrite
from emulated_kernel.vfs.core.chunked_write import RunOnce
from emulated_kernel.vfs.core.client import Client, Stat
from emulated_kernel.vfs.core.open_file import OpenFile

_TRANSFERS = Calls.READS | Calls.WRITES


class BuiltinCalls(GuestCalls):
    """Makes calls of clients on control files in kprobefs's own kernel; implements GuestCalls.

    `ClientCalls.task` and `ClientCalls.task_for_control` begin a request, which advances the guest's clock.
    """

    def __init__(self, guest: Guest, clients: ClientCalls) -> None:
        self._guest = guest
        self._clients = clients
        self._watched = guest.watched
        self._runner = guest.runner
        self._stand_in: int | None = None
        """The guest's descriptor of the open file that tasks read in place of any control file.

        None until the first read that uses it.
        """

    @property
    def is_dead(self) -> bool:
        """Whether the guest can't run any more; see GuestCalls."""
        return self._runner.is_dead

    @property
    def sees_lookups(self) -> bool:
        """Whether looked_up() and on_file() now repeat calls in the guest; see GuestCalls."""
        return self._watched.include(Calls.NAMES) and not self._runner.is_dead

    def informed(self, client: Client, opened: str | None = None) -> Client:
        """Return the client with the facts about its process that a request needs; see FileSystem."""
        return self._clients.informed(client, Calls.NAMES, opened)

    def informed_of_file(self, client: Client) -> Client:
        """Return the client with the facts that a read or write of an open file needs; see GuestCalls.

        Facts that no probe can see are not read.
        """
        if not self._watched.include(_TRANSFERS):
            return client
        if self._guest.sight() is Sight.NOTHING:
            # The other facts are about the program of an execve(2), which no probe may notice either.
            if not self._watched.include(Calls.NAMES):
                return client
            client = client._replace(is_calling=False)
        return self._clients.informed(client, _TRANSFERS)

    def looked_up(self, client: Client, path: str, found: Stat | None) -> None:
        """Repeat in the guest a client's call that ends with the lookup of `path`; see GuestCalls.

        If the client's call does not end there, do nothing. `found`: the attributes of `path`; None if it
        does not exist.
        """
        self._clients.looked_up(client, path, found, self.on_file)

    def on_file(self, client: Client, path: str, file: ControlFile | None, names: Collection[str]) -> None:
        """If the client's call is one of `names`, repeat it on the guest's descriptor; see GuestCalls.

        `file`: the file of the descriptor; None for any file with the path `path` that the guest has open.
        """
        call = facts_of(client).call
        if call is None or call.fd is None or call.name not in names:
            return
        if file is None:
            open_files = self.fs.files()
            file = next((found for found in open_files if found.path == path and found.fd is not None), None)
        if file is not None and file.fd is not None:
            self._clients.on_descriptor(client, call, file.fd)

    def repeat_call(
        self, client: Client, path: str, names: Collection[str], by_fd: Collection[str] = (), *more: str
    ) -> None:
        """Repeat the client's call on a file in the guest, and ignore errors of the guest; see GuestCalls.

        Repeat a call by paths only if its name is in `names`, and a call on a descriptor only if its name is
        in `by_fd`. `path` and `more`: the paths of the call. The repeated call changes nothing in the guest.
        """
        call = facts_of(client).call
        if call is None:
            return
        with suppress(KernelError):
            if call.name in names and call.names(1 + len(more)):
                exists = call.name not in ("mknod", "mknodat")
                self._clients.as_called(client, call, [path, *more], exists=exists)
            else:
                self.on_file(client, path, None, by_fd)

    def chdir(self, client: Client, path: str) -> None:
        """Repeat in the guest the client's change of its working directory; see GuestCalls."""
        self._clients.chdir(client, path)

    def follow_processes(self) -> None:
        """Repeat in the guest the forks and exits of clients' host processes; see GuestCalls.

        Otherwise they would be repeated only at the next request.
        """
        processes = self._guest.processes
        if processes.has_news():
            with suppress(KernelError):
                processes.task_of(0, 0, 0)

    # Open files

    def open(self, client: Client, file: ControlFile) -> None:
        """Open a control file on the host and, if probes could notice it, in the guest; see GuestCalls."""
        task = None if self._runner.is_dead else self._clients.task_for_control(client)
        if task is None or not self.sees_lookups:
            file.inner = self.fs.tree.open(file.path, file.flags, client)
        else:
            self._open_with(client, task, file)

    def _open_with(self, client: Client, task: GuestTask, file: ControlFile) -> None:
        """Open a control file in the guest by a call of `task`, and on the host during this call.

        Set `file.inner`, `file.fd` and `file.number`. If the guest fails to open the file, `file.fd` is None.
        """
        tree = self.fs.tree
        path = file.path
        flags = file.flags
        opened = RunOnce(lambda: tree.open(path, flags, client))

        def execute() -> int:
            return opened().node.writer

        def serve(op: int, _buffer: int, _count: int) -> int:
            if op != HostfsOp.OPEN:
                return 0
            # O_TRUNC of a definitions file removes its probes, and their directories in the guest.
            if flags & os.O_TRUNC and tree.runs_guest(path):
                raise DeferToGuest(execute)
            return execute()

        fd = None
        number = None
        try:
            fd, number = self._clients.open(client, task, path, flags, serve)
        except KernelError as error:
            unless_deadlock(error)
        file.inner = opened.finish()
        file.fd = fd
        file.number = number

    def open_unseen(self, files: Collection[ControlFile]) -> None:
        """Open `files` in the guest, because probes could notice the guest's calls from now on.

        If the guest cannot open a file, for example for lack of memory, leave the rest unopened: the probe
        must be armed in any case. See GuestCalls.
        """
        if self._runner.is_dead or self._runner.is_busy:
            return
        with suppress(KernelError):
            for file in files:
                if file.fd is None:
                    file.fd = self._guest.open_file(file.path, file.flags, file.inner.node.writer)

    def opendir(self, client: Client, directory: ControlDirectory) -> None:
        """Open a directory in the guest; see GuestCalls.

        If the guest has no memory for the open directory, clients can list it nevertheless.
        """
        if self._runner.is_dead:
            return
        task = self._clients.task_for_control(client)
        if task is None or not self.sees_lookups:
            return
        flags = os.O_RDONLY | os.O_DIRECTORY
        with suppress(KernelError):
            directory.fd, directory.number = self._clients.open(
                client, task, directory.path, flags, lambda _op, _buffer, _count: 0
            )

    def listed(self, client: Client, directory: ControlDirectory) -> None:
        """Repeat the client's getdents64(2) in the guest; see GuestCalls."""
        self._clients.listed(client, directory.fd)

    def read(self, client: Client, file: ControlFile, size: int, offset: int) -> bytes:
        """Read from `file.inner`, by a call of the client's task if probes could notice it; see GuestCalls.

        Raises: WouldBlock (the task sleeps in its call).
        """
        inner = file.inner
        if not self._guest.is_watched(Calls.READS):
            return inner.read_step(size, offset)
        produce = RunOnce(partial(inner.read_step, size, offset))
        task = self._clients.task_for_control(client)
        fd = None if task is None else self._fd_to_read(task, file)
        if task is not None and fd is not None:
            try:
                if fd == file.fd:
                    data = self._guest.read_file(task, fd, size, produce, self._number(client, file))
                else:
                    data = self._guest.read_file(task, fd, size, produce, wanted=file)
                if produce.is_done:
                    return data
            except KernelError as error:
                unless_deadlock(error)
        return produce.finish()

    def _fd_to_read(self, task: GuestTask, file: ControlFile) -> int | None:
        """Return the guest's descriptor from which the task reads a file, or None if there is none.

        The guest reads all control files by the same functions. If probes see neither registers nor memory,
        they cannot notice which file the task reads. Then the task reads one file, the stand-in, in place
        of all control files.
        """
        if task.request is not None and task.request.wanted is file:
            return self._stand_in
        if file.fd is not None or self._watched.execute_patches(Calls.NAMES):
            return file.fd
        try:
            if self._guest.sight() is not Sight.NOTHING:
                self._open_unnoticed(task, file)
            elif self._stand_in is None:
                self._stand_in = self._guest.open_file(file.path, os.O_RDONLY)
        except KernelError:
            # The guest cannot open the file, for example for want of memory.
            pass
        return self._stand_in if file.fd is None else file.fd

    def _open_unnoticed(self, task: GuestTask, file: ControlFile) -> None:
        """Open a file in the guest by a call of `task`, and set `file.fd`.

        The caller has checked that no probe can be hit in this call. The host has opened the file already.
        """
        writer = file.inner.node.writer
        flags = file.flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
        file.fd = self._guest.syscalls.open(
            task, file.path, flags, hostfs=lambda _op, _buffer, _count: writer
        )

    def read_page(self, client: Client, file: ControlFile, size: int) -> bytes:
        """Read a page from `file.inner`; see GuestCalls.

        On Linux, splice(2) does not call vfs_read. So the guest makes no call for this read.
        """
        del client
        return file.inner.read_page(size)

    def _number(self, client: Client, file: ControlFile) -> int | None:
        """Return the number of the file's descriptor in the client's process; None if it is unknown.

        The number is that in the client's current call, if the host has read which call it is. Otherwise it
        is the number that was found at the open, or at an earlier call of the process that opened the file.
        """
        call = facts_of(client).call
        if call is None or call.fd is None:
            return file.number
        if file.number is None and client.pid == file.client.pid:
            file.number = call.fd
        return call.fd

    def write(self, write: PendingWrite) -> int:
        """Do one step of a client's write; see GuestCalls.

        The first step of a write(2) decides whether the guest makes a call for all its steps.
        """
        if write.plan is None:
            write.plan = self._plan(write)
        return write.plan()

    def _plan(self, write: PendingWrite) -> Callable[[], int]:
        inner = write.inner
        fd = None
        # Not only WRITES: the end of a write that enables sys_exit_write is recorded, as in Linux.
        if self._guest.is_watched(Calls.ALL) and not inner.node.replaces_kernel:
            fd = self._fd_to_write(write.file)
        if fd is None:
            if inner.node.notes_writer and not self._runner.is_dead:
                self._enter(write.client)
            return write.by_piece
        consume = RunOnce(write.by_piece)
        return partial(self._write, write, fd, self._in_guest(inner, consume), consume)

    def _fd_to_write(self, file: ControlFile) -> int | None:
        """Return the guest's descriptor for writes to the file, or None if the guest does not have it open.

        If no probe can notice opens, the guest may lack files that clients have open; open these files in
        the guest first. The write may arm a probe that can notice calls on them, and the guest cannot open
        them during the write.
        """
        self._open_before_write()
        return file.fd

    def _open_before_write(self) -> None:
        if not self._watched.execute_patches(Calls.NAMES):
            self._watched.open_files()

    def _write(self, write: PendingWrite, fd: int, served: Callable[[], int], consume: RunOnce[int]) -> int:
        # Clients may have opened further files since the previous step of this write.
        self._open_before_write()
        task = self._clients.task_for_control(write.client)
        if task is not None:
            try:
                number = self._number(write.client, write.file)
                taken = self._guest.write_file(task, fd, write.data, served, write.kept, number)
                if consume.is_done:
                    return taken
            except KernelError as error:
                unless_deadlock(error)
        return consume.finish()

    def _enter(self, client: Client) -> None:
        """Make the client's task the guest's current task; ignore all errors except EDEADLK.

        Raises: KernelError EDEADLK (a probe's handler has made the request).
        """
        task = self._clients.task_for_control(client)
        try:
            if task is not None:
                self._guest.enter(task)
        except KernelError as error:
            unless_deadlock(error)

    @staticmethod
    def _in_guest(inner: OpenFile, consume: Callable[[], int]) -> Callable[[], int]:
        """Return the function that the guest's vfs_write calls on the host for the client's write.

        The function calls `consume`. If a write to the file runs guest code, the function raises DeferToGuest
        instead, because guest code can't run inside the call.
        """

        def elsewhere() -> int:
            raise DeferToGuest(consume)

        return elsewhere if inner.node.runs_guest else consume

    def give_up(self, client: Client, file: ControlFile, error: int) -> None:
        """End the call in which the client's task waits: it fails with the errno `error`; see GuestCalls."""
        if file.fd is not None or self._stand_in is not None:
            with suppress(KernelError):
                self._guest.give_up(self._guest.processes.known(client.pid), error)

    def release(self, file: ControlFile | ControlDirectory) -> None:
        """Close the guest's descriptor of the file; see GuestCalls."""
        if file.fd is not None and not self._runner.is_dead:
            with suppress(KernelError):
                self._guest.close_file(file.fd, file.number)

    # Names

    def change(
        self, client: Client, names: tuple[str, ...], path: str, act: Callable[[], None], *args: int
    ) -> None:
        """Create or remove a directory by calling `act`; see GuestCalls.

        If a probe could notice the client's call, the client's task makes the call in the guest, and the host
        calls `act` during this call. `names`: names of the system calls that the client may have made.
        `args`: arguments of the call after the path.
        """
        if not self.sees_lookups:
            act()
            return
        changed = RunOnce(act)

        def execute() -> int:
            changed()
            return 0

        def serve(_op: int, _buffer: int, _count: int) -> int:
            raise DeferToGuest(execute)

        try:
            task = self._clients.task(client)
            call = facts_of(client).call
            if call is not None and call.name in names:
                self._clients.as_called(client, call, [path], serve, exists=not args)
            else:
                self._guest.syscalls.with_path(task, names[0], path, *args, hostfs=serve)
        except KernelError as error:
            unless_deadlock(error)
        changed.finish()

    def truncate(self, client: Client, path: str, act: Callable[[], None]) -> None:
        """Set the size of a file by `act`, after repeating the client's call in the guest; see GuestCalls."""
        self.repeat_call(client, path, ("truncate",))
        act()
