"""ClientCalls: makes clients' tasks in the guest repeat the system calls of the clients."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.mounts.path_walk import walks_at_end
from emulated_kernel.guests.builtin.processes.process_tracker import INIT_PID
from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask, HostfsHandler
from emulated_kernel.guests.builtin.runner.syscalls import HostLookup
from emulated_kernel.guests.common.client_call import ClientCall
from emulated_kernel.guests.common.client_facts import facts_of
from emulated_kernel.kprobes.sight import Sight
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.control_fs import ATTRIBUTE_CALLS
from emulated_kernel.vfs.core.client import Client, Stat

OnFile = Callable[[Client, str, None, Collection[str]], object]
"""Function that repeats a client's call on a descriptor; its arguments are (client, path, None, names).

`path`: path of the descriptor's file. None stands for any open file with this path. The function does nothing
if the name of the call is not in `names`.
"""


def unless_deadlock(error: KernelError) -> None:
    """Raise `error` again if it is EDEADLK; otherwise ignore it.

    An error of the guest's call must not affect the request to a control file. The exception is EDEADLK,
    which means that a probe's handler has made the request.
    Raises: KernelError EDEADLK.
    """
    if error.errno == errno.EDEADLK:
        raise error


class ClientCalls:
    """Finds clients' tasks in the guest, and makes them repeat the clients' system calls."""

    def __init__(self, guest: Guest, lock: ControlLock) -> None:
        self._guest = guest
        self._lock = lock
        self._syscalls = guest.syscalls

    def informed(self, client: Client, kind: int, opened: str | None = None) -> Client:
        """Return the client with the facts about its process that a request needs; see FileSystem.

        `kind`: kinds of calls that the client's call may be, as bits of call_graph.Calls. If no probe could
        notice such a call, no facts are read. `opened`: path of the file that an open(2) opens. If no probe
        could see the path in the call, the facts have `opened` in place of the path that the client passed.
        """
        guest = self._guest
        if not guest.is_watched(kind) or client.pid <= INIT_PID:
            return client
        processes = guest.processes
        # No guest code runs, so this does not wait for a debugger that holds the guest.
        with self._lock.observing():
            unshown = processes.unshown_program(client.pid)
            sight = guest.sight() if opened else Sight.MEMORY
        instead = None if opened and sight is Sight.MEMORY else opened
        facts = processes.facts(client, unshown, instead, needs_fd=sight is not Sight.NOTHING)
        return client._replace(facts=facts)

    def task(self, client: Client) -> GuestTask:
        """Return the client's task.

        Raises: KernelError (the guest is dead, or its task list is damaged).
        """
        return self._guest.processes.task_of(client.pid, client.uid, client.gid, facts_of(client))

    def task_for_control(self, client: Client) -> GuestTask | None:
        """Return the client's task, or None if the guest fails to create one.

        Raises: KernelError EDEADLK (a probe's handler has made the request).
        """
        try:
            return self._guest.processes.task_of(client.pid, client.uid, client.gid, facts_of(client))
        except KernelError as error:
            unless_deadlock(error)
            self._guest.runner.note(f"no task for process {client.pid}: {error.strerror}")
            return None

    def as_called(
        self,
        client: Client,
        call: ClientCall,
        walks: Sequence[str],
        hostfs: HostfsHandler | None = None,
        *,
        exists: bool = True,
    ) -> int:
        """Make the client's task repeat the client's own system call, and return the result.

        `walks`: the paths of the call, relative to the mount's root. `exists`: whether the last component of
        the path exists on the host. `hostfs`: answers the call's requests to the host about a control file;
        None lets them fail with EBADF.
        Raises: KernelError (the errno of the guest's call).
        """
        task = self.task(client)
        self._syscalls.set_umask(task, client.umask)
        lookup = HostLookup.EXISTS if exists else HostLookup.MISSING
        return self._syscalls.of_client(task, call, walks, lookup, hostfs)

    def on_descriptor(self, client: Client, call: ClientCall, fd: int) -> None:
        """Make the client's task repeat `call`, a call on a descriptor, with the guest's descriptor `fd`.

        `fd` must belong to the same file as the client's descriptor.
        Raises: KernelError, as as_called().
        """
        task = self.task(client)
        with self._syscalls.numbered(task, call.fd, fd):
            self._syscalls.of_client(task, call)

    def open(
        self, client: Client, task: GuestTask, path: str, flags: int, serve: HostfsHandler
    ) -> tuple[int, int | None]:
        """Open the control file `path` in the guest for a client, whose task is `task`.

        `flags`: flags of the client's open(2). `serve`: answers the guest's requests to the host during the
        open. Return the guest's descriptor, and the number of the descriptor in the client's process. The
        number is None if it is unknown.
        """
        call = facts_of(client).call
        if call is None or not call.opens_as(path, flags):
            return self._syscalls.open(task, path, flags & ~os.O_CREAT, hostfs=serve), None
        number = facts_of(client).next_fd
        with self._syscalls.numbered(task, number):
            fd = self.as_called(client, call, [path], serve)
            return (fd if number is None else self._syscalls.real_fd(task)), number

    def looked_up(self, client: Client, path: str, found: Stat | None, on_file: OnFile) -> None:
        """Repeat a client's call in the guest if the call ends with the lookup of `path`.

        `found`: the attributes of `path`; None if it does not exist. `on_file`: repeats a call on a
        descriptor. The result of the guest's call is ignored, because the host has served the client already.
        """
        call = facts_of(client).call
        if call is None:
            return
        with suppress(KernelError):
            if call.fd is not None:
                on_file(client, path, None, ATTRIBUTE_CALLS)
            elif (walks := walks_at_end(call, path, found)) is not None:
                self.as_called(client, call, walks, exists=found is not None)

    def chdir(self, client: Client, path: str) -> None:
        """Repeat in the guest a client's change of its working directory to `path`.

        Ignore the guest's errors. If the client's call is not known to be chdir(2) or fchdir(2), do nothing.
        """
        call = facts_of(client).call
        if call is None or call.name not in ("chdir", "fchdir"):
            return
        with suppress(KernelError):
            if call.name == "chdir":
                self.as_called(client, call, [path])
            else:
                self._syscalls.with_path(self.task(client), "chdir", path)

    def listed(self, client: Client, fd: int | None) -> None:
        """Repeat in the guest a client's getdents64(2) on a directory, and ignore the guest's errors.

        `fd`: the guest's descriptor of the directory; None if the guest has not opened the directory. If `fd`
        is None, or the client's call is not known to be getdents64(2), do nothing.
        """
        call = facts_of(client).call
        if call is not None and call.name == "getdents64" and fd is not None:
            with suppress(KernelError):
                self.on_descriptor(client, call, fd)
