"""EngineMount: a distribution's kernel probed by our engine: our control files, and scratch/ of the guest."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

from emulated_kernel.errors import KernelError
from emulated_kernel.host.mirror.processes import ProcessWatch
from emulated_kernel.linux.engine import LinuxEngine
from emulated_kernel.linux.init import TMPFS
from emulated_kernel.linux.linux_mount import LinuxMount
from emulated_kernel.linux.tasks import LinuxTask
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.vfs.core.client import INO_SPACES, Client, DirEntry, Stat
from emulated_kernel.vfs.core.node import Directory, Node, Owner, UnlistedDirectory
from emulated_kernel.vfs.core.open_file import OpenFile, Piece
from emulated_kernel.vfs.core.pieces import WriteInPieces, giving_way
from emulated_kernel.vfs.core.seq import PerClientFile, Records, SeqFile, listing, single
from emulated_kernel.vfs.core.tree import CONTROL, Filesystem
from emulated_kernel.vfs.trees.debugfs import kprobes_directory
from emulated_kernel.vfs.trees.sysctl import sysctl_directory
from emulated_kernel.vfs.trees.tracefs import kprobe_events_file, kprobe_profile_file, tracefs_directory

_OURS = 1 << 41
"""Handles of our files begin there."""


class EngineMount(LinuxMount):
    """A request for a file of ours is answered by the host: it is no system call of the guest's.

    The client's task is the guest's current one then. All raise KernelError with Linux's errno.
    """

    def __init__(self, engine: LinuxEngine, watch: ProcessWatch, owner: Owner, *, is_tracefs: bool) -> None:
        """`is_tracefs`: tracefs is the mount's root, and all that there is."""
        super().__init__(engine.tasks, watch, owner, is_tracefs=is_tracefs, lock=engine.lock)
        self._engine = engine
        self._files = self._tree(is_tracefs)
        self._opened_files: dict[int, OpenFile | str] = {}
        """By handle; of a directory its path."""
        self._our_numbers = count(_OURS)

    def _tree(self, is_tracefs: bool) -> Filesystem:
        parts, owner = self._engine.parts, self._owner
        tracing, kprobes = parts.tracing, parts.engine.kprobes
        control: dict[str, Node] = {
            "kprobes": kprobes_directory(parts, owner, choosing=False),
            "machine": self._machine_directory(),
            "sysctl": sysctl_directory(kprobes, tracing.stack_tracer),
        }
        if is_tracefs:
            unlisted = {CONTROL: UnlistedDirectory(0o755, control)}
            return Filesystem(tracefs_directory(tracing, unlisted), owner)
        root = Directory(
            0o755,
            {
                "kprobe_events": kprobe_events_file(tracing.kprobe_events),
                "kprobe_profile": kprobe_profile_file(tracing.kprobe_events),
                "tracing": tracefs_directory(tracing),
                **control,
                # What the guest's tmpfs is mounted on.
                "scratch": Directory(0o1777, {}),
            },
        )
        return Filesystem(root, owner)

    def _machine_directory(self) -> Directory:
        kallsyms, owner = self._engine.kernel.kallsyms, self._owner
        version = f"{self._engine.kernel.version}\nprofile {self._engine.kprobes.profile.name}\n"

        def symbols(client: Client) -> Records:
            return single(lambda: kallsyms.kallsyms_text(not owner.is_privileged(client)))

        def log() -> Iterator[str]:
            yield self._log_text().decode("utf-8", "surrogateescape")

        return Directory(
            0o755,
            {
                "version": SeqFile(0o444, single(lambda: version)),
                "kallsyms": PerClientFile(0o444, symbols),
                "dmesg": SeqFile(0o400, listing(log)),
            },
        )

    # Whose a file is

    def _is_guests(self, path: str) -> bool:
        return not self._is_tracefs and (path == TMPFS or path.startswith(f"{TMPFS}/"))

    def _file(self, handle: int) -> OpenFile:
        found = self._opened_files.get(handle)
        if found is None:
            raise KernelError(errno.EBADF, f"no handle {handle}")
        if isinstance(found, str):
            raise KernelError(errno.EISDIR, found)
        return found

    @contextmanager
    def _request(self, client: Client) -> Iterator[LinuxTask]:
        with self._guest():
            self._engine.request_begins()
        with super()._request(client) as task:
            try:
                yield task
            finally:
                self._engine.request_ended()

    @contextmanager
    def _control(self, client: Client) -> Iterator[None]:
        """Around what a client does with a file of ours; that answers, whatever becomes of the guest."""
        with self.lock:
            if self._closed:
                raise KernelError(errno.EIO, "the mount has ended")
            if not self._tasks.machine.death:
                with suppress(KernelError, GuestFault):
                    self._tasks.bring(self._clients.task_of(client))
            self._engine.request_begins()
            try:
                yield
            finally:
                self._engine.request_ended()

    # Attributes and names

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        if self._is_guests(path):
            return super().getattr(path, client)
        with self.lock:
            return self._files.getattr(path)

    def _shown(self, found: Stat, *, takes_commands: bool) -> Stat:
        """Numbers of the guest's files are none of ours."""
        numbered = found._replace(ino=found.ino * INO_SPACES + 1)
        return super()._shown(numbered, takes_commands=takes_commands)

    def fgetattr(self, handle: int, client: Callable[[], Client] | None = None) -> Stat:
        if handle < _OURS:
            return super().fgetattr(handle, client)
        found = self._opened_files.get(handle)
        if isinstance(found, str):
            return self.getattr(found)
        with self.lock:
            return self._files.stat(self._file(handle).node)

    def opendir(self, client: Client, path: str) -> int:
        if self._is_guests(path):
            return super().opendir(client, path)
        return self._keep(path)

    def _keep(self, opened: OpenFile | str) -> int:
        handle = next(self._our_numbers)
        self._opened_files[handle] = opened
        return handle

    def getdents(self, client: Client, handle: int, start: int) -> list[DirEntry]:
        if handle < _OURS:
            return super().getdents(client, handle, start)
        found = self._opened_files.get(handle)
        if not isinstance(found, str):
            raise KernelError(errno.ENOTDIR, f"handle {handle}")
        return self.readdir(found)[start:]

    def readdir(self, path: str) -> list[DirEntry]:
        if self._is_guests(path):
            above = self._files.getattr("/").ino if path == TMPFS else 0
            return [
                entry._replace(ino=above if above and entry.name == ".." else entry.ino * INO_SPACES + 1)
                for entry in super().readdir(path)
            ]
        with self.lock:
            entries = self._files.readdir(path)
        if path == "/" and not self._is_tracefs:
            # A dead guest keeps nobody from listing.
            with suppress(KernelError):
                mounted = {TMPFS[1:]: self.getattr(TMPFS).ino}
                return [entry._replace(ino=mounted.get(entry.name, entry.ino)) for entry in entries]
        return entries

    def readlink(self, client: Client, path: str) -> str:
        return super().readlink(client, path) if self._is_guests(path) else self._files.readlink(client, path)

    # Open files

    def open(self, client: Client, path: str, flags: int) -> int:
        if self._is_guests(path):
            return super().open(client, path, flags)
        with self._control(client):
            return self._keep(self._files.open(path, flags, client))

    def create(self, client: Client, path: str, mode: int, flags: int) -> int:
        if self._is_guests(path):
            return super().create(client, path, mode, flags)
        return self._files.create(path)

    def is_stream(self, handle: int) -> bool:
        return super().is_stream(handle) if handle < _OURS else self._file(handle).stream

    def set_status_flags(self, handle: int, flags: int) -> None:
        if handle < _OURS:
            super().set_status_flags(handle, flags)
        else:
            self._file(handle).set_status_flags(flags)

    def reads_host(self, handle: int) -> bool:
        return handle < _OURS and super().reads_host(handle)

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        if handle < _OURS:
            return super().read(client, handle, size, offset)
        with self._control(client):
            return self._file(handle).read(size, offset)

    def read_page(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        if handle < _OURS:
            return super().read_page(client, handle, size, offset)
        with self._control(client):
            return self._file(handle).read_page(size)

    def write(self, client: Client, handle: int, data: bytes, offset: int) -> int:
        if handle < _OURS:
            return super().write(client, handle, data, offset)

        def write_piece(piece: Piece, at: int) -> int:
            with self._control(client):
                return self._file(handle).write(piece.data, at, is_part=piece.is_part)

        return giving_way(self.lock, WriteInPieces(self._file(handle), data, offset, write_piece))

    def wait(self, handle: int, timeout: float) -> None:
        if handle < _OURS:
            super().wait(handle, timeout)
        else:
            self._file(handle).wait(timeout)

    def give_up(self, client: Client, handle: int, error: int) -> None:
        if handle < _OURS:
            super().give_up(client, handle, error)

    def poll(self, handle: int, notify: Callable[[], None] | None) -> int:
        if handle < _OURS:
            return super().poll(handle, notify)
        with self.lock:
            return self._file(handle).poll(notify)

    def release(self, handle: int) -> None:
        if handle < _OURS:
            super().release(handle)
            return
        with self.lock:
            opened = self._opened_files.pop(handle, None)
            if isinstance(opened, OpenFile):
                self._files.release(opened)

    # Changes of the tree

    def ftruncate(self, client: Client, handle: int, size: int) -> None:
        if handle < _OURS:
            super().ftruncate(client, handle, size)
        else:
            self._file(handle)

    def truncate(self, client: Client, path: str, size: int) -> None:
        if self._is_guests(path):
            super().truncate(client, path, size)
            return
        with self._control(client):
            self._files.truncate(client, path, size)

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        if self._is_guests(path):
            super().mkdir(client, path, mode)
            return
        with self._control(client):
            self._files.mkdir(client, path, mode)

    def rmdir(self, client: Client, path: str) -> None:
        if self._is_guests(path):
            super().rmdir(client, path)
            return
        with self._control(client):
            self._files.rmdir(client, path)

    def unlink(self, client: Client, path: str) -> None:
        if self._is_guests(path):
            super().unlink(client, path)
        else:
            self._files.unlink(client, path)

    def rename(self, client: Client, old: str, new: str) -> None:
        if self._is_guests(old) != self._is_guests(new):
            raise KernelError(errno.EXDEV, "one of the names is the guest's")
        if self._is_guests(old):
            super().rename(client, old, new)
        else:
            self._files.rename(client, old, new)

    def link(self, client: Client, old: str, new: str) -> None:
        if self._is_guests(old) != self._is_guests(new):
            raise KernelError(errno.EXDEV, "one of the names is the guest's")
        if self._is_guests(old):
            super().link(client, old, new)
        else:
            self._files.link(client, old, new)

    def mknod(self, client: Client, path: str, mode: int) -> None:
        if self._is_guests(path):
            super().mknod(client, path, mode)
        else:
            self._files.mknod(client, path, mode)

    def fsync(self, client: Client, handle: int) -> None:
        if handle < _OURS:
            super().fsync(client, handle)
            return
        raise KernelError(errno.EINVAL, f"handle {handle}")

    def symlink(self, client: Client, path: str, target: str) -> None:
        if self._is_guests(path):
            super().symlink(client, path, target)
        else:
            self._files.symlink(client, path, target)

    def chmod(self, client: Client, path: str, mode: int) -> None:
        if self._is_guests(path):
            super().chmod(client, path, mode)
            return
        with self.lock:
            self._files.chmod(client, path, mode)

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        if self._is_guests(path):
            super().chown(client, path, uid, gid)
            return
        with self.lock:
            self._files.chown(client, path, uid, gid)

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        if self._is_guests(path):
            super().utimens(client, path, atime_ns, mtime_ns)
            return
        with self.lock:
            self._files.utimens(client, path, atime_ns, mtime_ns)
