"""Files of ours, whose requests are system calls of the client's task as well."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.mounts.client_calls import ClientCalls, unless_deadlock
from emulated_kernel.guests.builtin.runner.guest_runner import DeferToGuest, GuestTask
from emulated_kernel.util.abi import HostfsOp
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.vfs.core.changes import ChangeWatcher
from emulated_kernel.vfs.core.chunked_write import ChunkedWrite, RunOnce
from emulated_kernel.vfs.core.client import Client, Stat
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.open_file import OpenFile, Piece


@dataclass(eq=False)
class ControlFile:
    """An open file of ours, and the guest's descriptor for it."""

    path: str
    flags: int
    client: Client
    inner: OpenFile
    fd: int | None
    """None where the guest has no part in it: it wasn't watched at the open, was dead, or had no room."""
    number: int | None = None
    """The descriptor as the process knows it that opened the file, where that is known."""


class ControlTree:
    """What GuestMount does for paths of ours, as GuestTree is for the guest's own.

    A file is opened, read and written by the guest's own system calls, whose file operations come back to
    the file. While nothing in the guest's text is patched nobody could see those calls, and our files answer
    without them; when the guest is dead too: who asks why it died has to get an answer.
    """

    def __init__(
        self, files: NodeTree, guest: Guest, calls: ClientCalls, watcher: ChangeWatcher | None
    ) -> None:
        self._files = files
        self._guest = guest
        self._calls = calls
        # What the guest has no part in.
        self.getattr = files.getattr
        self.readdir = files.readdir
        self.readlink = files.readlink
        self.link = files.link
        self.symlink = files.symlink
        self.watcher = watcher
        self._open: dict[ControlFile, None] = {}

    # Names

    def open_directory(self, client: Client, task: GuestTask, path: str) -> tuple[int, int | None]:
        """The guest's descriptor, and what the process calls it. Raises: KernelError (the guest's answer)."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        return self._calls.open(client, task, path, flags, lambda _op, _buffer, _count: 0)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        made = partial(self._files.mkdir, client, path, mode)
        self._change(client, ("mkdir", "mkdirat"), path, made, mode)
        if self.watcher is not None:
            self.watcher.made(path)

    def rmdir(self, client: Client, path: str) -> None:
        self._change(client, ("rmdir", "unlinkat"), path, partial(self._files.rmdir, client, path))
        if self.watcher is not None:
            self.watcher.removed(path)

    def _change(
        self, client: Client, names: tuple[str, ...], path: str, change: Callable[[], None], *args: int
    ) -> None:
        """A directory of ours is made or removed by the guest's system call, which comes back for it."""
        if not self._guest.is_watched:
            change()
            return
        changed = RunOnce(change)

        def execute() -> int:
            changed()
            return 0

        def serve(_op: int, _buffer: int, _count: int) -> int:
            raise DeferToGuest(execute)

        try:
            task = self._calls.task(client)
            call = self._guest.client_call(client.pid, client.uid)
            if call is not None and call.name in names:
                self._calls.as_called(client, call, [path], serve, exists=not args)
            else:
                self._guest.syscalls.with_path(task, names[0], path, *args, hostfs=serve)
        except KernelError as error:
            unless_deadlock(error)
        changed()

    def truncate(self, client: Client, path: str, size: int) -> None:
        self._tell(client, path, ("truncate",))
        self._files.truncate(client, path, size)

    def unlink(self, client: Client, path: str) -> None:
        self._tell(client, path, ("unlink", "unlinkat"))
        self._files.unlink(client, path)

    def rename(self, client: Client, old: str, new: str) -> None:
        self._tell(client, old, ("rename", "renameat2"), (), new)
        self._files.rename(client, old, new)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        self._tell(client, path, ("mknod", "mknodat"))
        self._files.mknod(client, path, mode)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        self._tell(client, path, ("chmod", "fchmodat"), ("fchmod",))
        self._files.chmod(client, path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        self._tell(client, path, ("chown", "lchown", "fchownat"), ("fchown",))
        self._files.chown(client, path, uid, gid)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        self._tell(client, path, ("utimensat",), ("utimensat",))
        self._files.utimens(client, path, atime_ns, mtime_ns)

    def _tell(
        self, client: Client, path: str, names: tuple[str, ...], by_fd: tuple[str, ...] = (), *more: str
    ) -> None:
        """The client's call on a file of ours is made in the guest too, which has nothing to do there."""
        call = self._guest.client_call(client.pid, client.uid)
        if call is None:
            return
        with suppress(KernelError):
            if call.name in names and len(call.paths) == 1 + len(more):
                exists = call.name not in ("mknod", "mknodat")
                self._calls.as_called(client, call, [path, *more], exists=exists)
            else:
                self.on_file(client, path, None, by_fd)

    # Open files

    def open(self, client: Client, path: str, flags: int) -> ControlFile:
        task = None if self._guest.is_dead else self._calls.task_for_control(client)
        if task is None or not self._guest.is_watched:
            opened = ControlFile(path, flags, client, self._files.open(path, flags, client), None)
        else:
            opened = self._open_with(client, task, path, flags)
        self._open[opened] = None
        if self.watcher is not None and flags & os.O_TRUNC:
            self.watcher.truncated(path)
        return opened

    def create(self, _client: Client, path: str, _mode: int, _flags: int) -> ControlFile:
        return self._files.create(path)

    def _open_with(self, client: Client, task: GuestTask, path: str, flags: int) -> ControlFile:
        """By the guest's call, too."""
        opened = RunOnce(lambda: self._files.open(path, flags, client))

        def execute() -> int:
            opened()
            return 0

        def serve(op: int, _buffer: int, _count: int) -> int:
            if op != HostfsOp.OPEN:
                return 0
            # What a definitions file holds goes with O_TRUNC, and its directories in the guest.
            if flags & os.O_TRUNC and self._files.runs_guest(path):
                raise DeferToGuest(execute)
            opened()
            return 0

        fd = None
        number = None
        try:
            fd, number = self._calls.open(client, task, path, flags, serve)
        except KernelError as error:
            unless_deadlock(error)
        inner = opened.answer if opened.is_done else opened()
        return ControlFile(path, flags, client, inner, fd, number)

    def reopened(self, old: ControlFile) -> ControlFile | None:
        """This tree's file of the same name, for one of the kernel before; None where it has none."""
        try:
            inner = self._files.open(old.path, old.flags & ~(os.O_TRUNC | os.O_EXCL), old.client)
        except KernelError:
            return None
        inner.goes_on_from(old.inner)
        opened = replace(old, inner=inner, fd=None, number=None)
        self._open[opened] = None
        return opened

    def open_in_guest(self) -> None:
        """The guest is about to be watched: open there what was opened while it was not.

        What it has no room for it will not take part in: that must not keep a probe from being armed.
        """
        if self._guest.is_dead or self._guest.runner.is_busy:
            return
        with suppress(KernelError):
            for opened in self._open:
                if opened.fd is None:
                    opened.fd = self._guest.open_file(opened.path, opened.flags)

    def on_file(self, client: Client, path: str, file: ControlFile | None, names: Collection[str]) -> None:
        """The client's call on a descriptor, if it is one of these, on a file that the guest has open too."""
        call = self._guest.client_call(client.pid, client.uid)
        if call is None or call.fd is None or call.name not in names:
            return
        if file is None:
            file = next((found for found in self._open if found.path == path and found.fd is not None), None)
        if file is not None and file.fd is not None:
            self._calls.on_descriptor(client, call, file.fd)

    def fgetattr(self, file: ControlFile) -> Stat:
        return self._files.stat(file.inner.node)

    def read(self, client: Client, file: ControlFile, size: int, offset: int) -> bytes:
        """Raises: WouldBlock, as GuestMount.read() does."""
        inner = file.inner
        if file.fd is None or not self._guest.is_watched:
            return inner.read(size, offset)
        produce = RunOnce(lambda: inner.read(size, offset))
        task = self._calls.task_for_control(client)
        if task is not None:
            try:
                number = self._number(client, file)
                data = self._guest.read_file(task, file.fd, size, produce, number)
                if produce.is_done:
                    return data
            except KernelError as error:
                unless_deadlock(error)
        return produce()

    def _number(self, client: Client, file: ControlFile) -> int | None:
        """What the client that reads or writes calls its descriptor."""
        call = self._guest.client_call(client.pid, client.uid)
        return file.number if call is None or call.fd is None else call.fd

    def writing(
        self,
        client: Client,
        file: ControlFile,
        handle: int,
        data: bytes,
        offset: int,
        prepared: Callable[[], int] | None,
        kept: ExitStack,
    ) -> Callable[[], int]:
        """What a write does: by itself, or as a call of the client's task in the guest."""
        inner = file.inner
        fd = file.fd
        by_piece = ChunkedWrite(inner, data, offset, partial(self._write, file, handle, prepared))
        if fd is None or not self._guest.is_watched or inner.node.replaces_kernel:
            if inner.node.notes_writer and not self._guest.is_dead:
                self._enter(client)
            return by_piece
        consume = RunOnce(by_piece)

        def write() -> int:
            task = self._calls.task_for_control(client)
            if task is not None:
                try:
                    served = self._in_guest(inner, consume)
                    number = self._number(client, file)
                    taken = self._guest.write_file(task, fd, data, served, kept, number)
                    if consume.is_done:
                        return taken
                except KernelError as error:
                    unless_deadlock(error)
            return consume()

        return write

    def _write(
        self, file: ControlFile, handle: int, prepared: Callable[[], int] | None, piece: Piece, offset: int
    ) -> int:
        watcher = self.watcher
        (data, is_part) = piece
        try:
            taken = file.inner.write(data, offset, prepared, is_part=is_part)
        except KernelError:
            if watcher is not None:
                watcher.written(handle, file.path, data, failed=True, is_part=is_part)
            raise
        if watcher is not None:
            watcher.written(handle, file.path, data[:taken], failed=False, is_part=is_part)
        return taken

    def _enter(self, client: Client) -> None:
        """Make the client's task the one that runs, if the guest can."""
        task = self._calls.task_for_control(client)
        try:
            if task is not None:
                self._guest.enter(task)
        except KernelError as error:
            unless_deadlock(error)

    @staticmethod
    def _in_guest(inner: OpenFile, consume: Callable[[], int]) -> Callable[[], int]:
        """What the guest's vfs_write comes back for."""

        def elsewhere() -> int:
            raise DeferToGuest(consume)

        return elsewhere if inner.node.runs_guest else consume

    def release(self, file: ControlFile, handle: int) -> None:
        """The last descriptor was closed; the guest's is the caller's to close."""
        del self._open[file]
        self._files.release(file.inner)
        if self.watcher is not None:
            self.watcher.released(handle)

    def is_between_parts(self) -> bool:
        """Whether a file waits for the next part of a long write(2)."""
        return any(opened.inner.is_between_parts for opened in self._open)

    def close(self) -> None:
        """The mount ends: wake every waiter."""
        for opened in self._open:
            self._files.release(opened.inner)
        self._open.clear()
        if self.watcher is not None:
            self.watcher.closed()
