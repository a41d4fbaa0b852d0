"""VmcoreMount: the kernel in a vmcore as a mount: probes, calls of its functions, and its files to read."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from emulated_kernel.guests.linux.mounts.control_files import ControlFiles
from emulated_kernel.guests.linux.mounts.probed_tree import engine_tree
from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine
from emulated_kernel.guests.linux.vmcore.vmcore_calls import BUFFER_SIZE, VmcoreCalls
from emulated_kernel.guests.linux.vmcore.vmcore_files import VmcoreFiles
from emulated_kernel.guests.linux.vmcore.vmcore_guest import VmcoreGuest
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import INO_SPACES, Client, DirEntry, Stat
from emulated_kernel.vfs.core.node import Directory, Node, Owner
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.open_file import ALWAYS_READY
from emulated_kernel.vfs.core.seq_file import GuestCommandFile, single
from emulated_kernel.vfs.trees.call_file import Calls

FILES = "/files"
_ITERATOR = struct.Struct("<QQQ")
"""struct kmsg_dump_iter (v6.1), and behind it the length of what was taken."""


def _shown_kind(kind: int) -> int:
    """S_IFMT bits here of those in the dump.

    Hazard: all but directories, links and files the host opens itself, and waits at a FIFO.
    """
    return kind if kind in (stat.S_IFDIR, stat.S_IFLNK) else stat.S_IFREG


def _is_in_core(path: str) -> bool:
    return path == FILES or path.startswith(f"{FILES}/")


class _VmcoreControlTree(NodeTree):
    """Files of ours. Raises: KernelError EROFS (the dump's, whose mount asks here for changes alone)."""

    def lookup(self, path: str) -> Node:
        if _is_in_core(path):
            raise KernelError(errno.EROFS, path)
        return super().lookup(path)

    def _split(self, path: str) -> tuple[Directory, str]:
        if _is_in_core(path):
            raise KernelError(errno.EROFS, path)
        return super()._split(path)


class VmcoreMount(ControlFiles):
    """What a front end serves. Nothing runs but what is called; nothing of the dump's file is changed."""

    clients_own = ()
    """None (NativeMount's are): what is called removes files, too."""

    def __init__(self, guest: VmcoreGuest, engine: KernelEngine, owner: Owner, *, is_tracefs: bool) -> None:
        """`is_tracefs`: tracefs is the root, and all that is listed."""
        self._guest = guest
        self._engine = engine
        self._owner = owner
        engine.machine.clock.pass_to(guest.time)
        stack = engine.components.tracing.system.stack
        self._calls = VmcoreCalls(guest, engine.machine, engine.kernel, stack.callers, engine.drop_calls)
        self._core_files = VmcoreFiles(self._calls, engine.kernel, engine.machine.memory)
        self._has_files = not is_tracefs
        self._paths: dict[int, str] = {}
        """Of open files of the dump's, by handle."""
        self._closed = False
        calls = Calls(self._calls.call_function, engine.machine.memory.word_size)
        files = engine_tree(
            engine,
            owner,
            self._log,
            {"call": GuestCommandFile(0o600, single(lambda: calls.result), calls.execute)},
            {FILES[1:]: Directory(0o555, {})},
            is_tracefs=is_tracefs,
        )
        tree = files if is_tracefs else _VmcoreControlTree(files.root, owner)
        super().__init__(tree, engine.lock, self._requested)

    @contextmanager
    def _requested(self, client: Client | None) -> Iterator[None]:
        """Around all that may run the guest, for a client if one waits for it."""
        with self.lock:
            if self._closed:
                raise KernelError(errno.EIO, "the mount has ended")
            self._engine.request_begins()
            try:
                wanted = self._guest.machine.wanted_by(client.pid) if client else nullcontext()
                with wanted, self._calls.bounded():
                    yield
            finally:
                for tell in self._guest.events.call_ended:
                    tell()

    def _log(self) -> bytes:
        """What fits into the buffer of the end of the kernel's log."""
        memory = self._engine.machine.memory
        buffer = self._calls.buffer
        call = self._calls.call_function
        text = buffer + _ITERATOR.size
        size = BUFFER_SIZE - _ITERATOR.size
        memory.write(buffer, bytes(_ITERATOR.size))
        call("kmsg_dump_rewind", buffer)
        call("kmsg_dump_get_buffer", buffer, 1, text, size, buffer + 16)
        *_, length = _ITERATOR.unpack(memory.read(buffer, _ITERATOR.size))
        return memory.read(text, min(length, size))

    # The dump's files

    def _in_core(self, path: str) -> str | None:
        """The path in the dump; None for a file of ours."""
        return path.removeprefix(FILES) or "/" if self._has_files and _is_in_core(path) else None

    def _shown(self, found: Stat) -> Stat:
        """Root's files are the mounting user's, and nobody writes."""
        return found._replace(
            ino=found.ino * INO_SPACES + 1,
            mode=stat.S_IMODE(found.mode) & ~0o222 | _shown_kind(stat.S_IFMT(found.mode)),
            uid=found.uid or self._owner.uid,
            gid=found.gid or self._owner.gid,
        )

    def getattr(self, path: str, client: Callable[[], Client] | None = None) -> Stat:
        inside = self._in_core(path)
        if inside is None:
            return super().getattr(path, client)
        with self._requested(client() if client else None):
            return self._shown(self._core_files.lstat(inside))

    def fgetattr(self, handle: int, client: Callable[[], Client] | None = None) -> Stat:
        path = self._paths.get(handle)
        return super().fgetattr(handle, client) if path is None else self.getattr(path, client)

    def readdir(self, path: str, client: Client | None = None) -> list[DirEntry]:
        inside = self._in_core(path)
        if inside is None:
            return super().readdir(path, client)
        with self._requested(client):
            found = self._core_files.readdir(inside)
        # Of some the file system says no kind, which says nothing wrong.
        return [
            entry._replace(ino=entry.ino * INO_SPACES + 1, kind=entry.kind and _shown_kind(entry.kind))
            for entry in found
        ]

    def readlink(self, client: Client, path: str) -> str:
        inside = self._in_core(path)
        if inside is None:
            return super().readlink(client, path)
        with self._requested(client):
            return self._core_files.readlink(inside)

    def open(self, client: Client, path: str, flags: int) -> int:
        inside = self._in_core(path)
        if inside is None:
            return super().open(client, path, flags)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise KernelError(errno.EROFS, path)
        with self._requested(client):
            self._core_files.read(inside, 0, 0)
            handle = next(self._numbers)
            self._paths[handle] = path
            return handle

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        path = self._paths.get(handle)
        if path is None:
            return super().read(client, handle, size, offset)
        with self._requested(client):
            return self._core_files.read(self._in_core(path) or "/", size, offset)

    def read_page(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        if handle in self._paths:
            return self.read(client, handle, size, offset)
        return super().read_page(client, handle, size, offset)

    def is_stream(self, handle: int) -> bool:
        return handle not in self._paths and super().is_stream(handle)

    def set_status_flags(self, handle: int, flags: int) -> None:
        if handle not in self._paths:
            super().set_status_flags(handle, flags)

    def wait(self, handle: int, timeout: float) -> None:
        if handle not in self._paths:
            super().wait(handle, timeout)

    def poll(self, handle: int, notify: Callable[[], None] | None) -> int:
        return ALWAYS_READY if handle in self._paths else super().poll(handle, notify)

    def fsync(self, client: Client, handle: int) -> None:
        """Nothing of it is unwritten."""
        if handle not in self._paths:
            super().fsync(client, handle)

    def ftruncate(self, client: Client, handle: int, size: int) -> None:
        if handle in self._paths:
            raise KernelError(errno.EINVAL, "it is open for reading")
        super().ftruncate(client, handle, size)

    def release(self, handle: int) -> None:
        if self._paths.pop(handle, None) is None:
            super().release(handle)

    # Life

    def chdir(self, client: Client, path: str) -> None:
        """The host has found that the client may."""

    def is_dead(self) -> bool:
        """Whether nothing can be called any more."""
        with self.lock:
            return bool(self._guest.machine.death)

    def close(self) -> None:
        """The mount ends."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self._calls.close()
                self._guest.machine.close()
