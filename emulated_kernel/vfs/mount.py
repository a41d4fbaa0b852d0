"""Mount: the files that a front end serves, as a table of file systems and a table of open files.

The mount never holds the control lock; each file system takes the lock. There are three reasons. A write
releases the lock between two pieces. A release must not wait for the lock. Each file system prepares the
guest for a request in its own way.
"""

from __future__ import annotations

import errno
import gc
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from itertools import count
from stat import S_IFMT
from threading import Event

from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import Limit, Limits
from emulated_kernel.vfs.core.changes import ChangeWatcher
from emulated_kernel.vfs.core.client import Client, DirEntry, Stat, StatFs, require_path
from emulated_kernel.vfs.core.past_requests import PastRequests
from emulated_kernel.vfs.filesystem import FileDescription, FileSystem, OpenDirectory

_CACHE_SIZE = 500
"""Maximum number of paths whose file system is cached. Clients use few paths at a time."""


class Mount:
    """All requests that a front end can make on one mounted tree of files, from any thread.

    Paths are absolute and start at the mount's root. All methods raise KernelError with Linux's errno.
    Methods of FileSystem and FileDescription document the methods of the same names.

    A program opens a file with open(client, path, flags) or create(client, path, mode, flags), which return a
    handle for read(client, handle, size, offset) and write(client, handle, data, offset). release(handle)
    closes the file, and close() ends the mount.

    The dictionaries whose keys are handles need no lock: single operations on a dictionary are atomic, and
    iterations go over copies.
    """

    def __init__(
        self,
        table: Mapping[str, FileSystem],
        *,
        limits: Limits | None = None,
        lasting: Collection[str] = (),
    ) -> None:
        """Create a mount of the file systems in `table`: prefix -> file system.

        The prefix "/" is required. A prefix may be the path of a single file.

        `limits` contains the maximum number of open files; None: no maximum. Two simultaneous opens may
        exceed the number by one. `lasting`: directories in the root that exist as long as the mount,
        whichever kernel it shows.
        """
        self.has_native_traps = False
        """Whether a hit whose handlers are guest code is handled without Python.

        The function that builds the mount sets the value, which is only for reports.
        """
        self.architecture = ""
        """Architecture of a distribution's kernel, or "" for a kernel of kprobefs.

        The function that builds the mount sets the value, which is only for reports.
        """
        self._table = dict(table)
        self._root = self._table["/"]
        self._file_systems = list(dict.fromkeys((self._root, *self._table.values())))
        self._limits = limits
        self.lock: ControlLock = self._root.lock
        """The control lock of the kernel, for front ends and tests; the mount itself does not take it."""
        self.lasting = frozenset(lasting)
        self.clients_own = frozenset[str]().union(*(fs.clients_own for fs in self._file_systems))
        self._below: dict[str, list[str]] = {}
        """Path of a directory -> prefixes that are mounted directly in the directory."""
        for prefix in self._table:
            if prefix != "/":
                self._below.setdefault(posixpath.dirname(prefix), []).append(prefix)
        self.filesystem_at: Callable[[str], FileSystem] = lru_cache(_CACHE_SIZE)(self._find)
        """Cached version of _find(): returns the file system that a path belongs to."""
        self.past = PastRequests()
        self._roots: dict[str, DirEntry] = {}
        """Cache: mount prefix -> entry in the parent directory, for listings after the guest has died."""
        self._handles: dict[int, FileDescription] = {}
        self._users: dict[int, int] = {}
        """Handle -> uid of the client that opened the file, if the kernel has limits."""
        self.acting: set[int] = set()
        """Handles whose release has an effect that other files show.

        A front end must make later requests wait for the release of such a handle.
        """
        self._numbers = count(1)
        self._pollers: dict[int, Callable[[], None]] = {}
        """Handle -> function to call when a reboot may have changed the poll mask of the open file."""
        self._closed = False

    def _find(self, path: str) -> FileSystem:
        prefix = path
        while prefix not in self._table:
            prefix = prefix.rpartition("/")[0] or "/"
        # Listing the directory above looks up a prefix itself.
        if prefix != path:
            self.past.used.add(prefix)
        return self._table[prefix]

    # Names

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        """Return a file's attributes; see FileSystem.getattr."""
        fs = self.filesystem_at(path)
        return fs.getattr(path, client and _informed(fs, client))

    def is_control(self, path: str) -> bool:
        """Return True if `path` is in a file system of control files; see FileSystem.is_control."""
        return self.filesystem_at(path).is_control

    def name_lasts(self, path: str) -> bool:
        """Return True if a front end may use the name at `path` again without a getattr().

        See FileSystem.name_lasts.
        """
        return self.filesystem_at(path).name_lasts(path)

    def exists(self, path: str) -> bool:
        """Return True if there is a file at `path`. The guest does not notice the lookup."""
        try:
            self.getattr(path)
        except KernelError:
            return False
        return True

    def at_names_end(self, action: Callable[[Collection[str | None]], object]) -> None:
        """From now on, call `action` when a front end must look names up again after name_lasts() was True.

        When file systems have called FileSystem.on_names_end, the thread that held the lock calls `action`
        once. It does so after it has released the lock, and before its request ends. The argument of `action`
        is a list of the arguments that on_names_end got in these calls.
        """
        lock = self.lock
        ends: list[str | None] = []

        def end(removed: str | None) -> None:
            nonlocal ends
            lock.assert_held()
            if lock.at_release is None:
                ends = []
                lock.at_release = partial(action, ends)
            ends.append(removed)

        for fs in self._file_systems:
            fs.on_names_end = end

    def readdir(self, path: str, client: Client | None = None) -> list[DirEntry]:
        """Return the entries of a directory from its file system; see FileSystem.readdir.

        A mounted prefix takes the place of an entry with the same name.
        """
        return self._with_mounts(path, self.filesystem_at(path).readdir(path, client))

    def _with_mounts(self, path: str, entries: list[DirEntry]) -> list[DirEntry]:
        """Return `entries`, those of the directory `path`, together with the prefixes mounted in it.

        A prefix replaces an entry of the same name. If `path` is a prefix itself, the entry ".." gets the
        inode number of the directory above `path`.
        """
        if path != "/" and path in self._table:
            with suppress(KernelError):
                above = self.getattr(posixpath.dirname(path)).ino
                entries = [entry._replace(ino=above) if entry.name == ".." else entry for entry in entries]
        prefixes = self._below.get(path)
        if prefixes is not None:
            mounted = {entry.name: entry for prefix in prefixes if (entry := self._root_entry(prefix))}
            entries = [mounted.pop(entry.name, entry) for entry in entries]
            entries += mounted.values()
        return entries

    def _root_entry(self, prefix: str) -> DirEntry | None:
        """Return the entry for the root of the file system at `prefix`, as its parent directory lists it.

        Return None if the guest died before the entry was read. The root is looked up without a client, so
        that the guest repeats no system call for it.
        """
        # replace() may install a new dictionary meanwhile, which must not get this kernel's entry.
        roots = self._roots
        entry = roots.get(prefix)
        if entry is None:
            with suppress(KernelError):
                found = self.getattr(prefix)
                entry = DirEntry(posixpath.basename(prefix), S_IFMT(found.mode), found.ino)
                roots[prefix] = entry
        return entry

    def readlink(self, client: Client, path: str) -> str:
        """Return the target of a symbolic link; see FileSystem.readlink."""
        fs = self.filesystem_at(path)
        return fs.readlink(fs.informed(client), path)

    def chdir(self, client: Client, path: str) -> None:
        """Report a client's new working directory `path` to the guest; see FileSystem.chdir."""
        fs = self.filesystem_at(path)
        fs.chdir(fs.informed(client), path)

    def statfs(self, path: str) -> StatFs:
        """Return the capacity of the file system of `path`; see FileSystem.statfs."""
        return self.filesystem_at(path).statfs(path)

    # Changes

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """Create a directory; see FileSystem.mkdir."""
        fs = self.filesystem_at(path)
        fs.mkdir(fs.informed(client), path, mode)

    def rmdir(self, client: Client, path: str) -> None:
        """Remove a directory; see FileSystem.rmdir."""
        fs = self.filesystem_at(path)
        is_large = fs.has_many_nodes(path)
        fs.rmdir(fs.informed(client), path)
        if is_large:
            # The removed nodes refer to each other, so only a full garbage collection frees them. Those of
            # five directories occupy 40 MB.
            gc.collect()

    def unlink(self, client: Client, path: str) -> None:
        """Remove a name of a file; see FileSystem.unlink."""
        fs = self.filesystem_at(path)
        fs.unlink(fs.informed(client), path)

    def rename(self, client: Client, old: str, new: str) -> None:
        """Rename a file or directory; see FileSystem.rename.

        Raises, if `new` is in another file system: KernelError EROFS (one of the two is read-only), otherwise
        EXDEV.
        """
        fs = self._across(old, new)
        fs.rename(fs.informed(client), old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        """Give a file an additional name; see FileSystem.link.

        Raises, if `new` is in another file system: KernelError EROFS (one of the two is read-only), otherwise
        EXDEV.
        """
        fs = self._across(old, new)
        fs.link(fs.informed(client), old, new)

    def _across(self, old: str, new: str) -> FileSystem:
        """Return the file system that serves a call with two paths.

        Raises, for paths in two file systems: KernelError EROFS (one of the two is read-only), EXDEV (no
        guest serves both).
        """
        source = self.filesystem_at(old)
        target = self.filesystem_at(new)
        if source is not target:
            if source.is_read_only or target.is_read_only:
                raise KernelError(errno.EROFS, new)
            if source.guest is None or source.guest is not target.guest:
                raise KernelError(errno.EXDEV, "the names are in different file systems")
        return source

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Create a symbolic link; see FileSystem.symlink."""
        fs = self.filesystem_at(path)
        fs.symlink(fs.informed(client), path, target)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """Create a FIFO, a socket or an empty file; see FileSystem.mknod."""
        fs = self.filesystem_at(path)
        fs.mknod(fs.informed(client), path, mode)

    def truncate(self, client: Client, path: str, size: int) -> None:
        """Set the size of the file at `path`; see FileSystem.truncate."""
        fs = self.filesystem_at(path)
        fs.truncate(fs.informed(client), path, size)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set a file's permission bits; see FileSystem.chmod."""
        fs = self.filesystem_at(path)
        fs.chmod(fs.informed(client), path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set a file's owner and group; see FileSystem.chown."""
        fs = self.filesystem_at(path)
        fs.chown(fs.informed(client), path, uid, gid)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set a file's times; see FileSystem.utimens."""
        fs = self.filesystem_at(path)
        fs.utimens(fs.informed(client), path, atime_ns, mtime_ns)

    # Handles

    def open(self, client: Client, path: str, flags: int) -> int:
        """Open a file and return the handle for the methods below.

        Raises: KernelError ENFILE (the limit of open files), EIO (the mount has ended), and the errors of
        FileSystem.open.
        """
        fs = self.filesystem_at(path)
        if self._limits is not None:
            self._check_capacity(self._limits, fs, path, client)
        return self._add(fs.open(fs.informed(client, path), path, flags), client)

    def create(self, client: Client, path: str, mode: int, flags: int) -> int:
        """Create a regular file, open it, and return its handle. Raises: as open()."""
        fs = self.filesystem_at(path)
        if self._limits is not None:
            self._check_capacity(self._limits, fs, path, client)
        try:
            opened = fs.create(fs.informed(client), path, mode, flags)
        except KernelError as error:
            self.past.creation_failed(path, error)
            raise
        return self._add(opened, client)

    def opendir(self, client: Client, path: str) -> int:
        """Open a directory, and return its handle for getdents(). Raises: as open()."""
        fs = self.filesystem_at(path)
        if path in self._table:
            self.past.used.add(path)
        if self._limits is not None:
            self._check_capacity(self._limits, fs, path, client)
        return self._add(fs.opendir(fs.informed(client), path), client)

    def _check_capacity(self, limits: Limits, fs: FileSystem, path: str, client: Client) -> None:
        try:
            limits.check(Limit.OPEN_FILES, limits.open_files)
            if client.uid:
                limits.check_user(client.uid)
        except KernelError:
            # Files with which a user can raise the limit can always be opened.
            if not fs.is_always_open(path):
                raise

    def _add(self, opened: FileDescription, client: Client) -> int:
        if self._closed:
            opened.release()
            raise KernelError(errno.EIO, "the mount has ended")
        handle = next(self._numbers)
        opened.handle = handle
        self._handles[handle] = opened
        if opened.acts_on_close:
            self.acting.add(handle)
        if self._limits is not None:
            self._users[handle] = client.uid
            self._limits.open_files += 1
            if client.uid:
                self._limits.count_user(client.uid, 1)
        return handle

    def _opened(self, handle: int) -> FileDescription:
        """Return the usable description of a handle.

        Raises: KernelError EBADF (no such handle), ESTALE, EIO (see FileDescription.error).
        """
        try:
            opened = self._handles[handle]
        except KeyError:
            raise self._no_handle(handle) from None
        if opened.error:
            raise opened.gone()
        return opened

    def _no_handle(self, handle: int) -> KernelError:
        if self._closed:
            return KernelError(errno.EIO, "the mount has ended")
        return KernelError(errno.EBADF, f"no handle {handle}")

    def fgetattr(self, handle: int, client: Callable[[], Client] | None = None) -> Stat:
        """Return the attributes of an open file or directory, whose name may have been removed."""
        opened = self._opened(handle)
        return opened.getattr(client and _informed(opened.fs, client))

    def getdents(self, client: Client, handle: int, start: int) -> list[DirEntry]:
        """Return the entries of an open directory from index `start` on.

        If `start` is 0, read the directory again. Later calls return entries of that reading.
        Raises: KernelError ENOTDIR, EBADF, ENOENT (the directory was removed).
        """
        directory = self._opened(handle)
        if not isinstance(directory, OpenDirectory):
            raise KernelError(errno.ENOTDIR, f"handle {handle}")
        if start == 0 or directory.entries is None:
            path = require_path(directory.path)
            directory.entries = self._with_mounts(path, directory.readdir(client))
        directory.listed(directory.fs.informed(client))
        return directory.entries[start:]

    def is_stream(self, handle: int) -> bool:
        """Return True if lseek(2) on the open file `handle` must fail with ESPIPE."""
        return self._opened(handle).stream

    def reads_host(self, handle: int) -> bool:
        """Return True if a write to the open file `handle` reads files of the host, which can take long."""
        return self._opened(handle).reads_host

    def writes_at_once(self, handle: int) -> bool:
        """Return True if write() to the open file `handle` reads no host file, and accepts a memoryview."""
        return self._opened(handle).writes_at_once

    def set_status_flags(self, handle: int, flags: int) -> None:
        """Set the status flags of the open file `handle`; see FileDescription.set_status_flags."""
        self._opened(handle).set_status_flags(flags)

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """Read from the open file `handle`; see FileDescription.read."""
        try:
            opened = self._handles[handle]
        except KeyError:
            raise self._no_handle(handle) from None
        return opened.read(opened.informed(client), size, offset)

    def read_page(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """Read for the host's page cache from the open file `handle`; see FileDescription.read_page."""
        opened = self._opened(handle)
        client = client._replace(is_calling=False)
        return opened.read_page(opened.fs.informed(client), size, offset)

    def write(self, client: Client, handle: int, data: bytes, offset: int) -> int:
        """Write to the open file `handle`; see FileDescription.write."""
        try:
            opened = self._handles[handle]
        except KeyError:
            raise self._no_handle(handle) from None
        try:
            count = opened.write(opened.informed(client), data, offset)
        except KernelError as error:
            self.past.write_failed(opened.path, data, error)
            raise
        if opened.acts_on_close:
            self.acting.add(handle)
        return count

    def wait(self, handle: int, timeout: float) -> None:
        """Wait until the open file `handle` may be ready; see FileDescription.wait."""
        self._opened(handle).wait(timeout)

    def give_up(self, client: Client, handle: int, error: int) -> None:
        """End a waiting call on the open file `handle`; see FileDescription.give_up."""
        self._opened(handle).give_up(client, error)

    def poll(self, handle: int, notify: Callable[[], None] | None) -> int:
        """Return the mask of the poll events for which the open file `handle` is ready.

        A reboot also calls `notify`. See FileDescription.poll.
        """
        opened = self._opened(handle)
        if notify is not None:
            self._pollers[handle] = notify
        return opened.poll(notify)

    def follow_processes(self) -> None:
        """Repeat in the guest the forks and exits of clients' host processes, while a client waits for data.

        See FileSystem.follow_processes. Ignore errors of the guest.
        """
        with suppress(KernelError, GuestFault, MemoryFault):
            self._root.follow_processes()

    def fsync(self, client: Client, handle: int, *, only_data: bool = False) -> None:
        """Write the cached data of the open file `handle` to storage; see FileDescription.fsync."""
        opened = self._opened(handle)
        opened.fsync(opened.fs.informed(client), only_data=only_data)

    def ftruncate(self, client: Client, handle: int, size: int) -> None:
        """Set the size of the open file `handle`; see FileDescription.ftruncate."""
        opened = self._opened(handle)
        opened.ftruncate(opened.fs.informed(client), size)

    def release(self, handle: int) -> None:
        """Release the description of a handle; do nothing if the handle does not exist."""
        opened = self._handles.pop(handle, None)
        self._pollers.pop(handle, None)
        user = self._users.pop(handle, None)
        if self._limits is not None and user is not None:
            self._limits.open_files -= 1
            if user:
                self._limits.count_user(user, -1)
        if opened is not None:
            try:
                opened.release()
            finally:
                self.acting.discard(handle)

    # For the daemon. The caller holds the lock, except for is_dead and close.

    def watch(self, watcher: ChangeWatcher | None) -> None:
        """Report clients' changes of control files to `watcher` from now on.

        None ends the reports. Lock: held.
        """
        for fs in self._file_systems:
            fs.watch(watcher)

    def is_between_parts(self) -> bool:
        """Return True if an open file keeps written data that a later write(2) or its close will execute.

        Lock: held.
        """
        self.lock.assert_held()
        return any(fs.is_between_parts() for fs in self._file_systems)

    def open_in_guest(self, *, names_end: bool = True) -> None:
        """Open the clients' open files in the guest too, before probes can see the guest's calls.

        `names_end`: see FileSystem.open_in_guest.
        """
        for fs in self._file_systems:
            fs.open_in_guest(names_end=names_end)

    @contextmanager
    def holding_changes(self) -> Iterator[None]:
        """Make changes of control files wait until the end of the `with` block, which builds another kernel.

        The other kernel will replace this one, and would not have the changes. The caller holds the lock when
        the block begins and when it ends, but not in between.
        """
        self.lock.assert_held()
        gate = Event()
        for fs in self._file_systems:
            fs.gate = gate
        try:
            yield
        finally:
            for fs in self._file_systems:
                fs.gate = None
            gate.set()

    def replace(self, table: Mapping[str, FileSystem]) -> None:
        """Show the files of another kernel from now on. Lock: held.

        `table`: prefix -> file system of the other kernel, with the same prefixes and the same lock. Open
        control files continue as the new kernel's files of the same paths. Later use of open files of the old
        guest itself fails with ESTALE.
        """
        self.lock.assert_held()
        for old, new in dict.fromkeys((self._table[prefix], new) for prefix, new in table.items()):
            old.become(new)
        self._roots = {}
        self.open_in_guest()
        pollers = list(self._pollers.values())
        self._pollers.clear()
        for notify in pollers:
            notify()

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger has stopped the guest and not resumed it yet. Lock: not used."""
        return self._root.lock.is_lent

    def is_dead(self) -> bool:
        """Return True if the guest cannot run any more. Lock: taken, as every request does."""
        return self._root.is_dead()

    def close(self) -> None:
        """End the mount: wake all waiters, and refuse further requests with EIO."""
        self._root.lock.end_debugging()
        self._closed = True
        # Hazard: clear the handles before waiting for the lock, so that woken waiters find no handle.
        self._handles = {}
        users = list(self._users.values())
        self._users = {}
        if self._limits is not None:
            self._limits.open_files -= len(users)
            for uid in filter(None, users):
                self._limits.count_user(uid, -1)
        # All file systems are closed, even if closing one of them fails.
        with ExitStack() as closing:
            for fs in reversed(self._file_systems):
                closing.callback(fs.close)


def _informed(fs: FileSystem, client: Callable[[], Client]) -> Callable[[], Client]:
    """Return a replacement of `client` that adds facts about the client's process, if `fs` needs them.

    Only file systems that see lookups (sees_lookups) need these facts. For any other `fs`, return `client`.
    The facts are read now, while the control lock is free, because that can take 0.2 s.
    """
    if not fs.sees_lookups:
        return client
    found = fs.informed(client())
    return lambda: found
