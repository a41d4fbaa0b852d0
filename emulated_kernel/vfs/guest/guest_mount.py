"""GuestMount: every request of a host process, made by its task inside the guest."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import field, replace
from functools import partial
from itertools import count
from typing import Generic, TypeVar

from emulated_kernel.abi import HostfsOp
from emulated_kernel.dataclass import dataclass
from emulated_kernel.errors import KernelError
from emulated_kernel.host.client_call import ClientCall
from emulated_kernel.host.executive.executive import GuestTask, HostfsHandler, RunElsewhere
from emulated_kernel.host.executive.syscalls import HostLookup
from emulated_kernel.host.guest import Guest
from emulated_kernel.limits import Limit, Limits
from emulated_kernel.lock import ControlLock
from emulated_kernel.vfs.core.client import Client, DirEntry, Stat
from emulated_kernel.vfs.core.open_file import OpenFile, Piece
from emulated_kernel.vfs.core.pieces import WriteInPieces, giving_way
from emulated_kernel.vfs.core.tree import CONTROL, Filesystem
from emulated_kernel.vfs.guest.changes import ChangeWatcher
from emulated_kernel.vfs.guest.naming import OPENS, walks_at_end
from emulated_kernel.vfs.guest.scratch import GuestFile, GuestTree

T = TypeVar("T")

GUESTS_OWN = ("/scratch", "/dev")
"""Directories whose files are the guest's own."""
UNLIMITED_FILES = ("/machine", f"/{CONTROL}/machine")
"""What can always be opened: the limits are set there."""
_ATTRIBUTES = ("newfstat", "newfstatat", "statx", "lseek")
"""Calls that ask the host's kernel for the attributes of an open file."""


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


@dataclass(eq=False)
class OpenDirectory:
    """A directory that is listed; a snapshot, from when it was read from its beginning."""

    path: str
    fd: int | None = None
    """The guest's, None where that has no part in it."""
    number: int | None = None
    file: GuestFile | None = None
    """Of one of the guest's own directories."""
    entries: list[DirEntry] = field(default_factory=list)


_Opened = ControlFile | GuestFile | OpenDirectory


class _Once(Generic[T]):
    """What a file of ours does at the guest's call: once, and all the same if that never comes.

    Control files answer whatever the guest did: where its call fails, our answer stands.
    """

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self.answer: T
        self._error: KernelError | None = None
        self.is_done = False
        """It was done, and `answer` is what came of it."""

    def __call__(self) -> T:
        """Raises: KernelError; WouldBlock, after which it may be asked again."""
        if self._error is not None:
            raise self._error
        if not self.is_done:
            try:
                self.answer = self._action()
                self.is_done = True
            except KernelError as error:
                self._error = error
                raise
        return self.answer


def _unless_deadlock(error: KernelError) -> None:
    """What the guest refuses, or is too broken for, is no matter of a file of ours.

    Raises: KernelError EDEADLK, from a probe's handler.
    """
    if error.errno == errno.EDEADLK:
        raise error


class GuestMount:
    """A kernel's files, which a front end serves: every request that it may make, from any thread.

    Takes the control lock, for the guest stands still while nobody holds it. Paths are absolute and start at
    the mount's root; all methods raise KernelError with Linux's errno.

    A file of ours is opened, read and written by the guest's own system calls, whose file operations
    come back to the file; scratch/ is the guest's alone. While nothing in the guest's text is
    patched nobody could see those calls, and our files answer without them; when the guest is dead too:
    who asks why it died has to get an answer.
    """

    def __init__(self, files: Filesystem, guest: Guest, lock: ControlLock, limits: Limits) -> None:
        self.lock = lock
        self._limits = limits
        self._closed = False
        self.watcher: ChangeWatcher | None = None
        self._handles: dict[int, _Opened | None] = {}
        """Open files; None: one of a kernel whose place another one took, which has no such file."""
        self._numbers = count(1)
        self._pollers: dict[int, Callable[[], None]] = {}
        """Who was told last that it will be notified, by handle."""
        self.serve(files, guest)

    def serve(self, files: Filesystem, guest: Guest) -> None:
        """Show a kernel's files from now on; it has the same lock as the one before, which is held then.

        Files that are open go on as this kernel's of the same name; those of the old guest are gone with it.
        """
        self._files, self._guest = files, guest
        names = files.root.names()
        self._guest_trees = {
            top: GuestTree(guest, top, number)
            for number, top in enumerate(GUESTS_OWN, start=1)
            if top[1:] in names
        }
        """By top directory; those that the mount shows: none where tracefs is its root."""
        for handle, opened in self._handles.items():
            self._handles[handle] = self._reopened(opened)
        self.open_in_guest()
        pollers, self._pollers = self._pollers, {}
        for notify in pollers.values():
            notify()

    def _reopened(self, opened: _Opened | None) -> _Opened | None:
        if opened is None or isinstance(opened, GuestFile):
            return None
        if isinstance(opened, OpenDirectory):
            return replace(opened, fd=None, number=None, file=None)
        try:
            inner = self._files.open(opened.path, opened.flags & ~(os.O_TRUNC | os.O_EXCL), opened.client)
        except KernelError:
            return None
        inner.goes_on_from(opened.inner)
        return replace(opened, inner=inner, fd=None, number=None)

    def _at(self, path: str) -> Filesystem | GuestTree:
        """Who answers for a path."""
        for top, scratch in self._guest_trees.items():
            if path.startswith(top) and path[len(top) : len(top) + 1] in ("", "/"):
                return scratch
        return self._files

    def _opened(self, handle: int) -> ControlFile | GuestFile:
        """The open file behind a handle. Raises: KernelError EISDIR, and as _handle()."""
        opened = self._handle(handle)
        if isinstance(opened, OpenDirectory):
            raise KernelError(errno.EISDIR, opened.path)
        return opened

    def _handle(self, handle: int) -> _Opened:
        """The open file or directory behind a handle.

        Raises: KernelError EBADF; ESTALE: its kernel is gone; EIO after close(), as for whom the end wakes.
        """
        if self._closed:
            raise KernelError(errno.EIO, "the mount has ended")
        try:
            opened = self._handles[handle]
        except KeyError:
            raise KernelError(errno.EBADF, f"no handle {handle}") from None
        if opened is None:
            raise KernelError(errno.ESTALE, "of a kernel before this one")
        return opened

    def _check_room(self, path: str) -> None:
        """Raises: KernelError ENFILE where no more files may be open; who raises the limit gets in."""
        if not path.startswith(UNLIMITED_FILES):
            self._limits.check(Limit.OPEN_FILES, self._limits.open_files)

    def _add(self, opened: _Opened) -> int:
        handle = next(self._numbers)
        self._handles[handle] = opened
        self._limits.open_files = len(self._handles)
        return handle

    def _task(self, client: Client) -> GuestTask:
        return self._guest.mirror.task_of(client.pid, client.uid, client.gid)

    def _task_for_control(self, client: Client) -> GuestTask | None:
        """The client's task; None where the guest is so broken that it can't have one."""
        try:
            return self._guest.mirror.task_of(client.pid, client.uid, client.gid)
        except KernelError as error:
            _unless_deadlock(error)
            self._guest.executive.note(f"no task for process {client.pid}: {error.strerror}")
            return None

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        """Attributes of the node at `path`; cheap, since the front end asks for every path component.

        `client`: who asks. Where a system call of its ends with the answer, it is made in the guest too.
        """
        with self.lock:
            if client is None or not self._guest.is_watched:
                return self._at(path).getattr(path)
            try:
                found = self._at(path).getattr(path)
            except KernelError:
                self._looked_up(client(), path, None)
                raise
            self._looked_up(client(), path, found)
            return found

    def _looked_up(self, client: Client, path: str, found: Stat | None) -> None:
        """What the client's call comes to is the guest's affair: the host has its own answer."""
        call = self._guest.client_call(client.pid, client.uid)
        if call is None:
            return
        with suppress(KernelError):
            if call.fd is not None:
                self._on_file(client, path, None, _ATTRIBUTES)
            elif (walks := walks_at_end(call, path, found)) is not None:
                self._as_called(client, call, walks, exists=found is not None)

    def _as_called(
        self,
        client: Client,
        call: ClientCall,
        walks: Sequence[str],
        hostfs: HostfsHandler | None = None,
        *,
        exists: bool = True,
    ) -> int:
        """The client's own system call, by its task. Raises: KernelError, the guest's answer."""
        task = self._task(client)
        self._guest.syscalls.set_umask(task, client.umask)
        lookup = HostLookup.EXISTS if exists else HostLookup.MISSING
        return self._guest.syscalls.of_client(task, call, walks, lookup, hostfs)

    def _on_file(self, client: Client, path: str, handle: int | None, names: Collection[str]) -> None:
        """The client's call on a descriptor, if it is one of these, on a file that the guest has open too."""
        at = self._at(path)
        opened = None if handle is None else self._handles.get(handle)
        if isinstance(at, GuestTree):
            at.on_file(client, path, opened if isinstance(opened, GuestFile) else None, names)
            return
        call = self._guest.client_call(client.pid, client.uid)
        if call is None or call.fd is None or call.name not in names:
            return
        if opened is None:
            files = (file for file in self._handles.values() if isinstance(file, ControlFile))
            opened = next((file for file in files if file.path == path and file.fd is not None), None)
        if isinstance(opened, ControlFile) and opened.fd is not None:
            task = self._task(client)
            with self._guest.syscalls.numbered(task, call.fd, opened.fd):
                self._guest.syscalls.of_client(task, call)

    def fgetattr(self, handle: int, client: Callable[[], Client] | None = None) -> Stat:
        """Attributes of an open file, whose name may be gone."""
        with self.lock:
            opened = self._handle(handle)
            if client is not None and self._guest.is_watched:
                with suppress(KernelError):
                    self._on_file(client(), opened.path, handle, _ATTRIBUTES)
            if isinstance(opened, GuestFile):
                return opened.scratch.fgetattr(opened)
            if isinstance(opened, OpenDirectory):
                return self._at(opened.path).getattr(opened.path)
            return self._files.stat(opened.inner.node)

    def opendir(self, client: Client, path: str) -> int:
        """A directory is about to be listed; returns the handle for the calls below."""
        with self.lock:
            self._check_room(path)
            directory = OpenDirectory(path)
            if not self._guest.is_dead:
                task = self._task_for_control(client)
                # A guest without room for it keeps nobody from listing.
                with suppress(KernelError):
                    if task is not None and self._guest.is_watched:
                        self._open_directory(client, task, directory)
            return self._add(directory)

    def _open_directory(self, client: Client, task: GuestTask, directory: OpenDirectory) -> None:
        at, flags = self._at(directory.path), os.O_RDONLY | os.O_DIRECTORY
        if isinstance(at, GuestTree):
            directory.file = file = at.open(client, directory.path, flags)
            directory.fd, directory.number = file.fd, file.number
        else:
            found = self._open_in(client, task, directory.path, flags, lambda _op, _buffer, _count: 0)
            directory.fd, directory.number = found

    def _open_in(
        self, client: Client, task: GuestTask, path: str, flags: int, serve: HostfsHandler
    ) -> tuple[int, int | None]:
        """open(2) of a file of ours in the guest: its descriptor there, and what the process calls it."""
        syscalls, call = self._guest.syscalls, self._guest.client_call(client.pid, client.uid)
        if call is None or call.name not in OPENS:
            return syscalls.open(task, path, flags & ~os.O_CREAT, hostfs=serve), None
        number = self._guest.mirror.next_fd(client.pid)
        with syscalls.numbered(task, number):
            fd = self._as_called(client, call, [path], serve)
            return (fd if number is None else syscalls.real_fd(task)), number

    def chdir(self, client: Client, path: str) -> None:
        """The client makes a directory its working directory, if it says so; the guest can't refuse."""
        with self.lock:
            call = self._guest.client_call(client.pid, client.uid)
            if call is None or call.name not in ("chdir", "fchdir"):
                return
            with suppress(KernelError):
                if call.name == "chdir":
                    self._as_called(client, call, [path])
                else:
                    self._guest.syscalls.with_path(self._task(client), "chdir", path)

    def readdir(self, path: str) -> list[DirEntry]:
        """The directory's entries, "." and ".." first."""
        with self.lock:
            return self._entries(path)

    def getdents(self, client: Client, handle: int, start: int) -> list[DirEntry]:
        """The entries of an open directory from number `start` on; 0 makes a snapshot of all of them."""
        with self.lock:
            directory = self._handle(handle)
            if not isinstance(directory, OpenDirectory):
                raise KernelError(errno.ENOTDIR, f"handle {handle}")
            if start == 0:
                directory.entries = self._entries(directory.path)
            call = self._guest.client_call(client.pid, client.uid)
            if call is not None and call.name == "getdents64" and directory.fd is not None:
                with suppress(KernelError):
                    task = self._task(client)
                    with self._guest.syscalls.numbered(task, call.fd, directory.fd):
                        self._guest.syscalls.of_client(task, call)
            return directory.entries[start:]

    def _entries(self, path: str) -> list[DirEntry]:
        entries = self._at(path).readdir(path)
        if path == "/":
            return [self._root_entry(entry) for entry in entries]
        if path in self._guest_trees:
            parent = self._files.getattr("/").ino
            return [entry._replace(ino=parent) if entry.name == ".." else entry for entry in entries]
        return entries

    def _root_entry(self, entry: DirEntry) -> DirEntry:
        """With the number of what is mounted there, unless the guest is dead."""
        scratch = self._guest_trees.get("/" + entry.name)
        if scratch is not None:
            with suppress(KernelError):
                return entry._replace(ino=scratch.root_ino())
        return entry

    def readlink(self, client: Client, path: str) -> str:
        """Where a symbolic link points: for a readlink(2), or for a path walk."""
        with self.lock:
            return self._at(path).readlink(client, path)

    def open(self, client: Client, path: str, flags: int) -> int:
        """Open with open(2)'s flags, O_TRUNC included; returns the handle for the calls below."""
        with self.lock:
            self._check_room(path)
            at = self._at(path)
            if isinstance(at, GuestTree):
                return self._add(at.open(client, path, flags))
            return self._open_control(client, path, flags)

    def _open_control(self, client: Client, path: str, flags: int) -> int:
        handle = self._add(self._control_file(client, path, flags))
        if self.watcher is not None and flags & os.O_TRUNC:
            self.watcher.truncated(path)
        return handle

    def _control_file(self, client: Client, path: str, flags: int) -> ControlFile:
        task = None if self._guest.is_dead else self._task_for_control(client)
        if task is None or not self._guest.is_watched:
            inner = self._files.open(path, flags, client)
            return ControlFile(path, flags, client, inner, None)
        opened = _Once(lambda: self._files.open(path, flags, client))

        def execute() -> int:
            opened()
            return 0

        def serve(op: int, _buffer: int, _count: int) -> int:
            if op != HostfsOp.OPEN:
                return 0
            # What a definitions file holds goes with O_TRUNC, and its directories in the guest.
            if flags & os.O_TRUNC and self._files.runs_guest(path):
                raise RunElsewhere(execute)
            opened()
            return 0

        fd = number = None
        try:
            fd, number = self._open_in(client, task, path, flags, serve)
        except KernelError as error:
            _unless_deadlock(error)
        inner = opened.answer if opened.is_done else opened()
        return ControlFile(path, flags, client, inner, fd, number)

    def open_in_guest(self) -> None:
        """The guest is about to be watched: open there what was opened while it was not.

        What it has no room for it will not take part in: that must not keep a probe from being armed.
        """
        if self._guest.is_dead or self._guest.executive.is_busy:
            return
        with suppress(KernelError):
            for opened in self._handles.values():
                if isinstance(opened, ControlFile) and opened.fd is None:
                    opened.fd = self._guest.open_file(opened.path, opened.flags)

    def create(self, client: Client, path: str, mode: int, flags: int) -> int:
        """Make a regular file and open it."""
        with self.lock:
            self._check_room(path)
            at = self._at(path)
            if isinstance(at, Filesystem):
                at.create(path)
            return self._add(at.create(client, path, mode, flags))

    def is_stream(self, handle: int) -> bool:
        """Whether lseek(2) on the handle has to answer ESPIPE."""
        opened = self._opened(handle)
        return isinstance(opened, ControlFile) and opened.inner.stream

    def set_status_flags(self, handle: int, flags: int) -> None:
        """Those of a request on it: fcntl(F_SETFL) asks for nothing itself."""
        opened = self._opened(handle)
        if isinstance(opened, ControlFile):
            opened.inner.set_status_flags(flags)

    def reads_host(self, handle: int) -> bool:
        """Whether a write to it reads files of the host, and so takes as long as they do; no lock is held."""
        opened = self._opened(handle)
        return isinstance(opened, ControlFile) and opened.inner.node.reads_host

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """At most `size` bytes; b"" is the end of the file.

        Raises: WouldBlock when there is nothing yet; the caller answers EAGAIN or calls wait().
        """
        with self.lock:
            opened = self._opened(handle)
            if isinstance(opened, GuestFile):
                return opened.scratch.read(client, opened, size, offset)
            inner = opened.inner
            if opened.fd is None or not self._guest.is_watched:
                return inner.read(size, offset)
            produce = _Once(lambda: inner.read(size, offset))
            task = self._task_for_control(client)
            if task is not None:
                try:
                    number = self._number(client, opened)
                    data = self._guest.read_file(task, opened.fd, size, produce, number)
                    if produce.is_done:
                        return data
                except KernelError as error:
                    _unless_deadlock(error)
            return produce()

    def _number(self, client: Client, opened: ControlFile) -> int | None:
        """What the client that reads or writes calls its descriptor."""
        call = self._guest.client_call(client.pid, client.uid)
        return opened.number if call is None or call.fd is None else call.fd

    def read_page(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """What the host's page cache asks for, on behalf of splice(2), sendfile(2) or mmap(2)."""
        with self.lock:
            opened = self._opened(handle)
            if isinstance(opened, GuestFile):
                return opened.scratch.read(client, opened, size, offset)
            # Linux: no vfs_read is in the way of a splice, so the guest has no part in it.
            return opened.inner.read_page(size)

    def write(self, client: Client, handle: int, data: bytes, offset: int) -> int:
        """Number of bytes taken. Raises: WouldBlock as read() does."""
        opened = self._opened(handle)
        prepared = None
        if isinstance(opened, ControlFile) and opened.inner.node.reads_host:
            prepared = opened.inner.prepare(client, data)
        writing: Callable[[], int] | None = None

        def write() -> int:
            nonlocal writing
            with self.lock:
                if self._opened(handle) is not opened:
                    raise KernelError(errno.ESTALE, "another kernel took this one's place meanwhile")
                if isinstance(opened, GuestFile):
                    return opened.scratch.write(client, opened, data, offset)
                if writing is None:
                    writing = self._writing(client, opened, handle, data, offset, prepared, kept)
                return writing()

        with ExitStack() as kept:
            return giving_way(self.lock, write)

    def _writing(
        self,
        client: Client,
        opened: ControlFile,
        handle: int,
        data: bytes,
        offset: int,
        prepared: Callable[[], int] | None,
        kept: ExitStack,
    ) -> Callable[[], int]:
        """What a write to a file of ours does: by itself, or as a call of the client's task in the guest."""
        inner, fd = opened.inner, opened.fd
        by_piece = WriteInPieces(inner, data, offset, partial(self._write_control, opened, handle, prepared))
        if fd is None or not self._guest.is_watched or inner.node.replaces_kernel:
            if inner.node.notes_writer and not self._guest.is_dead:
                self._enter(client)
            return by_piece
        consume = _Once(by_piece)

        def write() -> int:
            task = self._task_for_control(client)
            if task is not None:
                try:
                    served, number = self._in_guest(inner, consume), self._number(client, opened)
                    taken = self._guest.write_file(task, fd, data, served, kept, number)
                    if consume.is_done:
                        return taken
                except KernelError as error:
                    _unless_deadlock(error)
            return consume()

        return write

    def _write_control(
        self,
        opened: ControlFile,
        handle: int,
        prepared: Callable[[], int] | None,
        piece: Piece,
        offset: int,
    ) -> int:
        watcher, (data, is_part) = self.watcher, piece
        try:
            taken = opened.inner.write(data, offset, prepared, is_part=is_part)
        except KernelError:
            if watcher is not None:
                watcher.written(handle, opened.path, data, failed=True, is_part=is_part)
            raise
        if watcher is not None:
            watcher.written(handle, opened.path, data[:taken], failed=False, is_part=is_part)
        return taken

    def _enter(self, client: Client) -> None:
        """Make the client's task the one that runs, if the guest can."""
        task = self._task_for_control(client)
        try:
            if task is not None:
                self._guest.enter(task)
        except KernelError as error:
            _unless_deadlock(error)

    @staticmethod
    def _in_guest(inner: OpenFile, consume: Callable[[], int]) -> Callable[[], int]:
        """What the guest's vfs_write comes back for."""

        def elsewhere() -> int:
            raise RunElsewhere(consume)

        return elsewhere if inner.node.runs_guest else consume

    def wait(self, handle: int, timeout: float) -> None:
        """Return once the handle may have something to give, or after `timeout` seconds; no lock is held."""
        opened = self._opened(handle)
        if isinstance(opened, ControlFile):
            opened.inner.wait(timeout)

    def give_up(self, client: Client, handle: int, error: int) -> None:
        """The client doesn't wait for what raised WouldBlock: it gets this errno instead."""
        with self.lock:
            opened = self._opened(handle)
            if isinstance(opened, ControlFile) and opened.fd is not None:
                with suppress(KernelError):
                    self._guest.give_up(self._guest.mirror.known(client.pid), error)

    def poll(self, handle: int, notify: Callable[[], None] | None) -> int:
        """Readiness as poll(2)'s mask; `notify` is called once, when the mask has changed."""
        with self.lock:
            opened = self._opened(handle)
            if notify is not None:
                self._pollers[handle] = notify
            if isinstance(opened, GuestFile):
                return opened.scratch.poll(opened, notify)
            return opened.inner.poll(notify)

    def release(self, handle: int) -> None:
        """Forget the handle: its last descriptor was closed; the request comes from no process."""
        with self.lock:
            opened = self._handles.pop(handle, None)
            self._limits.open_files = len(self._handles)
            self._pollers.pop(handle, None)
            if isinstance(opened, ControlFile):
                self._files.release(opened.inner)
                if self.watcher is not None:
                    self.watcher.released(handle)
            if opened is None or opened.fd is None or self._guest.is_dead:
                return
            file = opened.file if isinstance(opened, OpenDirectory) else opened
            if isinstance(file, GuestFile):
                file.scratch.release(file)
            else:
                with suppress(KernelError):
                    self._guest.close_file(opened.fd, opened.number)

    def is_between_parts(self) -> bool:
        """Whether a file of ours waits for the next part of a long write(2); needs the lock."""
        controls = (opened for opened in self._handles.values() if isinstance(opened, ControlFile))
        return any(opened.inner.is_between_parts for opened in controls)

    def fsync(self, client: Client, handle: int) -> None:
        """fsync(2) or fdatasync(2). Raises: KernelError EINVAL for our files, which have none."""
        with self.lock:
            opened = self._opened(handle)
            if isinstance(opened, ControlFile):
                raise KernelError(errno.EINVAL, opened.path)
            opened.scratch.on_file(client, opened.path, opened, ("fsync", "fdatasync"))

    def truncate(self, client: Client, path: str, size: int) -> None:
        """truncate(2); O_TRUNC comes with open()."""
        with self.lock:
            at = self._at(path)
            if not isinstance(at, GuestTree):
                self._tell(client, path, ("truncate",))
            at.truncate(client, path, size)

    def ftruncate(self, client: Client, handle: int, size: int) -> None:
        """ftruncate(2): of a file of ours nothing happens, whatever the size."""
        with self.lock:
            opened = self._opened(handle)
            if isinstance(opened, GuestFile):
                opened.scratch.ftruncate(client, opened, size)
            else:
                with suppress(KernelError):
                    self._on_file(client, opened.path, handle, ("ftruncate",))

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """mkdir(2)."""
        with self.lock:
            at = self._at(path)
            if isinstance(at, GuestTree):
                at.mkdir(client, path, mode)
            else:
                self._change(client, ("mkdir", "mkdirat"), path, lambda: at.mkdir(client, path, mode), mode)
                if self.watcher is not None:
                    self.watcher.made(path)

    def rmdir(self, client: Client, path: str) -> None:
        """rmdir(2)."""
        with self.lock:
            at = self._at(path)
            if isinstance(at, GuestTree):
                at.rmdir(client, path)
            else:
                self._change(client, ("rmdir", "unlinkat"), path, lambda: at.rmdir(client, path))
                if self.watcher is not None:
                    self.watcher.removed(path)

    def _change(
        self, client: Client, names: tuple[str, ...], path: str, change: Callable[[], None], *args: int
    ) -> None:
        """A directory of ours is made or removed by the guest's system call, which comes back for it."""
        if not self._guest.is_watched:
            change()
            return
        changed = _Once(change)

        def execute() -> int:
            changed()
            return 0

        def serve(_op: int, _buffer: int, _count: int) -> int:
            raise RunElsewhere(execute)

        try:
            task, call = self._task(client), self._guest.client_call(client.pid, client.uid)
            if call is not None and call.name in names:
                self._as_called(client, call, [path], serve, exists=not args)
            else:
                self._guest.syscalls.with_path(task, names[0], path, *args, hostfs=serve)
        except KernelError as error:
            _unless_deadlock(error)
        changed()

    def _tell(
        self, client: Client, path: str, names: tuple[str, ...], by_fd: tuple[str, ...] = (), *more: str
    ) -> None:
        """The client's call on a file of ours is made in the guest too, which has nothing to do there."""
        if isinstance(self._at(path), GuestTree):
            return
        call = self._guest.client_call(client.pid, client.uid)
        if call is None:
            return
        with suppress(KernelError):
            if call.name in names and len(call.paths) == 1 + len(more):
                self._as_called(client, call, [path, *more], exists=call.name not in ("mknod", "mknodat"))
            else:
                self._on_file(client, path, None, by_fd)

    def unlink(self, client: Client, path: str) -> None:
        """unlink(2)."""
        with self.lock:
            self._tell(client, path, ("unlink", "unlinkat"))
            self._at(path).unlink(client, path)

    def rename(self, client: Client, old: str, new: str) -> None:
        """rename(2). Raises: KernelError EXDEV between the guest's files and ours."""
        with self.lock:
            source, target = self._at(old), self._at(new)
            if source is not target and self._files in (source, target):
                raise KernelError(errno.EXDEV, "one of the names is the guest's")
            self._tell(client, old, ("rename", "renameat2"), (), new)
            source.rename(client, old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        """link(2). Raises: KernelError EXDEV between the guest's files and ours, EPERM for ours."""
        with self.lock:
            source, target = self._at(old), self._at(new)
            if source is not target and self._files in (source, target):
                raise KernelError(errno.EXDEV, "one of the names is the guest's")
            source.link(client, old, new)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """mknod(2) of a FIFO, a socket or an empty file. Raises: KernelError EPERM for devices."""
        with self.lock:
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK):
                raise KernelError(errno.EPERM, path)
            self._tell(client, path, ("mknod", "mknodat"))
            self._at(path).mknod(client, path, mode)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Make `path` a symbolic link to `target`."""
        with self.lock:
            self._at(path).symlink(client, path, target)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set the permission bits."""
        with self.lock:
            self._tell(client, path, ("chmod", "fchmodat"), ("fchmod",))
            self._at(path).chmod(client, path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set the owner; -1 leaves a field alone."""
        with self.lock:
            self._tell(client, path, ("chown", "lchown", "fchownat"), ("fchown",))
            self._at(path).chown(client, path, uid, gid)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times, in nanoseconds since the epoch; None leaves one alone."""
        with self.lock:
            self._tell(client, path, ("utimensat",), ("utimensat",))
            self._at(path).utimens(client, path, atime_ns, mtime_ns)

    def is_dead(self) -> bool:
        """Whether the guest has panicked; waits for what every request waits for."""
        with self.lock:
            return self._guest.is_dead

    def close(self) -> None:
        """The mount ends: wake every waiter, refuse further work."""
        self._closed = True
        with self.lock:
            for opened in self._handles.values():
                if isinstance(opened, ControlFile):
                    self._files.release(opened.inner)
            self._handles.clear()
            if self.watcher is not None:
                self.watcher.closed()
