"""GuestMount: every request of a host process, made by its task inside the guest."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import field, replace
from itertools import count

from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.mounts.client_calls import ClientCalls
from emulated_kernel.guests.builtin.mounts.control_tree import ControlFile, ControlTree
from emulated_kernel.guests.builtin.mounts.path_walk import walks_at_end
from emulated_kernel.guests.builtin.mounts.scratch import GuestFile, GuestTree
from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import Limit, Limits
from emulated_kernel.vfs.core.changes import ChangeWatcher
from emulated_kernel.vfs.core.chunked_write import retry_yielding_lock
from emulated_kernel.vfs.core.client import GONE, Client, DirEntry, Stat, StatFs, path_behind, still_there
from emulated_kernel.vfs.core.node_tree import CONTROL, NodeTree

GUESTS_OWN = ("/scratch", "/dev")
"""Directories whose files are the guest's own."""
UNLIMITED_FILES = ("/machine", f"/{CONTROL}/machine")
"""What can always be opened: the limits are set there."""
_ATTRIBUTES = ("newfstat", "newfstatat", "statx", "lseek")
"""Calls that ask the host's kernel for the attributes of an open file."""


@dataclass(eq=False)
class OpenDirectory:
    """A directory that is listed; a snapshot, from when it was read from its beginning."""

    path: str
    """Where it is now, or GONE."""
    fd: int | None = None
    """The guest's, None where that has no part in it."""
    number: int | None = None
    file: GuestFile | None = None
    """Of one of the guest's own directories."""
    entries: list[DirEntry] = field(default_factory=list)


_Opened = ControlFile | GuestFile | OpenDirectory


class GuestMount:
    """A kernel's files, which a front end serves: every request that it may make, from any thread.

    Takes the control lock, for the guest stands still while nobody holds it. Paths are absolute and start at
    the mount's root; all methods raise KernelError with Linux's errno.

    What a request is for is a tree's: the files of ours (ControlTree), or one of the guest's own (GuestTree).
    """

    clients_own = ()
    """None, unlike NativeMount's: calls that end in a lookup must be seen, so each lookup is asked for."""

    def __init__(self, files: NodeTree, guest: Guest, lock: ControlLock, limits: Limits) -> None:
        self.lock = lock
        self._limits = limits
        self._closed = False
        self._watcher: ChangeWatcher | None = None
        self._handles: dict[int, _Opened | None] = {}
        """Open files; None: one of a kernel whose place another one took, which has no such file."""
        self._numbers = count(1)
        self._pollers: dict[int, Callable[[], None]] = {}
        """Who was told last that it will be notified, by handle."""
        self.serve(files, guest)

    def serve(self, files: NodeTree, guest: Guest) -> None:
        """Show a kernel's files from now on; it has the same lock as the one before, which is held then.

        Files that are open go on as this kernel's of the same name; those of the old guest are gone with it.
        """
        self._guest, self._calls = guest, ClientCalls(guest)
        self._controls = ControlTree(files, guest, self._calls, self._watcher)
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
        pollers = self._pollers
        self._pollers = {}
        for notify in pollers.values():
            notify()

    def _reopened(self, opened: _Opened | None) -> _Opened | None:
        if opened is None or isinstance(opened, GuestFile):
            return None
        if isinstance(opened, OpenDirectory):
            return replace(opened, fd=None, number=None, file=None)
        return self._controls.reopened(opened)

    def watch(self, watcher: ChangeWatcher | None) -> None:
        """Tell it from now on what clients change in files of ours."""
        self._watcher = watcher
        self._controls.watcher = watcher

    def open_in_guest(self) -> None:
        """The guest is about to be watched: it takes part in the files that are open from now on."""
        self.lock.assert_held()
        self._controls.open_in_guest()

    def _at(self, path: str) -> ControlTree | GuestTree:
        """Who answers for a path."""
        for top, scratch in self._guest_trees.items():
            if path.startswith(top) and path[len(top) : len(top) + 1] in ("", "/"):
                return scratch
        return self._controls

    def _opened(self, handle: int) -> ControlFile | GuestFile:
        """The open file behind a handle. Raises: KernelError EISDIR, as `_handle`."""
        opened = self._handle(handle)
        if isinstance(opened, OpenDirectory):
            raise KernelError(errno.EISDIR, opened.path)
        return opened

    def _handle(self, handle: int) -> _Opened:
        """The open file or directory behind a handle.

        Raises: KernelError EBADF, ESTALE (its kernel is gone), EIO (after close(), as for whom the end
        wakes).
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
        """Raises: KernelError ENFILE (no more files may be open; who raises the limit gets in)."""
        if not path.startswith(UNLIMITED_FILES):
            self._limits.check(Limit.OPEN_FILES, self._limits.open_files)

    def _add(self, opened: _Opened) -> int:
        handle = next(self._numbers)
        self._handles[handle] = opened
        self._limits.open_files = len(self._handles)
        return handle

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
                self._calls.as_called(client, call, walks, exists=found is not None)

    def _on_file(self, client: Client, path: str, opened: _Opened | None, names: Collection[str]) -> None:
        """The client's call on a descriptor, if it is one of these, on a file that the guest has open too."""
        at = self._at(path)
        if isinstance(at, GuestTree):
            at.on_file(client, path, opened if isinstance(opened, GuestFile) else None, names)
        else:
            at.on_file(client, path, opened if isinstance(opened, ControlFile) else None, names)

    def fgetattr(self, handle: int, client: Callable[[], Client] | None = None) -> Stat:
        """Attributes of an open file, whose name may be gone."""
        with self.lock:
            opened = self._handle(handle)
            if client is not None and self._guest.is_watched:
                with suppress(KernelError):
                    self._on_file(client(), opened.path, opened, _ATTRIBUTES)
            if isinstance(opened, GuestFile):
                return opened.scratch.fgetattr(opened)
            if isinstance(opened, OpenDirectory):
                return self._at(opened.path).getattr(still_there(opened.path))
            return self._controls.fgetattr(opened)

    def opendir(self, client: Client, path: str) -> int:
        """A directory is about to be listed; returns the handle for the calls below."""
        with self.lock:
            self._check_room(path)
            directory = OpenDirectory(path)
            if not self._guest.is_dead:
                task = self._calls.task_for_control(client)
                # A guest without room for it keeps nobody from listing.
                with suppress(KernelError):
                    if task is not None and self._guest.is_watched:
                        self._open_directory(client, task, directory)
            return self._add(directory)

    def _open_directory(self, client: Client, task: GuestTask, directory: OpenDirectory) -> None:
        at = self._at(directory.path)
        if isinstance(at, GuestTree):
            directory.file = file = at.open(client, directory.path, os.O_RDONLY | os.O_DIRECTORY)
            directory.fd = file.fd
            directory.number = file.number
        else:
            directory.fd, directory.number = at.open_directory(client, task, directory.path)

    def chdir(self, client: Client, path: str) -> None:
        """The client makes a directory its working directory, if it says so; the guest can't refuse."""
        with self.lock:
            call = self._guest.client_call(client.pid, client.uid)
            if call is None or call.name not in ("chdir", "fchdir"):
                return
            with suppress(KernelError):
                if call.name == "chdir":
                    self._calls.as_called(client, call, [path])
                else:
                    self._guest.syscalls.with_path(self._calls.task(client), "chdir", path)

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
                directory.entries = self._entries(still_there(directory.path))
            call = self._guest.client_call(client.pid, client.uid)
            if call is not None and call.name == "getdents64" and directory.fd is not None:
                with suppress(KernelError):
                    self._calls.on_descriptor(client, call, directory.fd)
            return directory.entries[start:]

    def _entries(self, path: str) -> list[DirEntry]:
        entries = self._at(path).readdir(path)
        if path == "/":
            return [self._root_entry(entry) for entry in entries]
        if path in self._guest_trees:
            parent = self._controls.getattr("/").ino
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
            return self._add(self._at(path).open(client, path, flags))

    def create(self, client: Client, path: str, mode: int, flags: int) -> int:
        """Make a regular file and open it."""
        with self.lock:
            self._check_room(path)
            return self._add(self._at(path).create(client, path, mode, flags))

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

        Raises: WouldBlock (there is nothing yet; the caller answers EAGAIN or calls wait()).
        """
        with self.lock:
            opened = self._opened(handle)
            if isinstance(opened, GuestFile):
                return opened.scratch.read(client, opened, size, offset)
            return self._controls.read(client, opened, size, offset)

    def read_page(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """What the host's page cache asks for, on behalf of splice(2), sendfile(2) or mmap(2)."""
        with self.lock:
            opened = self._opened(handle)
            if isinstance(opened, GuestFile):
                return opened.scratch.read(client, opened, size, offset)
            # Linux: no vfs_read is in the way of a splice, so the guest has no part in it.
            return opened.inner.read_page(size)

    def write(self, client: Client, handle: int, data: bytes, offset: int) -> int:
        """Number of bytes taken. Raises: WouldBlock (as read() does)."""
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
                    writing = self._controls.writing(client, opened, handle, data, offset, prepared, kept)
                return writing()

        with ExitStack() as kept:
            return retry_yielding_lock(self.lock, write)

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
                    self._guest.give_up(self._guest.processes.known(client.pid), error)

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
                self._controls.release(opened, handle)
            if opened is None or opened.fd is None or self._guest.is_dead:
                return
            file = opened.file if isinstance(opened, OpenDirectory) else opened
            if isinstance(file, GuestFile):
                file.scratch.release(file)
            else:
                with suppress(KernelError):
                    self._guest.close_file(opened.fd, opened.number)

    def is_between_parts(self) -> bool:
        """Whether a file of ours waits for the next part of a long write(2)."""
        self.lock.assert_held()
        return self._controls.is_between_parts()

    def statfs(self, _path: str) -> StatFs:
        """There is nothing to count, in its ramfs neither. Mirrors: fs/libfs.c:simple_statfs (v6.1)"""
        return StatFs()

    def fsync(self, client: Client, handle: int) -> None:
        """fsync(2) or fdatasync(2). Raises: KernelError EINVAL (our files, which have none)."""
        with self.lock:
            opened = self._opened(handle)
            if isinstance(opened, ControlFile):
                raise KernelError(errno.EINVAL, opened.path)
            opened.scratch.on_file(client, opened.path, opened, ("fsync", "fdatasync"))

    def truncate(self, client: Client, path: str, size: int) -> None:
        """truncate(2); O_TRUNC comes with open()."""
        with self.lock:
            self._at(path).truncate(client, path, size)

    def ftruncate(self, client: Client, handle: int, size: int) -> None:
        """ftruncate(2): of a file of ours nothing happens, whatever the size."""
        with self.lock:
            opened = self._opened(handle)
            if isinstance(opened, GuestFile):
                opened.scratch.ftruncate(client, opened, size)
            else:
                with suppress(KernelError):
                    self._controls.on_file(client, opened.path, opened, ("ftruncate",))

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """mkdir(2)."""
        with self.lock:
            self._at(path).mkdir(client, path, mode)

    def rmdir(self, client: Client, path: str) -> None:
        """rmdir(2)."""
        with self.lock:
            self._at(path).rmdir(client, path)
            self._moved(path, GONE)

    def unlink(self, client: Client, path: str) -> None:
        """unlink(2)."""
        with self.lock:
            self._at(path).unlink(client, path)

    def rename(self, client: Client, old: str, new: str) -> None:
        """rename(2). Raises: KernelError EXDEV (between the guest's files and ours)."""
        with self.lock:
            self._at_both(old, new).rename(client, old, new)
            self._moved(old, new)

    def _moved(self, old: str, new: str) -> None:
        for opened in self._handles.values():
            if isinstance(opened, OpenDirectory):
                opened.path = path_behind(opened.path, old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        """link(2). Raises: KernelError EXDEV (between the guest's files and ours), EPERM (ours)."""
        with self.lock:
            self._at_both(old, new).link(client, old, new)

    def _at_both(self, old: str, new: str) -> ControlTree | GuestTree:
        source = self._at(old)
        target = self._at(new)
        if source is not target and self._controls in (source, target):
            raise KernelError(errno.EXDEV, "one of the names is the guest's")
        return source

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """mknod(2) of a FIFO, a socket or an empty file. Raises: KernelError EPERM (devices)."""
        with self.lock:
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK):
                raise KernelError(errno.EPERM, path)
            self._at(path).mknod(client, path, mode)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Make `path` a symbolic link to `target`."""
        with self.lock:
            self._at(path).symlink(client, path, target)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set the permission bits."""
        with self.lock:
            self._at(path).chmod(client, path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set the owner; -1 leaves a field alone."""
        with self.lock:
            self._at(path).chown(client, path, uid, gid)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times, in nanoseconds since the epoch; None leaves one alone."""
        with self.lock:
            self._at(path).utimens(client, path, atime_ns, mtime_ns)

    def is_dead(self) -> bool:
        """Whether the guest has panicked; waits for what every request waits for."""
        with self.lock:
            return self._guest.is_dead

    def close(self) -> None:
        """The mount ends: wake every waiter, refuse further work."""
        self._closed = True
        with self.lock:
            self._controls.close()
            self._handles.clear()
