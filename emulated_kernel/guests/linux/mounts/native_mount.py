"""NativeMount: the guest's own tracefs and debugfs as a mount; requests are system calls of its tasks."""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache
from itertools import count

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.guest.clients import LinuxClients
from emulated_kernel.guests.linux.guest.file_times import FileTimes
from emulated_kernel.guests.linux.guest.page_reporting import PageReporting
from emulated_kernel.guests.linux.guest.syscalls import (
    AT_REMOVEDIR,
    AT_SYMLINK_NOFOLLOW,
    PATIENCE,
    LinuxSyscalls,
)
from emulated_kernel.guests.linux.guest.tasks import Blocked, LinuxTask, LinuxTasks
from emulated_kernel.guests.linux.initramfs import TMPFS
from emulated_kernel.guests.linux.mounts.guest_paths import (
    DMESG,
    FORWARDED,
    LINKED,
    MACHINE,
    MODULES,
    TOPS,
    guest_paths,
)
from emulated_kernel.guests.linux.mounts.kernel_modules import KernelModules
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.vfs.core.client import (
    GONE,
    STATUS_FLAGS,
    Client,
    DirEntry,
    Stat,
    StatFs,
    path_behind,
    still_there,
)
from emulated_kernel.vfs.core.node import Owner

_HOST_INO = 1 << 40
"""Numbers of what the guest doesn't have begin there."""
_KEPT = 500
"""Attributes that are remembered as they are shown."""
_POLLED = select.POLLIN | select.POLLOUT | select.POLLPRI | select.POLLRDNORM | select.POLLWRNORM


@dataclass(eq=False)
class OpenLinuxFile:
    """An open file of the guest, or a text of the machine's."""

    path: str
    """Of a directory where it is now, or GONE."""
    fd: int
    """-1 for a text or a directory."""
    task: LinuxTask | None = None
    """Whose call was the last one on it."""
    seekable: bool = True
    flags: int = 0
    """As the guest has them."""
    position: int = 0
    text: bytes = b""
    status: int = 0
    """STATUS_FLAGS as the client has them."""
    entries: list[DirEntry] | None = None
    """Of a directory, from when it was read from its beginning."""


class _Guest:
    """Around what may run the guest: the lock is held, and its death is EIO. Holds no state of a request."""

    __slots__ = ("_lock", "_mount")

    def __init__(self, mount: NativeMount) -> None:
        self._lock = mount.lock
        self._mount = mount

    def __enter__(self) -> None:
        self._lock.__enter__()
        if self._mount.is_closed:
            self._lock.__exit__()
            self._mount.check_open()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._lock.__exit__()
        if isinstance(error, GuestFault):
            raise KernelError(errno.EIO, f"the guest has died: {error}") from error


class _Request:
    """Around a system call of a client's. No generator: one costs more than the lock, in each request."""

    __slots__ = ("_client", "_guest", "_mount", "_opens")

    def __init__(self, mount: NativeMount, guest: _Guest, client: Client, opens: bool = False) -> None:
        self._mount = mount
        self._guest = guest
        self._client = client
        self._opens = opens

    def __enter__(self) -> LinuxTask:
        self._guest.__enter__()
        try:
            return self._mount.request_begins(self._client, self._opens)
        except BaseException as error:
            self._guest.__exit__(None, error, None)
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._mount.request_ends(has_failed=error is not None)
        except BaseException as failed:
            error = failed
            raise
        finally:
            self._guest.__exit__(kind, error, traceback)
        if error is None and self._mount.waiters:
            self._mount.wake()


class NativeMount:
    """What a front end serves; the methods are Mount's. Takes the control lock.

    All raise KernelError with the guest's errno; EIO when the guest has died.
    """

    clients_own = ("scratch",)
    """Directories in which clients alone make and remove names; no lookup there is anything to the guest."""

    def __init__(
        self,
        tasks: LinuxTasks,
        watch: ProcessWatch,
        owner: Owner,
        modules: ModuleFiles | None = None,
        *,
        is_tracefs: bool,
        lock: ControlLock | None = None,
    ) -> None:
        """`modules`: this kernel's own. `is_tracefs`: tracefs is the root, and all that there is.

        `lock`: the control lock.
        """
        self._tasks = tasks
        self._owner = owner
        self._is_tracefs = is_tracefs
        self._path = guest_paths(is_tracefs=is_tracefs)
        self.lock = lock or ControlLock()
        self._syscalls = LinuxSyscalls(tasks)
        self._modules = KernelModules(self._syscalls, modules)
        self._clients = LinuxClients(tasks, watch, owner.uid, self._close_released)
        self._handles: dict[int, OpenLinuxFile] = {}
        self._released: deque[OpenLinuxFile] = deque()
        """What is to be closed in the guest."""
        self._closing: OpenLinuxFile | None = None
        """Of those the one that the call of this request closes; needs the lock."""
        self._numbers = count(1)
        self._asleep: dict[int, int] = {}
        """Clients whose call sleeps in the guest: by pid, the number of requests at the last look."""
        self._requests = 0
        self._pollers: dict[int, tuple[int, Callable[[], None]]] = {}
        """By handle: what was there when it was asked, and whom to tell that this has changed."""
        self._activity = threading.Condition()
        self.waiters = 0
        """Threads that wait for activity; without any, nobody is told. Who is about to looks again soon."""
        self.is_closed = False
        self._known = lru_cache(_KEPT)(self._shown)
        self._times = FileTimes(tasks.machine, tasks.facts)
        self._free_pages = PageReporting(tasks.machine.memory, tasks.root, tasks.facts)
        self._running = _Guest(self)
        """Around all that may run the guest."""

    def check_open(self) -> None:
        """Raises: KernelError EIO (behind the mount's end)."""
        if self.is_closed:
            raise KernelError(errno.EIO, "the mount has ended")

    def _request(self, client: Client) -> _Request:
        """A system call of the client's, which may change what others wait for."""
        return _Request(self, self._running, client)

    def request_begins(self, client: Client, opens: bool) -> LinuxTask:
        """The task that makes a request, under the lock. What was put off is done before.

        `opens`: its first call closes what is `_closing` then, the one file that this task has closed.
        """
        released = self._released
        if opens and len(released) == 1 and self._closing is None:
            # From here on others may add to them.
            self._closing = released.popleft()
        elif released or self._closing is not None:
            self._close_released()
        task = self._clients.task_of(client)
        closing = self._closing
        if closing is not None and (closing.task is not task or task.pending):
            self._close_released()
        return task

    def _close_released(self) -> None:
        closing = self._closing
        self._closing = None
        if closing is not None:
            self._close(closing)
        while self._released:
            self._close(self._released.popleft())

    def _close(self, file: OpenLinuxFile) -> None:
        with suppress(KernelError):
            self._syscalls.close(file.task or self._tasks.init, file.fd)

    def request_ends(self, *, has_failed: bool) -> None:
        """It has been made; the lock is still held."""
        if not has_failed:
            self._requests += 1
            if self._pollers:
                self._tell_pollers()
            self._see_free_pages()

    def _see_free_pages(self) -> None:
        pages = self._free_pages
        if not pages.fewest <= pages.words[pages.counter] <= pages.most:
            pages.look()

    def wake(self) -> None:
        """Who waits looks again."""
        with self._activity:
            self._activity.notify_all()

    def _opened(self, handle: int) -> OpenLinuxFile:
        try:
            return self._handles[handle]
        except KeyError:
            raise KernelError(errno.EBADF, f"no handle {handle}") from None

    def _add(self, file: OpenLinuxFile) -> int:
        handle = next(self._numbers)
        self._handles[handle] = file
        return handle

    # Attributes and names

    def getattr(self, path: str, _client: Callable[[], Client] | None = None) -> Stat:
        """Attributes of a file."""
        at, is_machine, takes_commands = self._path(path)
        if is_machine:
            return self._machine_stat(path)
        with self._running:
            return self._known(self._syscalls.lstat(at), takes_commands)

    def fgetattr(self, handle: int, _client: Callable[[], Client] | None = None) -> Stat:
        """Attributes of an open file or directory."""
        file = self._opened(handle)
        if file.fd < 0:
            return self.getattr(still_there(file.path))
        with self._running:
            takes_commands = file.path == FORWARDED[MODULES]
            return self._known(self._syscalls.fstat(file.fd), takes_commands)

    def _shown(self, found: Stat, takes_commands: bool) -> Stat:
        """Root's files are the mounting user's, and devices are files: the host would ask a driver."""
        kind = stat.S_IFMT(found.mode)
        shown = self._times.shown
        mode = stat.S_IMODE(found.mode) | (stat.S_IWUSR if takes_commands else 0)
        return Stat(
            self._shown_ino(found.ino),
            mode | (stat.S_IFREG if kind in (stat.S_IFCHR, stat.S_IFBLK) else kind),
            found.nlink,
            found.uid or self._owner.uid,
            found.gid or self._owner.gid,
            found.size,
            shown(found.atime_ns),
            shown(found.mtime_ns),
            shown(found.ctime_ns),
            found.blocks,
        )

    def _shown_ino(self, ino: int) -> int:
        return ino

    def _machine_stat(self, path: str) -> Stat:
        if path == MACHINE:
            return Stat(_HOST_INO, stat.S_IFDIR | 0o755, 2, self._owner.uid, self._owner.gid)
        if path == DMESG:
            return Stat(_HOST_INO + 1, stat.S_IFREG | 0o444, 1, self._owner.uid, self._owner.gid)
        raise KernelError(errno.ENOENT)

    def opendir(self, client: Client, path: str) -> int:
        """The client opens a directory and closes it; `getdents` lists it."""
        if not self._path(path).is_machine:
            with self._request(client) as task:
                fd = self._syscalls.open(task, self._path(path).at, os.O_RDONLY | os.O_DIRECTORY)
                self._syscalls.close(task, fd)
        return self._add(OpenLinuxFile(path, -1))

    def getdents(self, _client: Client, handle: int, start: int) -> list[DirEntry]:
        """The entries of an open directory from number `start` on; 0 makes a snapshot of all of them."""
        directory = self._opened(handle)
        if start == 0 or directory.entries is None:
            directory.entries = self.readdir(still_there(directory.path))
        return directory.entries[start:]

    def chdir(self, client: Client, path: str) -> None:
        """The host has found that the client may; there is nothing to do in the guest."""

    def readdir(self, path: str) -> list[DirEntry]:
        """The entries, "." and ".." first."""
        if self._path(path).is_machine:
            if path != MACHINE:
                raise KernelError(errno.ENOTDIR)
            files = sorted((DMESG, *FORWARDED))
            texts = [DirEntry(text.rsplit("/", 1)[1], stat.S_IFREG, self.getattr(text).ino) for text in files]
            return [self._directory(".", MACHINE), self._directory("..", "/"), *texts]
        with self._running:
            entries = self._syscalls.listdir(self._path(path).at)
        if path == "/" and not self._is_tracefs:
            added = (*TOPS, MACHINE[1:])
            entries = [entry for entry in entries if entry.name not in added]
            entries += [self._directory(top, f"/{top}") for top in added]
            entries += [DirEntry(name[1:], stat.S_IFREG, self.getattr(name).ino) for name in LINKED]
        return sorted(entries, key=lambda entry: (entry.name not in (".", ".."), entry.name))

    def _directory(self, name: str, path: str) -> DirEntry:
        return DirEntry(name, stat.S_IFDIR, self.getattr(path).ino)

    def readlink(self, _client: Client, path: str) -> str:
        """Where a symbolic link leads."""
        with self._running:
            return self._syscalls.readlink(self._path(path).at)

    # Open files

    def open(self, client: Client, path: str, flags: int) -> int:
        """Open with open(2)'s flags; returns the handle for the calls below."""
        at, is_machine, takes_commands = self._path(path)
        if is_machine:
            return self._add(OpenLinuxFile(path, -1, text=self._machine_text(path, flags)))
        if takes_commands and flags & os.O_ACCMODE:
            if flags & os.O_ACCMODE != os.O_WRONLY or client.uid not in (0, self._owner.uid):
                raise KernelError(errno.EACCES)
            return self._add(OpenLinuxFile(path, -1))
        return self._open(client, at, flags & ~os.O_CREAT, 0)

    def create(self, client: Client, path: str, mode: int, flags: int) -> int:
        """Make a regular file and open it."""
        return self._open(client, self._changed(path), flags | os.O_CREAT, mode)

    def _open(self, client: Client, at: str, flags: int, mode: int) -> int:
        with _Request(self, self._running, client, opens=True) as task:
            closed = self._closing.fd if self._closing is not None else None
            self._closing = None
            # Nothing here waits in open(2), but a FIFO in scratch/.
            try:
                fd = self._syscalls.open(task, at, flags, mode, closed=closed)
            except Blocked:
                raise self._unasked(client) from None
            seekable = self._syscalls.is_seekable(fd)
            return self._add(OpenLinuxFile(at, fd, task, seekable, flags, status=flags & STATUS_FLAGS))

    def _unasked(self, client: Client) -> KernelError:
        """EINTR for a call that sleeps, and whose answer nobody could ask for: its task is killed."""
        self._clients.end(client.pid)
        return KernelError(errno.EINTR)

    def _machine_text(self, path: str, flags: int) -> bytes:
        self._machine_stat(path)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise KernelError(errno.EACCES)
        with self._running:
            return self._log_text()

    def _log_text(self) -> bytes:
        """The kernel's log; when it has died, the end of its serial console and why."""
        machine = self._tasks.machine
        if not machine.death:
            with suppress(GuestFault):
                return self._syscalls.log()
        return bytes(machine.pc.console) + f"{machine.death}\n".encode()

    def is_stream(self, handle: int) -> bool:
        """Whether lseek(2) on the handle has to answer ESPIPE."""
        return not self._opened(handle).seekable

    def set_status_flags(self, handle: int, flags: int) -> None:
        """Those of a request on it: fcntl(F_SETFL) asks for nothing itself."""
        self._opened(handle).status = flags & STATUS_FLAGS

    def reads_host(self, handle: int) -> bool:
        """Whether a write to it reads files of the host, and so takes as long as they do; no lock is held."""
        return self._opened(handle).path == MODULES

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """At most `size` bytes; b"" is the end. Raises: WouldBlock (the call sleeps in the guest)."""
        file = self._opened(handle)
        if file.fd < 0:
            return file.text[offset : offset + size]
        with _Request(self, self._running, client) as task:
            file.task = task
            jumped = file.seekable and offset != file.position
            may_block = not file.status & os.O_NONBLOCK
            at = offset if jumped else None
            if (
                may_block
                and self._clients.is_shared(task)
                and not self._syscalls.poll(file.fd, select.POLLIN)
            ):
                raise WouldBlock

            def begin() -> int:
                if file.flags & STATUS_FLAGS != file.status:
                    self._follow_flags(file, task)
                return self._syscalls.begin_read(task, file.fd, size, at, may_block=may_block)

            count = self._slept(client, task, begin)
            data = self._syscalls.read_data(task, count, size)
            if not jumped:
                file.position += count
            return data

    def _follow_flags(self, file: OpenLinuxFile, task: LinuxTask) -> None:
        """The guest's file has the client's from now on."""
        self._syscalls.set_status_flags(task, file.fd, file.status)
        file.flags = file.flags & ~STATUS_FLAGS | file.status

    def read_page(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """What the host's page cache asks for."""
        return self.read(client, handle, size, offset)

    def write(self, client: Client, handle: int, data: bytes, offset: int) -> int:
        """Number of bytes taken. Raises: WouldBlock (as read() does)."""
        file = self._opened(handle)
        if file.path == MODULES:
            change = self._prepared_modules(client, data)
            with self._request(client):
                return change()
        with self._request(client) as task:
            file.task = task
            appends = file.status & os.O_APPEND
            jumped = file.seekable and not appends and offset != file.position

            def begin() -> int:
                if file.flags & STATUS_FLAGS != file.status:
                    self._follow_flags(file, task)
                return self._syscalls.write(task, file.fd, data, offset if jumped else None)

            count = self._slept(client, task, begin)
            if appends:
                # Behind the end, wherever that was: the offset is what the host takes for it.
                file.position = self._syscalls.fstat(file.fd).size
            elif not jumped:
                file.position += count
            return count

    def _slept(self, client: Client, task: LinuxTask, begin: Callable[[], int]) -> int:
        """What a call returns that may sleep: it is made once, and asked for until it has ended."""
        asked = self._asleep.get(client.pid)
        try:
            if asked is None:
                result = begin()
            else:
                # What somebody has done may wake it in some ticks, and nothing else but time itself.
                result = self._tasks.wait_for_result(task, 1 if asked == self._requests else PATIENCE)
        except Blocked:
            self._asleep[client.pid] = self._requests
            raise WouldBlock from None
        except BaseException:
            self._asleep.pop(client.pid, None)
            raise
        self._asleep.pop(client.pid, None)
        return result

    def _prepared_modules(
        self, client: Client, data: bytes, refused: Collection[str] = ()
    ) -> Callable[[], int]:
        """What the client's write to machine/modules will do, within a request of his."""
        try:
            change = self._modules.prepared(data, refused)
        except KernelError as error:
            # As the kernel's own loader does where it refuses one.
            with suppress(KernelError), self._running:
                self._syscalls.say(f"machine/modules: {error.strerror}")
            raise

        def execute() -> int:
            with self._running:
                try:
                    loaded = self._syscalls.read_all(FORWARDED[MODULES]).decode()
                    change(self._clients.task_of(client), loaded)
                except Blocked:
                    raise self._unasked(client) from None
            return len(data)

        return execute

    def wait(self, handle: int, timeout: float) -> None:
        """Return once a request has been made that may have woken somebody, or after `timeout` seconds."""
        self._opened(handle)
        with self._activity:
            self.waiters += 1
            try:
                self._activity.wait(timeout)
            finally:
                self.waiters -= 1

    def give_up(self, client: Client, handle: int, error: int) -> None:
        """The client doesn't wait any more: its task, which sleeps in the call, is killed."""
        del handle, error
        with self._running:
            self._asleep.pop(client.pid, None)
            self._clients.end(client.pid)

    def poll(self, handle: int, notify: Callable[[], None] | None) -> int:
        """Readiness as poll(2)'s mask; `notify` is called once, when it has changed."""
        file = self._opened(handle)
        if file.fd < 0:
            return select.POLLIN | select.POLLRDNORM
        with self._running:
            mask = self._syscalls.poll(file.fd, _POLLED)
            if notify is not None:
                self._pollers[handle] = mask, notify
            return mask

    def _tell_pollers(self) -> None:
        for handle, (mask, notify) in list(self._pollers.items()):
            file = self._handles.get(handle)
            if file is None or self._syscalls.poll(file.fd, _POLLED) != mask:
                del self._pollers[handle]
                notify()

    def release(self, handle: int) -> None:
        """The last descriptor was closed; the guest does so in front of the next request.

        It comes from no process, and its client goes on: waiting for the lock here would hold that up.
        """
        file = self._handles.pop(handle, None)
        self._pollers.pop(handle, None)
        if file is not None and file.fd >= 0:
            self._released.append(file)

    # Changes of the tree

    def truncate(self, client: Client, path: str, size: int) -> None:
        """truncate(2)."""
        with self._request(client) as task:
            self._syscalls.truncate(task, self._changed(path), size)

    def ftruncate(self, client: Client, handle: int, size: int) -> None:
        """ftruncate(2)."""
        file = self._opened(handle)
        if file.fd < 0:
            raise KernelError(errno.EINVAL, file.path)
        with self._request(client) as task:
            self._syscalls.ftruncate(task, file.fd, size)

    def _change(self, client: Client, name: str, path: str, *arguments: int) -> None:
        """A system call of the client's on a path."""
        with self._request(client) as task:
            self._syscalls.on_path(task, name, self._changed(path), *arguments)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """mkdir(2); in instances/ it makes a trace array."""
        self._change(client, "mkdirat", path, mode)

    def rmdir(self, client: Client, path: str) -> None:
        """rmdir(2)."""
        with self._request(client) as task:
            self._syscalls.on_path(task, "unlinkat", self._changed(path), AT_REMOVEDIR)
            self._moved(path, GONE)

    def unlink(self, client: Client, path: str) -> None:
        """unlink(2)."""
        self._change(client, "unlinkat", path, 0)

    def rename(self, client: Client, old: str, new: str) -> None:
        """rename(2)."""
        with self._request(client) as task:
            self._syscalls.on_paths(task, "renameat", self._changed(old), self._changed(new))
            self._moved(old, new)

    def _moved(self, old: str, new: str) -> None:
        # Others open texts without the lock.
        for file in list(self._handles.values()):
            if file.fd < 0:
                file.path = path_behind(file.path, old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        """link(2)."""
        with self._request(client) as task:
            self._syscalls.on_paths(task, "linkat", self._changed(old), self._changed(new), 0)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        """mknod(2) of a FIFO, a socket or an empty file. Raises: KernelError EPERM (devices)."""
        if stat.S_IFMT(mode) in (stat.S_IFCHR, stat.S_IFBLK):
            raise KernelError(errno.EPERM, path)
        self._change(client, "mknodat", path, mode, 0)

    def statfs(self, path: str) -> StatFs:
        """Of scratch/; all else has nothing to count, and nobody is asked."""
        at = self._path(path).at
        if at != TMPFS and not at.startswith(f"{TMPFS}/"):
            return StatFs()
        with self._running:
            return self._syscalls.statfs(at)

    def fsync(self, _client: Client, handle: int) -> None:
        """What is in memory alone is where it belongs. Raises: KernelError EBADF."""
        self._opened(handle)

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Make `path` a symbolic link to `target`."""
        with self._request(client) as task:
            self._syscalls.symlink(task, self._changed(path), target)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set the permission bits."""
        self._change(client, "fchmodat", path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set the owner; -1 leaves a field alone."""
        uid = 0 if uid == self._owner.uid else uid
        gid = 0 if gid == self._owner.gid else gid
        owner = uid & 0xFFFFFFFF, gid & 0xFFFFFFFF
        self._change(client, "fchownat", path, *owner, AT_SYMLINK_NOFOLLOW)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times, in nanoseconds since the epoch; None leaves one alone."""
        times = (None if time is None else self._times.kept(time) for time in (atime_ns, mtime_ns))
        with self._request(client) as task:
            self._syscalls.utimens(task, self._changed(path), *times)

    def _changed(self, path: str) -> str:
        at, is_machine, _ = self._path(path)
        if is_machine:
            raise KernelError(errno.EPERM)
        return at

    # The end

    def is_dead(self) -> bool:
        """Whether the guest can't run any more."""
        with self.lock:
            return bool(self._tasks.machine.death)

    def close(self) -> None:
        """The mount ends: wake who waits, free the machine."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            self._clients.close()
            self._tasks.machine.close()
        with self._activity:
            self._activity.notify_all()
