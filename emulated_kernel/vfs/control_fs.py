"""ControlFs: the file system of control files. GuestCalls: repeats clients' system calls in the guest.

The host serves clients' system calls on control files. If a probe could notice a call, the client's task in
the guest *repeats* the call. Each kind of guest implements this in a subclass of GuestCalls.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from threading import Event, get_ident
from types import TracebackType
from typing import Any, Self

from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, YieldLock
from emulated_kernel.vfs.core.changes import ChangeWatcher
from emulated_kernel.vfs.core.chunked_write import ChunkedWrite, retry_yielding_lock
from emulated_kernel.vfs.core.client import GONE, Client, DirEntry, Stat, require_path
from emulated_kernel.vfs.core.node import Directory
from emulated_kernel.vfs.core.node_tree import CONTROL, NodeTree
from emulated_kernel.vfs.core.open_file import OpenFile, Piece, Steps
from emulated_kernel.vfs.filesystem import FileDescription, FileSystem, OpenDirectory, is_device

ATTRIBUTE_CALLS = ("newfstat", "newfstatat", "statx", "lseek")
"""Names of the system calls for which the host's kernel requests the attributes of an open file."""
_ALWAYS_OPEN = ("/machine", f"/{CONTROL}/machine")
"""Directories whose files can be opened beyond the limit of open files, because the files set the limits."""


_SETTLED = nullcontext()
"""Context manager that does not wait, for a file system whose changes are not saved."""


class _Gated(Exception):
    """Raised if a change must wait for the event `gate`, because a kernel is being built to replace this one.

    The thread that waits must not hold the lock.
    """

    def __init__(self, gate: Event) -> None:
        super().__init__()
        self.gate = gate


def _go_on() -> None:
    """Do nothing between two steps of a read: the argument `check` of retry_yielding_lock()."""


class ControlFile(FileDescription):
    """An open control file, and the guest's descriptor for it."""

    __slots__ = ("client", "fd", "guard", "inner", "number", "task")

    fs: ControlFs

    def __init__(self, fs: ControlFs, path: str, flags: int, client: Client) -> None:
        self.fs = fs
        self.path = path
        self.flags = flags
        self.error = 0
        self.handle = 0
        self.guard = fs.lock_for(path, flags)
        """Context manager that holds the lock for a request about this file; see ControlFs.lock_for()."""
        self.client = client
        """The process that opened the file."""
        self.inner: OpenFile
        """The open file of the node at this path of the tree, which does the reads and writes.

        GuestCalls.open() sets it, and a reboot replaces it.
        """
        self.fd: int | None = None
        """The guest's descriptor for the file.

        The value is None if no probe could notice the open, or if the guest was dead or out of resources.
        """
        self.number: int | None = None
        """The descriptor's number in the process that opened the file, or None if it is unknown."""
        self.task: Any = None
        """The guest's task that made the last call on the file, or None before the first call.

        Only GuestCalls uses the attribute.
        """

    @property
    def stream(self) -> bool:
        """Whether lseek(2) fails with ESPIPE; see FileDescription."""
        return not self.inner.node.has_position

    @property
    def acts_on_close(self) -> bool:
        """Whether release() has an effect that other files show; see FileDescription."""
        return self.inner.acts_on_close

    @property
    def reads_host(self) -> bool:
        """Whether a write to this open file may name host files, which are then read; see FileDescription."""
        return self.inner.node.reads_host and self.inner.writable

    @property
    def writes_at_once(self) -> bool:
        """Return True if writes to this file never name host files; see FileDescription."""
        return not self.inner.node.reads_host

    def getattr(self, client: Callable[[], Client] | None = None) -> Stat:
        """Return the file's attributes, and repeat the client's call in the guest; see FileDescription."""
        fs = self.fs
        informed = fs.informed(client()) if client is not None and fs.calls.sees_lookups else None
        with fs.lock.observing():
            self.check()
            if informed is not None and not fs.lock.is_lent:
                with suppress(KernelError):
                    fs.calls.on_file(informed, self.path, self, ATTRIBUTE_CALLS)
            return fs.tree.stat(self.inner.node)

    def informed(self, client: Client) -> Client:
        """Return `client` with `facts` about its process, which the guest needs for a read or write.

        GuestCalls.informed_of_file() gets the facts. See FileDescription.
        """
        return self.fs.calls.informed_of_file(client)

    def read(self, client: Client, size: int, offset: int) -> bytes:
        """Read from the file step by step, by GuestCalls.read(); see FileDescription."""
        step = partial(self._read, client, size, offset)
        return retry_yielding_lock(self.fs.lock, step, _go_on)

    def _read(self, client: Client, size: int, offset: int) -> bytes:
        """Do the next step of a read; the last step returns the data.

        Lock: taken. Raises: YieldLock (more steps follow), and the errors of FileDescription.read().
        """
        with self.guard:
            if self.fs.lock.is_lent or self.inner.node.is_unseen:
                self.check()
                return self.inner.read_step(size, offset)
            if self.error:
                raise self.gone()
            return self.fs.calls.read(client, self, size, offset)

    def read_page(self, client: Client, size: int, offset: int) -> bytes:
        """Return a page of the file, by GuestCalls.read_page(); see FileDescription."""
        del offset
        with self.fs.lock:
            self.check()
            return self.fs.calls.read_page(client, self, size)

    def write(self, client: Client, data: bytes, offset: int) -> int:
        """Write data to the file, piece by piece; see FileDescription.

        If the write names files of the host, read them first, without the lock.
        """
        if self.error:
            raise self.gone()
        # The front end may use its buffer for another request between two steps.
        data = bytes(data)
        while True:
            inner = self.inner
            prepared = inner.prepare(client, data) if inner.node.reads_host else None
            try:
                with (
                    self.fs.settled(),
                    PendingWrite(client, self, inner, data, offset, prepared) as write,
                ):
                    check = partial(self._check_writer, client)
                    return retry_yielding_lock(self.fs.lock, write.step, check)
            except _Gated as wait:
                with self.fs.lock.waiting():
                    wait.gate.wait()

    def _check_writer(self, client: Client) -> None:
        """Check that the writing process was not killed. Raises: KernelError EINTR.

        Before the exception is raised, the guest's system call is ended. Lock: taken if the process was
        killed.
        """
        if self.fs.lock.is_dying(get_ident()):
            self.give_up(client, errno.EINTR)
            raise KernelError(errno.EINTR, "the process was killed")

    def poll(self, notify: Callable[[], None] | None) -> int:
        """Return the node's ready events as a poll mask; see FileDescription. Lock: taken."""
        with self.fs.lock:
            self.check()
            return self.inner.poll(notify)

    def wait(self, timeout: float) -> None:
        """Wait until the node's open file may be ready; see FileDescription."""
        self.inner.wait(timeout)

    def give_up(self, client: Client, error: int) -> None:
        """End the guest's system call in which the client's task waits; see FileDescription."""
        with self.fs.lock:
            self.check()
            self.fs.calls.give_up(client, self, error)

    def ftruncate(self, client: Client, size: int) -> None:
        """Do nothing: control files have no size. The guest repeats the client's ftruncate call."""
        del size
        with self.fs.lock:
            self.check()
            with suppress(KernelError):
                self.fs.calls.on_file(client, self.path, self, ("ftruncate",))

    def set_status_flags(self, flags: int) -> None:
        """Set or clear O_NONBLOCK as in `flags`, and ignore other flags; see FileDescription."""
        self.inner.set_status_flags(flags)

    def release(self) -> None:
        """Release the node's open file, and close the guest's descriptor if it is open; see FileDescription.

        Lock: taken.
        """
        fs = self.fs
        with self.guard if self.fd is None else fs.lock:
            if self.error:
                return
            del fs.opened[self]
            try:
                fs.tree.release(self.inner)
            finally:
                if fs.watcher is not None:
                    fs.watcher.released(self.handle)
                if self.fd is not None:
                    fs.calls.release(self)


class ControlDirectory(OpenDirectory):
    """An open directory of control files. `fd`, `number` and `task` mean the same as in ControlFile."""

    __slots__ = ("fd", "number", "task")

    fs: ControlFs

    def __init__(self, fs: ControlFs, path: str) -> None:
        super().__init__(fs, path)
        self.fd: int | None = None
        self.number: int | None = None
        self.task: Any = None

    def getattr(self, client: Callable[[], Client] | None = None) -> Stat:
        """Return the attributes of the directory, and repeat the call in the guest; see FileDescription."""
        fs = self.fs
        informed = fs.informed(client()) if client is not None and fs.calls.sees_lookups else None
        with fs.lock.observing():
            if informed is not None and not fs.lock.is_lent:
                with suppress(KernelError):
                    fs.calls.on_file(informed, self.path, None, ATTRIBUTE_CALLS)
            return fs.tree.getattr(require_path(self.path))

    def listed(self, client: Client) -> None:
        """Repeat the client's getdents64(2) in the guest, by GuestCalls.listed(); see OpenDirectory."""
        with self.fs.lock.observing():
            if not self.fs.lock.is_lent:
                self.fs.calls.listed(client, self)

    def release(self) -> None:
        """Release this open directory, and close the guest's descriptor if it is open; see FileDescription.

        Lock: taken.
        """
        with self.fs.lock.observing() if self.fd is None else self.fs.lock:
            self.fs.opened.pop(self, None)
            if self.fd is not None and not self.error:
                self.fs.calls.release(self)


class PendingWrite:
    """One write(2) to a control file, done step by step. Between two steps, other threads get the lock.

    The object is a context manager. In its `with` block, the caller passes `step` to retry_yielding_lock(),
    which calls `step` until the write has ended.
    """

    __slots__ = (
        "_chunks",
        "_has_begun",
        "_kept",
        "_prepared",
        "_steps",
        "client",
        "data",
        "file",
        "inner",
        "plan",
    )

    def __init__(
        self,
        client: Client,
        file: ControlFile,
        inner: OpenFile,
        data: bytes,
        offset: int,
        prepared: Callable[[], Steps] | None,
    ) -> None:
        """Begin a write of `data` at `offset`.

        `inner` is `file.inner` at the start of the write. A reboot between two steps replaces `file.inner`.
        `prepared`: the result of OpenFile.prepare(), a function that begins the write; None if prepare() was
        not called.
        """
        self.client = client
        self.file = file
        self.inner = inner
        self.data = data
        self._prepared = prepared
        self._has_begun = False
        self._steps: Steps | None = None
        """The steps that write the current piece of `data`, or None before the piece has begun."""
        self._chunks = ChunkedWrite(inner, data, offset)
        self.plan: Callable[[], int] | None = None
        """Function that does the next step of the write, for write() of subclasses of GuestCalls.

        They set it at the first step. It is None before that, and after the write.
        """
        self._kept: ExitStack | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether files of the host were read for this write."""
        return self._prepared is not None

    @property
    def kept(self) -> ExitStack:
        """ExitStack with the resources of the guest's call, which are released when the write has ended."""
        if self._kept is None:
            self._kept = ExitStack()
        return self._kept

    def by_piece(self) -> int:
        """Do the next step of writing the data piece by piece, without a system call in the guest.

        After the last step, return the number of bytes written.
        Raises: YieldLock (more steps follow), errors of the file.
        """
        return self._chunks.step(self._write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._steps is not None:
            self._steps.close()
        # The plan refers to this object. Both would stay until Python collects garbage.
        self.plan = None
        if self._kept is not None:
            self._kept.__exit__(kind, error, traceback)

    def step(self) -> int:
        """Do the next step of the write. After the last step, return the number of bytes written.

        Lock: taken. Raises: YieldLock (more steps follow), WouldBlock (the write has to wait for the file),
        _Gated, KernelError ESTALE (another kernel was booted since the write began), EIO (the mount has
        ended), or an error of the file.
        """
        file = self.file
        with file.fs.lock:
            if not self._has_begun:
                # The new kernel takes over the records of markers, so markers need not wait.
                if not self.inner.node.notes_writer:
                    file.fs.check_gate()
                self._has_begun = True
            if file.error:
                raise file.gone()
            if file.inner is not self.inner:
                raise KernelError(errno.ESTALE, "another kernel took this one's place meanwhile")
            file.fs.note_user(self.client)
            return file.fs.calls.write(self)

    def _write(self, piece: Piece, offset: int) -> int:
        """Do the next step of writing `piece`. After the last step, return the number of bytes taken.

        `offset`: file offset of the piece. After the last step, or if the step raises KernelError, report the
        piece to ControlFs.watcher, if there is one.
        Hazard: read ControlFs.watcher before the step, because the step may boot another kernel.
        Raises: YieldLock (more steps follow), errors of the file.
        """
        file = self.file
        watcher = file.fs.watcher
        data, is_part = piece
        if self._steps is None:
            self._steps = self.inner.begin_write(data, offset, self._prepared, is_part=is_part)
        try:
            next(self._steps)
        except StopIteration as end:
            self._steps = None
            taken: int = end.value
        except KernelError:
            if watcher is not None:
                watcher.written(file.handle, file.path, data, failed=True, is_part=is_part)
            raise
        else:
            raise YieldLock
        if watcher is not None:
            watcher.written(file.handle, file.path, data[:taken], failed=False, is_part=is_part)
        return taken


@contextmanager
def _settled(watcher: ChangeWatcher) -> Iterator[None]:
    try:
        yield
    finally:
        watcher.settle()


class GuestCalls:
    """Repeats clients' system calls on control files in the guest. This base class repeats no calls.

    ControlFs takes the control lock before it calls a method, unless the method's docstring says "Lock: not
    used". Control files work even if the guest refuses a call or cannot make it. The methods raise only
    WouldBlock and YieldLock, in addition to the errors of the file itself.
    Each subclass decides for each method whether the method begins a request, which advances the guest's
    clock.
    """

    fs: ControlFs
    """The file system of the control files; ControlFs sets it."""

    @property
    def is_dead(self) -> bool:
        """Whether the guest cannot run any more."""
        return False

    @property
    def sees_lookups(self) -> bool:
        """Whether looked_up() and on_file() may repeat a request for attributes in the guest.

        Lock: not used.
        """
        return False

    def informed(self, client: Client, opened: str | None = None) -> Client:
        """Return `client` with `facts` about its process, which the guest needs; see FileSystem.informed().

        `opened`: the path of the file that an open(2) opens; "" if the request is the lookup of a path that
        exists; None for any other request.
        Lock: not used, unlike most methods of this class.
        """
        del opened
        return client

    def informed_of_file(self, client: Client) -> Client:
        """Return `client` with the facts about its process that a read or write of an open file needs.

        Lock: not used.
        """
        return self.informed(client)

    def request(self, client: Client) -> AbstractContextManager[object]:
        """Return the context manager in whose `with` block a client's request runs.

        Methods of this class that call an operation of a control file, such as read(), enter the context
        themselves.
        """
        del client
        return nullcontext()

    def looked_up(self, client: Client, path: str, found: Stat | None) -> None:
        """Repeat the client's system call in the guest, if the call ends with the lookup of `path`.

        `found`: the attributes of the file, or None if the file does not exist.
        """

    def on_file(self, client: Client, path: str, file: ControlFile | None, names: Collection[str]) -> None:
        """Repeat the client's system call on the guest's descriptor of a file, if the call is one of `names`.

        If `file` is None, use any open file whose path is `path`.
        """

    def repeat_call(
        self, client: Client, path: str, names: Collection[str], by_fd: Collection[str] = (), *more: str
    ) -> None:
        """Repeat the client's system call in the guest, if the call is one of `names` or of `by_fd`.

        `names`: system calls that name the file by `path`. `more`: further paths of the call, such as the
        new name in a rename. `by_fd`: system calls that name the file by a descriptor.
        """

    def chdir(self, client: Client, path: str) -> None:
        """Repeat in the guest the client's change of its working directory to `path`."""

    def open(self, client: Client, file: ControlFile) -> None:
        """Open the node at the path of `file`, and store the node's open file in `file.inner`.

        If the guest opens the file too, set `file.fd` to the guest's descriptor, and `file.number` to the
        number of the client's descriptor.
        """
        with self.request(client):
            file.inner = file.fs.tree.open(file.path, file.flags, client)

    def open_unseen(self, files: Collection[ControlFile]) -> None:
        """Open `files` in the guest, because probes could notice the guest's calls from now on."""

    def opendir(self, client: Client, directory: ControlDirectory) -> None:
        """Open `directory` in the guest; set its attributes `fd` and `number` as open() does for a file."""

    def listed(self, client: Client, directory: ControlDirectory) -> None:
        """Repeat the client's getdents64(2) in the guest."""

    def read(self, client: Client, file: ControlFile, size: int, offset: int) -> bytes:
        """Do the next step of a read of `file.inner`, in a context that request() returns.

        The last step returns the data. Raises: YieldLock (call again to continue).
        """
        with self.request(client):
            return file.inner.read_step(size, offset)

    def read_page(self, client: Client, file: ControlFile, size: int) -> bytes:
        """Return the next page of `size` bytes of `file.inner`, in a context that request() returns."""
        with self.request(client):
            return file.inner.read_page(size)

    def write(self, write: PendingWrite) -> int:
        """Do the next step of a write. After the last step, return the number of bytes written.

        A step writes a piece of the data, or makes the guest's call during which the piece is written.
        Raises: YieldLock (more steps follow).
        """
        with self.request(write.client):
            return write.by_piece()

    def follow_processes(self) -> None:
        """Repeat in the guest the forks and exits of clients' processes since the last request, if any.

        See FileSystem.follow_processes.
        """

    def give_up(self, client: Client, file: ControlFile, error: int) -> None:
        """End the guest's system call in which the client's task waits for `file`.

        The system call fails with the errno `error`.
        """

    def release(self, file: ControlFile | ControlDirectory) -> None:
        """Close the guest's descriptor `file.fd` of a file or directory."""

    def change(
        self, client: Client, names: tuple[str, ...], path: str, act: Callable[[], None], *args: int
    ) -> None:
        """Call `act`, which creates or removes the directory `path`; repeat the client's call in the guest.

        `names`: the system calls by which the client may have requested the change. `args`: the arguments
        that follow the path in the first of these system calls.
        """
        del names, path, args
        with self.request(client):
            act()

    def truncate(self, client: Client, path: str, act: Callable[[], None]) -> None:
        """Call `act` for a client's truncate call on the file at `path`, and repeat the call in the guest.

        `act` only checks the arguments of the call, because control files have no size.
        """
        del path
        with self.request(client):
            act()

    def close(self) -> None:
        """Release the guest's resources, because the mount ends."""


class ControlFs(FileSystem):
    """The file system of control files, a tree of nodes. `calls` repeats clients' calls in the guest.

    `watcher`: the object to which clients' changes of control files are reported, or None; see watch().
    """

    def __init__(
        self, tree: NodeTree, lock: ControlLock | None = None, calls: GuestCalls | None = None
    ) -> None:
        """Create a file system that shows `tree`.

        `lock`: the kernel's control lock; None: a new lock. `calls` repeats clients' calls in the guest;
        None: calls are not repeated.
        """
        super().__init__(lock)
        self._show(tree, calls or GuestCalls())
        self.watcher: ChangeWatcher | None = None

    def _show(self, tree: NodeTree, calls: GuestCalls) -> None:
        """Show a tree of control files from now on. `calls` repeats clients' calls in the guest."""
        self.tree = tree
        self.calls = calls
        calls.fs = self
        tree.on_removal = self._end_names

    def _end_names(self, removed: str | None) -> None:
        """Report that a front end must look up names again; `removed`: see FileSystem.on_names_end."""
        if self.on_names_end is not None:
            self.on_names_end(removed)

    def note_user(self, client: Client) -> None:
        """Store the client's user in ControlLock.user, so that this user's limits apply to the change.

        Store 0 for the owner of the mount. Lock: held.
        """
        self.lock.user = client.uid if client.uid != self.tree.owner.uid else 0

    def check_gate(self) -> None:
        """Check that no other kernel is being built to replace this one. Raises: _Gated."""
        if self.gate is not None:
            raise _Gated(self.gate)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock during the `with` block.

        Before that, wait while another kernel is being built to replace this one.
        """
        while True:
            with self.lock:
                gate = self.gate
                if gate is None:
                    yield
                    return
            with self.lock.waiting():
                gate.wait()

    def files(self) -> list[ControlFile]:
        """Return the open files, without directories, in the order in which they were opened."""
        return [opened for opened in self.opened if isinstance(opened, ControlFile)]

    def informed(self, client: Client, opened: str | None = None) -> Client:
        """Return `client` with facts about its process, by GuestCalls.informed(); see FileSystem."""
        return self.calls.informed(client, opened)

    # Names

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        """Return a file's attributes, and repeat the client's call in the guest; see FileSystem.

        The lookup comes first, because GuestCalls.informed() reads other facts about the client if the file
        exists.
        """
        found = None
        try:
            with self.lock.observing():
                found = self.tree.getattr(path)
            return found
        finally:
            if client is not None and self.calls.sees_lookups:
                informed = self.calls.informed(client(), None if found is None else "")
                with self.lock.observing():
                    if not self.lock.is_lent:
                        self.calls.looked_up(informed, path, found)

    def readdir(self, path: str, client: Client | None = None) -> list[DirEntry]:
        """Return the entries of a directory of the tree; see FileSystem."""
        del client
        with self.lock.observing():
            return self.tree.readdir(path)

    def readlink(self, client: Client, path: str) -> str:
        """Refuse to read a link, because no control file is a symbolic link.

        Raises: KernelError EINVAL, and the errors of getattr().
        """
        with self.lock.observing():
            return self.tree.readlink(client, path)

    def open(self, client: Client, path: str, flags: int) -> ControlFile:
        """Open a file by GuestCalls.open(), and report O_TRUNC to the watcher; see FileSystem.

        Raises: KernelError EINVAL (O_DIRECT), and the errors of GuestCalls.open().
        Mirrors: fs/open.c:do_dentry_open (v6.1), which refuses O_DIRECT after the file's own open().
        """
        file = self._open_for(client, path, flags)
        if flags & os.O_DIRECT:
            file.release()
            raise KernelError(errno.EINVAL, f"{path}: control files have no direct I/O")
        return file

    def _open_for(self, client: Client, path: str, flags: int) -> ControlFile:
        if not flags & os.O_TRUNC:
            with self.lock_for(path, flags):
                if self.lock.is_lent:
                    return self._open_unseen(client, path, flags)
                return self._open(client, path, flags)
        with self.settled(), self._changing():
            file = self._open(client, path, flags)
            if self.watcher is not None:
                self.watcher.truncated(path)
            return file

    def lock_for(self, path: str, flags: int) -> AbstractContextManager[object]:
        """Return a context manager that holds the lock for a request about an open file.

        A file of machine/ needs no guest if it is opened with O_RDONLY. For such a file, the thread gets the
        lock even while a debugger holds the guest.
        The caller has to check `lock.is_lent` in the `with` block; its value cannot become true in the block.
        """
        if path.startswith(_ALWAYS_OPEN) and flags & os.O_ACCMODE == os.O_RDONLY:
            return self.lock.observing()
        return self.lock

    def _open_unseen(self, client: Client, path: str, flags: int) -> ControlFile:
        """Open a file for a client while a debugger holds the guest, without a call of the guest.

        Hazard: do not enter GuestCalls.request(), which may run the guest, for example for the fork of a new
        client.
        """
        file = ControlFile(self, path, flags, client)
        file.inner = self.tree.open(path, flags, client)
        self.opened[file] = None
        return file

    def _open(self, client: Client, path: str, flags: int) -> ControlFile:
        file = ControlFile(self, path, flags, client)
        self.calls.open(client, file)
        self.opened[file] = None
        return file

    def create(self, client: Client, path: str, mode: int, flags: int) -> FileDescription:
        """Refuse to create a file. Raises: KernelError EEXIST (`path` exists), EACCES (otherwise)."""
        del client, mode, flags
        with self.lock:
            return self.tree.create(path)

    def opendir(self, client: Client, path: str) -> ControlDirectory:
        """Open a directory, in the guest too if a probe could notice the call; see FileSystem."""
        with self.lock.observing():
            directory = ControlDirectory(self, path)
            if not self.lock.is_lent:
                self.calls.opendir(client, directory)
            self.opened[directory] = None
            return directory

    def chdir(self, client: Client, path: str) -> None:
        """Report a client's new working directory to the guest, by GuestCalls.chdir(); see FileSystem."""
        with self.lock:
            self.calls.chdir(client, path)

    # Changes

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """Create a directory, and report the new directory to the watcher; see FileSystem.

        In instances/, a new directory is a new trace array.
        """
        with self.settled(), self._changing():
            self.note_user(client)
            tree = self.tree
            self.calls.change(
                client, ("mkdir", "mkdirat"), path, lambda: tree.mkdir(client, path, mode), mode
            )
            if self.watcher is not None:
                self.watcher.made(path)

    def rmdir(self, client: Client, path: str) -> None:
        """Remove a directory, and report the removal to the watcher; see FileSystem."""
        with self.settled(), self._changing():
            tree = self.tree
            self.calls.change(client, ("rmdir", "unlinkat"), path, lambda: tree.rmdir(client, path))
            self._moved(path, GONE)
            if self.watcher is not None:
                self.watcher.removed(path)

    def truncate(self, client: Client, path: str, size: int) -> None:
        """Repeat the client's call in the guest, and do nothing else: control files have no size.

        Raises: KernelError EISDIR, EINVAL (a negative size), and the errors of NodeTree.lookup().
        """
        with self.lock:
            tree = self.tree
            self.calls.truncate(client, path, lambda: tree.truncate(client, path, size))

    def unlink(self, client: Client, path: str) -> None:
        """Refuse to remove a file, after the guest repeated the client's call.

        Raises: KernelError EPERM, EISDIR (a directory).
        """
        with self.lock:
            self.calls.repeat_call(client, path, ("unlink", "unlinkat"))
            self.tree.unlink(client, path)

    def rename(self, client: Client, old: str, new: str) -> None:
        """Refuse to rename a file, after the guest repeated the client's call. Raises: KernelError EPERM."""
        with self.lock:
            self.calls.repeat_call(client, old, ("rename", "renameat2"), (), new)
            self.tree.rename(client, old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        """Refuse to create a hard link. Raises: KernelError EEXIST (`new` exists), EPERM (otherwise)."""
        with self.lock:
            self.tree.link(client, old, new)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Refuse to create a symbolic link. Raises: KernelError EEXIST (`path` exists), EPERM (otherwise)."""
        with self.lock:
            self.tree.symlink(client, path, target)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """Refuse to create a file, after the guest repeated the client's call.

        A call for a device is not repeated, because the guest would create the device.
        Raises: KernelError EEXIST (`path` exists), EACCES (a regular file), EPERM (another type).
        """
        with self.lock:
            # Hazard: the guest would create a device.
            if not is_device(mode):
                self.calls.repeat_call(client, path, ("mknod", "mknodat"))
            self.tree.mknod(client, path, mode)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set the permission bits of a node, after the guest repeated the client's call; see FileSystem."""
        with self.lock:
            self.calls.repeat_call(client, path, ("chmod", "fchmodat"), ("fchmod",))
            self.tree.chmod(client, path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set the owner and group of a node, after the guest repeated the client's call; see FileSystem."""
        with self.lock:
            self.calls.repeat_call(client, path, ("chown", "lchown", "fchownat"), ("fchown",))
            self.tree.chown(client, path, uid, gid)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times of a node, after the guest repeated the client's call; see FileSystem."""
        with self.lock:
            self.calls.repeat_call(client, path, ("utimensat",), ("utimensat",))
            self.tree.utimens(client, path, atime_ns, mtime_ns)

    # Policy

    is_control = True

    def name_lasts(self, path: str) -> bool:
        """Return True if only the kernel can remove the name at `path`; see FileSystem.

        Return False for all names while probes could notice lookups.
        """
        if self.calls.sees_lookups:
            return False
        with self.lock.observing():
            return self.tree.is_kernels_name(path)

    def has_many_nodes(self, path: str) -> bool:
        """Return True for a directory in instances/, which has thousands of nodes; see FileSystem."""
        with self.lock.observing():
            try:
                above = self.tree.lookup(path.rpartition("/")[0])
            except KernelError:
                return False
            return isinstance(above, Directory) and above.is_kept_by_open_files

    def is_always_open(self, path: str) -> bool:
        """Return True if `path` is in machine/, whose files set the limits; see FileSystem."""
        return any(path == each or path.startswith(f"{each}/") for each in _ALWAYS_OPEN)

    # For the daemon

    def follow_processes(self) -> None:
        """Repeat forks and exits of clients' processes, by GuestCalls.follow_processes(); see FileSystem.

        Do nothing if a debugger holds the guest or the guest is dead.
        """
        with self.lock:
            if not self.lock.is_lent and not self.calls.is_dead:
                self.calls.follow_processes()

    def open_in_guest(self, *, names_end: bool = True) -> None:
        """Open the open files in the guest too, by GuestCalls.open_unseen().

        `names_end`: see FileSystem.open_in_guest.
        """
        self.lock.assert_held()
        if names_end:
            self._end_names(None)
        self.calls.open_unseen(self.files())

    def become(self, new: FileSystem) -> None:
        """Open each file again by its path in the tree of the new kernel; see FileSystem.

        The nodes' open files in the old tree are not released, because they end with the old kernel.
        """
        assert isinstance(new, ControlFs)
        self._show(new.tree, new.calls)
        self._end_names("")
        for opened in list(self.opened):
            if isinstance(opened, ControlFile):
                self._reopen(opened)
            elif isinstance(opened, ControlDirectory):
                opened.fd = None
                opened.number = None

    def _reopen(self, file: ControlFile) -> None:
        try:
            inner = self.tree.open(file.path, file.flags & ~(os.O_TRUNC | os.O_EXCL), file.client)
        except KernelError:
            file.error = errno.ESTALE
            del self.opened[file]
            return
        inner.goes_on_from(file.inner)
        file.inner = inner
        file.fd = None
        file.number = None

    def watch(self, watcher: ChangeWatcher | None) -> None:
        """Report clients' changes of control files to `watcher`; None ends the reports. See FileSystem."""
        self.watcher = watcher

    def is_between_parts(self) -> bool:
        """Return True if an open file keeps written data that is executed later; see FileSystem."""
        return any(file.inner.is_between_parts for file in self.files())

    def is_dead(self) -> bool:
        """Return True if the guest can't run any more, by GuestCalls.is_dead; see FileSystem."""
        with self.lock.observing():
            return self.calls.is_dead

    def settled(self) -> AbstractContextManager[object]:
        """Return a context manager that waits, after the `with` block, until the block's changes are saved.

        If there is no watcher, the context manager does not wait. Lock: not used.
        """
        return _SETTLED if self.watcher is None else _settled(self.watcher)

    def close(self) -> None:
        """Release all open files, because the mount ends; see FileSystem.

        The release of an open file wakes the threads that wait for the file.
        """
        with self.settled(), self.lock:
            files = self.files()
            super().close()
            for file in files:
                # The release may execute a line without a newline at its end.
                with suppress(KernelError, GuestFault, MemoryFault):
                    self.tree.release(file.inner)
            if self.watcher is not None:
                self.watcher.closed()
                self.watcher = None
            self.calls.close()
