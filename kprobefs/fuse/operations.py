"""The FUSE adapter: calls a mount's methods for the operations of FUSE."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import lru_cache, partial
from time import time_ns
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.vfs.core.client import STATUS_FLAGS, Client, DirEntry, Stat
from kprobefs.common.errors import CliError
from kprobefs.common.mountpoints import STATE_LINK, MountState
from kprobefs.fuse import libfuse
from kprobefs.fuse.known_nodes import PAGED_SIZE, KnownNodes
from kprobefs.fuse.memory_reserve import MemoryReserve
from kprobefs.fuse.reply_channels import ReplyChannels
from kprobefs.fuse.session_loop import AtOnce, SessionLoop
from kprobefs.fuse.worker_threads import FREE_LOOPS, WorkerThreads

if TYPE_CHECKING:
    from emulated_kernel.vfs.mount import Mount

T = TypeVar("T")

WAIT_SLICE = 0.05
"""Seconds between two checks whether the client of a blocked request was interrupted."""
CHECKS_PER_SECOND = 500
"""Maximum number of checks for interrupts per second, of all blocked requests together.

With many blocked requests, each request checks less often.
"""
ATTRIBUTES_VALIDITY = 0.01
"""Seconds for which fstat(2) may show old attributes.

With 0 seconds, each open(2) causes two more requests.
"""
CACHED_CLIENTS = 500
MAX_BACKGROUND = (1 << 16) - 1
"""Maximum number of background requests that the host's kernel has pending at once.

No client waits for the reply to a background request.
"""
NAME_MAX = 255
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2
STATE_PATH = f"/{STATE_LINK}"
STATE_ATTRIBUTES = Stat(ino=(1 << 32) - 1, mode=stat.S_IFLNK | 0o777, nlink=1, uid=0, gid=0)


# A cached Client takes 0.3 us, and a new one 0.7 us.
_cached_client = lru_cache(CACHED_CLIENTS)(Client)


def _client() -> Client:
    """Return the client that has made the request to which this thread replies."""
    context = libfuse.context()
    return _cached_client(context.pid, context.uid, context.gid, context.umask)


def _existing(path: str | None) -> str:
    """Return the path of a request unchanged. Raises: KernelError ENOENT (no path: the file was deleted)."""
    if path is None:
        raise KernelError(errno.ENOENT, "the file was deleted")
    return path


def _new_time(value: int) -> int | None:
    """Return the time in nanoseconds for an argument of utimensat(2), or None if the time stays unchanged.

    `value`: nanoseconds from libfuse, or the number UTIME_NOW (the current time) or UTIME_OMIT (unchanged).
    """
    if value == UTIME_NOW:
        return time_ns()
    return None if value == UTIME_OMIT else value


def _not_served() -> NoReturn:
    raise AssertionError("no session serves these operations yet")


@dataclass(frozen=True)
class FuseOptions:
    """Options of the FUSE mount: its entry in /proc/mounts, and the users who may access it."""

    source: str
    """First field of the mount's line in /proc/mounts, where tools look for "tracefs" or "debugfs"."""
    subtype: str = "kprobefs"
    allow_other: bool = False
    """Whether other users may use the mount, subject to file modes."""
    flags: tuple[str, ...] = ()
    """Further mount options of libfuse, such as noexec."""
    is_ordered: bool = False
    """Whether the order of requests and replies must not depend on timing, for reproducible traces."""


class Server:
    """One FUSE session of a mount. serve() runs the session, and stop() ends its blocked requests."""

    def __init__(self, mount: Mount, options: FuseOptions) -> None:
        self._options = options
        self._mount = mount
        self._checks_modes = bool(os.geteuid()) or options.allow_other
        """Whether the host's kernel checks the modes of files.

        False if only root may use the mount, because modes restrict no access of root.
        """
        self._lock = mount.lock
        self._stopping = threading.Event()
        validity = 0 if options.is_ordered else ATTRIBUTES_VALIDITY
        self._operations = _Operations(mount, self._stopping, validity)
        self._operations.follows_processes = not options.is_ordered

    def serve(self, directory: str, ready: Callable[[], None]) -> None:
        """Mount on `directory` and answer requests until it is unmounted.

        `ready` is called when the directory is mounted. Requests wait until `ready` returns. The caller must
        already have installed its signal handlers, because libfuse replaces those that are the default.
        Raises: CliError (FUSE refused the mount).
        """
        self._operations.ready = ready
        # entry_timeout: the directory of a deleted event has to be gone at the next lookup.
        # attr_timeout: only the permission check that follows a lookup may use the lookup's attributes.
        # atomic_o_trunc: the effect of O_TRUNC, and its errno, belong to open(2).
        # max_background: a RELEASE beyond it would enter the queue after later requests.
        # max_read: one request for each 128 KiB of a client's read(2).
        # max_readahead: the reads after a splice(2) would miss a page that it has read ahead.
        options: dict[str, Any] = {
            "direct_io": True,
            "entry_timeout": 0,
            "attr_timeout": self._operations.validity,
            "atomic_o_trunc": True,
            "max_background": MAX_BACKGROUND,
            "max_read": libfuse.REQUEST_SIZE,
            "max_readahead": 0,
            "use_ino": True,
            "hard_remove": True,
            "fsname": self._options.source,
            "subtype": self._options.subtype,
            "allow_other": self._options.allow_other,
            **dict.fromkeys(self._options.flags, True),
        }
        # If only root may use the mount, modes restrict no user. If the host's kernel does not check modes
        # itself, it sends an ACCESS at each chdir(2). There is no other request for a chdir(2).
        if self._checks_modes:
            options["default_permissions"] = True
        try:
            libfuse.Session(self._operations, directory, options, self._run)
        except RuntimeError as error:
            raise CliError(f"{directory}: FUSE refused the mount", is_explained=True) from error

    def _run(self, session: int) -> None:
        """Answer the requests of the struct fuse_session at the address `session` until the session ends."""
        operations = self._operations
        nodes: KnownNodes | None = None
        if self._options.is_ordered:
            replies = ReplyChannels(session)
            # No client waits for the reply to a RELEASE. Two threads could answer it and the next OPEN in any
            # order.
            free_loops = 1
        else:
            # If the host's kernel checks modes, it requests the attributes of each directory of a path. Names
            # with a validity then save no request.
            nodes = KnownNodes(self._mount, may_last=not self._checks_modes)
            walks = operations.attributes.skip_client
            replies = ReplyChannels(session, walks, operations.lasting, operations.clients_own, nodes)
            free_loops = FREE_LOOPS
        loop = SessionLoop(session, replies, operations.at_once(), nodes, operations.acting)
        workers = WorkerThreads(loop.run, free_loops, loop.give_up_turn)
        operations.blocking = workers.blocking
        if nodes is not None:
            nodes.waiting = workers.waiting
            self._mount.at_names_end(nodes.end_names)
        if not self._options.is_ordered:
            self._lock.waiting = workers.waiting
        self._lock.is_dying = loop.is_client_killed
        self._lock.is_interrupted = loop.is_client_interrupted
        workers.run()

    def stop(self) -> None:
        """End blocked requests with EIO. Afterwards, the caller must unmount."""
        self._stopping.set()

    @property
    def faults(self) -> int:
        """Number of requests that have ended in an internal fault since the start."""
        return self._operations.faults


class _AttributesFor(threading.local):
    """Records whether the guest may repeat the next getattr in this thread.

    libfuse calls getattr for a client's stat(2) and LOOKUP, which the guest repeats as system calls of the
    client. In three cases the guest must run nothing:

    - libfuse completes its reply to create, mknod, mkdir, symlink or link.
    - The LOOKUP is that of a directory that exists as long as the mount.
    - The guest has already repeated the LOOKUP.

    In these cases, skip_client() is called before libfuse calls getattr. libfuse makes all calls of one
    request in one thread.
    """

    def __init__(self) -> None:
        self._has_client = True

    def skip_client(self) -> None:
        """Record that the guest must not repeat the next getattr in this thread."""
        self._has_client = False

    def take_client(self) -> Callable[[], Client] | None:
        """Return a function that returns the client of this getattr.

        Return None if the guest must not repeat this getattr. In both cases, the guest may repeat the next
        getattr in this thread.
        """
        has_client = self._has_client
        self._has_client = True
        return _client if has_client else None


class _Operations:
    """The FUSE operations that fusepy calls.

    If an operation were missing, the reply to its request would be ENOSYS, and the host's kernel would
    never send such a request again.
    """

    use_ns = True
    flag_nullpath_ok = 1
    # Hazard: libfuse locks the path that it passes to a request, and the directories above. A request that
    # sleeps would block rmdir(2), which would block all requests below.
    flag_nopath = 1
    flag_utime_omit_ok = 1

    def __init__(
        self, mount: Mount, stopping: threading.Event, validity: float = ATTRIBUTES_VALIDITY
    ) -> None:
        """Serve `mount`. `validity`: seconds for which the host's kernel may keep attributes.

        `stopping`: event that is set when blocked requests must end with EIO.
        """
        self._mount = mount
        self._stopping = stopping
        self.validity = validity
        self._pollers = libfuse.PollHandles()
        self.ready: Callable[[], None] = _not_served
        self.blocking: Callable[[], AbstractContextManager[int]] = _not_served
        """Function that returns a context manager, in whose block the calling thread may wait.

        Meanwhile, another thread reads requests. The `with` statement gets the number of threads that wait in
        this way, including the calling thread.
        """
        self.follows_processes = True
        """Whether forks and exits of host processes are repeated in the guest while a client waits."""
        self._follower = threading.Lock()
        """Held by the thread that repeats processes' forks and exits while clients wait in poll(2).

        At most one thread does this.
        """
        self.faults = 0
        self.reserve = MemoryReserve()
        self.attributes = _AttributesFor()
        self.lasting = mount.lasting
        self.clients_own = mount.clients_own
        self.acting = mount.acting
        self._status: dict[int, int] = {}
        """Handle of an open file -> the STATUS_FLAGS that were set last for the file in the mount.

        A file without an item has none of these flags.
        """

    def __call__(self, operation: str, *arguments: Any) -> Any:
        return getattr(self, operation)(*arguments)

    def init(self, path: str) -> None:
        del path
        self.ready()

    def getattr(self, path: str | None, info: Any = None) -> Stat:
        client = self.attributes.take_client()
        # A guest that a debugger holds cannot look up the name.
        if path == STATE_PATH and self._mount.is_debugged:
            return STATE_ATTRIBUTES
        try:
            if info is not None and info.fh:
                found = self._mount.fgetattr(info.fh, client)
            else:
                found = self._mount.getattr(_existing(path), client)
        except KernelError as error:
            if path == STATE_PATH and error.errno == errno.ENOENT:
                return STATE_ATTRIBUTES
            raise
        # Without blocks, cp(1) considers the file sparse, and looks for its data with lseek(2).
        return found._replace(size=PAGED_SIZE, blocks=PAGED_SIZE // 512) if found.is_paged else found

    def opendir(self, path: str) -> int:
        self._needs_reserve()
        try:
            return self._mount.opendir(_client(), path)
        except KernelError as error:
            raise self._retry_error(path, error) from error

    def releasedir(self, _path: str, handle: int) -> None:
        self._mount.release(handle)

    def access(self, path: str, mode: int) -> None:
        """Check whether root may access the file `path`. For a directory, report a chdir(2) to the mount.

        `mode`: the accesses to check, as in access(2). The host's kernel sends the same request for
        access(2) and for chdir(2). Only X_OK can fail for root.
        Raises: KernelError EACCES (a file without execute permission).
        """
        if not mode & os.X_OK:
            return
        found = self._mount.getattr(path).mode
        if stat.S_ISDIR(found):
            self._mount.chdir(_client(), path)
        elif not found & 0o111:
            raise KernelError(errno.EACCES)

    def readdir(self, info: Any, start: int) -> list[DirEntry]:
        self._needs_reserve()
        return self._mount.getdents(_client(), info.fh, start)

    def fsync(self, path: str | None, datasync: int, info: Any) -> None:
        del path
        self._mount.fsync(_client(), info.fh, only_data=bool(datasync))

    def fsyncdir(self, _path: str, datasync: int, handle: int) -> None:
        self._mount.fsync(_client(), handle, only_data=bool(datasync))

    def statfs(self, path: str) -> dict[str, int]:
        usage = self._mount.statfs(path)
        return {
            "f_bsize": usage.block_size,
            "f_frsize": usage.block_size,
            "f_blocks": usage.blocks,
            "f_bfree": usage.free,
            "f_bavail": usage.available,
            "f_files": usage.files,
            "f_ffree": usage.free_files,
            "f_namemax": NAME_MAX,
        }

    def open(self, path: str, info: Any) -> int:
        self._needs_reserve()
        try:
            handle = self._mount.open(_client(), path, info.flags)
        except KernelError as error:
            raise self._retry_error(path, error) from error
        return self._opened(info, handle)

    def _retry_error(self, path: str, error: KernelError) -> KernelError:
        """Return the error for a failed open(2).

        It is ESTALE if the host's kernel may cache a name that was removed; the kernel then looks the name
        up again. Otherwise, it is `error` itself.
        """
        if error.errno == errno.ENOENT and path.split("/", 2)[1] in self.clients_own:
            return KernelError(errno.ESTALE, path)
        return error

    def create(self, path: str, mode: int, info: Any) -> int:
        self._needs_memory()
        handle = self._mount.create(_client(), path, mode, info.flags)
        self.attributes.skip_client()
        return self._opened(info, handle)

    def at_once(self) -> AtOnce:
        """Return the operations that SessionLoop calls without libfuse."""
        guarded = partial(libfuse.guarded, self)
        return AtOnce(
            read=partial(guarded, self.read_at_once),
            release=partial(guarded, self.close),
            getattr=partial(guarded, self.getattr_at_once),
            fgetattr=partial(guarded, self.fgetattr_at_once),
            open=partial(guarded, self.open_at_once),
            write=partial(guarded, self.write_at_once),
            skip_client=self.attributes.skip_client,
            validity=int(self.validity * 1e9),
        )

    def getattr_at_once(self, uid: int, gid: int, pid: int, path: str) -> Stat:
        """Return the attributes of a control file for SessionLoop; see AtOnce.getattr."""
        return self._mount.getattr(path, partial(_cached_client, pid, uid, gid))

    def fgetattr_at_once(self, uid: int, gid: int, pid: int, handle: int) -> Stat:
        """Return the attributes of the open file `handle` for SessionLoop; see AtOnce.fgetattr."""
        return self._mount.fgetattr(handle, partial(_cached_client, pid, uid, gid))

    def open_at_once(self, uid: int, gid: int, pid: int, path: str, flags: int) -> tuple[int, bool]:
        """Open a file for SessionLoop; return (handle, whether the file is a stream, which cannot seek).

        The parameters are those of AtOnce.open.
        """
        if self.reserve.is_spent:
            self._needs_reserve()
        try:
            handle = self._mount.open(_cached_client(pid, uid, gid), path, flags)
        except KernelError as error:
            raise self._retry_error(path, error) from error
        if status := flags & STATUS_FLAGS:
            self._status[handle] = status
        return handle, self._mount.is_stream(handle)

    def read_at_once(
        self, uid: int, gid: int, pid: int, handle: int, offset: int, size: int, owner: int, flags: int
    ) -> bytes | None:
        """Read a file for SessionLoop; return None if the read has to wait, so that libfuse calls read().

        The parameters are those of AtOnce.read.
        """
        try:
            return self._read(_cached_client(pid, uid, gid), handle, size, offset, owner, flags)
        except WouldBlock:
            return None

    def read(self, path: str | None, size: int, offset: int, info: Any) -> bytes:
        """Read a file, and wait for data if there is none."""
        del path
        client = _client()
        request = partial(self._read, client, info.fh, size, offset, info.lock_owner, info.flags)
        try:
            return request()
        except WouldBlock:
            return self._blocking(client, info, request)

    def _read(self, client: Client, handle: int, size: int, offset: int, owner: int, flags: int) -> bytes:
        if self.reserve.is_spent:
            self._needs_reserve()
        if flags & STATUS_FLAGS != self._status.get(handle, 0):
            self._set_status_flags(handle, flags)
        # A read(2) has an owner of locks; a read of the host's page cache has none.
        read = self._mount.read if owner else self._mount.read_page
        data = read(client, handle, size, offset)
        # Hazard: the host's kernel drops a longer reply, and libfuse's buffer has no space for it.
        if len(data) > size:
            raise ValueError(f"{len(data)} bytes for a read of {size}")
        return data

    def write_at_once(
        self, uid: int, gid: int, pid: int, handle: int, offset: int, flags: int, data: Any
    ) -> int | None:
        """Execute a write for SessionLoop, and return the number of bytes written.

        Return None if libfuse must call write() instead: a write to the file may read host files, or this
        write has to wait. The parameters are those of AtOnce.write.
        """
        if not self._mount.writes_at_once(handle):
            return None
        if self.reserve.is_scarce:
            self._needs_memory(bytes(data))
        if flags & STATUS_FLAGS != self._status.get(handle, 0):
            self._set_status_flags(handle, flags)
        try:
            return self._mount.write(_cached_client(pid, uid, gid), handle, data, offset)
        except WouldBlock:
            return None

    def write(self, path: str | None, data: bytes, offset: int, info: Any) -> int:
        del path
        self._needs_memory(data)
        client = _client()
        handle = info.fh
        flags = info.flags
        if flags & STATUS_FLAGS != self._status.get(handle, 0):
            self._set_status_flags(handle, flags)
        if self._mount.reads_host(handle):
            with self.blocking():
                return self._mount.write(client, handle, data, offset)
        try:
            return self._mount.write(client, handle, data, offset)
        except WouldBlock:
            return self._blocking(client, info, lambda: self._mount.write(client, handle, data, offset))

    def _set_status_flags(self, handle: int, flags: int) -> None:
        self._mount.set_status_flags(handle, flags)
        self._status[handle] = flags & STATUS_FLAGS

    def release(self, _path: str | None, info: Any) -> None:
        """Close the file of an interrupted open(2), for libfuse.

        For all other open files, SessionLoop calls close().
        """
        self.close(info.fh)

    def close(self, handle: int) -> None:
        """Release the open file `handle`, whose last descriptor was closed."""
        self._pollers.forget(handle)
        try:
            self._mount.release(handle)
        finally:
            self._status.pop(handle, None)

    def poll(self, info: Any, poll_handle: int | None) -> int:
        handle: int = info.fh
        notify = None
        if poll_handle and self._pollers.add(handle, poll_handle):

            def notify() -> None:
                self._pollers.notify(handle)

            if self.follows_processes and self._follower.acquire(blocking=False):
                threading.Thread(target=self._follow, name="pollers", daemon=True).start()

        return self._mount.poll(handle, notify)

    def _follow(self) -> None:
        """Repeat in the guest the forks and exits of clients' processes while a client waits in poll(2).

        Return when no client waits there any more.
        """
        while True:
            while self._pollers and not self._stopping.wait(WAIT_SLICE):
                self._mount.follow_processes()
            self._follower.release()
            # A client that began to wait just now has found the lock taken.
            if not self._pollers or self._stopping.is_set() or not self._follower.acquire(blocking=False):
                return

    def truncate(self, path: str | None, length: int, info: Any = None) -> None:
        if length:
            self._needs_memory()
        if info is None:
            self._mount.truncate(_client(), _existing(path), length)
        else:
            self._mount.ftruncate(_client(), info.fh, length)

    def listxattr(self, path: str) -> tuple[str, ...]:
        del path
        return ()

    def mknod(self, path: str, mode: int, _device: int) -> None:
        self._needs_memory()
        self._mount.mknod(_client(), path, mode)
        self.attributes.skip_client()

    def link(self, target: str, source: str) -> None:
        self._needs_memory()
        self._mount.link(_client(), source, target)
        self.attributes.skip_client()

    def mkdir(self, path: str, mode: int) -> None:
        self._needs_memory()
        self._mount.mkdir(_client(), path, mode)
        self.attributes.skip_client()

    def rmdir(self, path: str) -> None:
        self._mount.rmdir(_client(), path)

    def unlink(self, path: str) -> None:
        self._mount.unlink(_client(), path)

    def rename(self, old: str, new: str) -> None:
        self._needs_memory()
        self._mount.rename(_client(), old, new)

    def symlink(self, target: str, source: str) -> None:
        self._needs_memory()
        self._mount.symlink(_client(), target, source)
        self.attributes.skip_client()

    def readlink(self, path: str) -> str:
        if path == STATE_PATH:
            if self._mount.is_debugged:
                found = MountState.DEBUGGED
            else:
                found = MountState.PANICKED if self._mount.is_dead() else MountState.SERVING
            return str(found.value)
        return self._mount.readlink(_client(), path)

    def chmod(self, path: str, mode: int) -> None:
        self._needs_memory()
        self._mount.chmod(_client(), path, mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        self._needs_memory()
        self._mount.chown(_client(), path, uid, gid)

    def utimens(self, path: str, times: tuple[int, int]) -> None:
        self._needs_memory()
        self._mount.utimens(_client(), path, *map(_new_time, times))

    def _needs_memory(self, data: bytes = b"more") -> None:
        """Check that there is memory for a request that creates something. Raises: KernelError ENOMEM.

        `data`: data of a write, because some writes need no memory; the default needs memory.
        """
        if not self.reserve.allows(data):
            raise KernelError(errno.ENOMEM, "the host has no memory")

    def _needs_reserve(self) -> None:
        """Check that the memory reserve is not used up. If the reserve is used up, only close(2) works.

        Raises: KernelError ENOMEM.
        """
        if self.reserve.is_spent:
            raise KernelError(errno.ENOMEM, "the host has no memory, and the reserve is used up")

    def _opened(self, info: Any, handle: int) -> int:
        info.fh = handle
        if status := info.flags & STATUS_FLAGS:
            self._status[handle] = status
        info.nonseekable = self._mount.is_stream(handle)
        return 0

    def _blocking(self, client: Client, info: Any, operation: Callable[[], T]) -> T:
        """Wait until a call of `operation` succeeds, and return the result.

        An earlier call has raised WouldBlock. The flags in `info` come from the request, so they include
        flags that fcntl(F_SETFL) has set.
        Raises: KernelError EAGAIN (O_NONBLOCK is set), EINTR (the client was interrupted), ENOMEM (no
        thread can wait), EIO (the mount ends), and the errors of `operation`.
        """
        if info.flags & os.O_NONBLOCK:
            self._give_up(client, info, errno.EAGAIN)
        while not self._stopping.is_set():
            try:
                with self.blocking() as blocked:
                    self._mount.wait(info.fh, max(WAIT_SLICE, blocked / CHECKS_PER_SECOND))
            except KernelError as error:
                self._give_up(client, info, error.errno or errno.EIO)
            if libfuse.is_interrupted():
                self._give_up(client, info, errno.EINTR)
            if self.follows_processes:
                self._mount.follow_processes()
            with suppress(WouldBlock):
                return operation()
        raise KernelError(errno.EIO, "the mount ends")

    def _give_up(self, client: Client, info: Any, error: int) -> NoReturn:
        self._mount.give_up(client, info.fh, error)
        raise KernelError(error)
