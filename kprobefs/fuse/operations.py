"""The FUSE adapter: libfuse's operations over a GuestMount, by fusepy. The only module that imports fuse."""

from __future__ import annotations

import codecs
import ctypes
import errno
import gc
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import lru_cache, partial
from itertools import repeat
from operator import itemgetter
from time import monotonic, sleep, time_ns
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.vfs.core.client import STATUS_FLAGS, Client, DirEntry, Stat
from kprobefs.common.errors import CliError
from kprobefs.common.mountpoints import STATE_LINK, MountState
from kprobefs.fuse.memory_reserve import MemoryReserve
from kprobefs.fuse.session import SessionLoop
from kprobefs.fuse.worker_threads import FREE_LOOPS, WorkerThreads

if TYPE_CHECKING:
    from kprobefs.mount_options import ServedMount

# By its name: fusepy would have ldconfig(8) look for it, which takes longer and isn't there everywhere.
_is_named = "FUSE_LIBRARY_PATH" in os.environ
os.environ.setdefault("FUSE_LIBRARY_PATH", "libfuse.so.2")
try:
    import fuse
except ImportError as error:
    raise CliError("the Python package fusepy is missing: pip install fusepy") from error
except OSError as error:
    raise CliError("libfuse 2 is missing: install it (Debian: libfuse2, Fedora: fuse-libs)") from error
finally:
    if not _is_named:
        del os.environ["FUSE_LIBRARY_PATH"]

_fuse: Any = fuse
_libfuse: Any = _fuse._libfuse

log = logging.getLogger("kprobefs.fuse")

T = TypeVar("T")

WAIT_SLICE = 0.05
"""Seconds between two looks at whether a blocked request was interrupted."""
LOOKS = 500
"""In a second, by all blocked requests: with many, each looks less often. A look is 0.1 ms of the CPU."""
ATTRIBUTES_AGE = 0.01
"""Seconds that fstat(2) may show old attributes; with 0 each open asks for them twice more."""
BLOCK_SIZE = 4096
PAGED_SIZE = 1 << 40
"""Bytes in st_size of files that have pages: the host's kernel ends a splice(2) there, without asking."""
INSTANCES = "/instances/"
CLOSING = 0.05
"""Seconds that a close(2) may be on its way, while the next request is here already."""
NAME_MAX = 255
_MOST = 511
"""The largest errno that FUSE takes: an answer with another one is none, and its client waits for ever."""
_INT_MAX = (1 << 31) - 1
_ENOTSUPP = 524
"""The one beyond that kernels let through to their processes. Mirrors: include/linux/errno.h (v6.1)"""
_SECOND = 1_000_000_000
_KEPT = 500
"""Attributes whose struct stat is kept: most are asked for again as they were."""
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2
STATE_PATH = f"/{STATE_LINK}"
STATE_ATTRIBUTES = Stat(ino=(1 << 32) - 1, mode=stat.S_IFLNK | 0o777, nlink=1, uid=0, gid=0)
PATH_CODEC = "kprobefs_path"
"""Name of a codec: UTF-8, with surrogates for other bytes. fusepy takes a codec's name alone."""


@dataclass(frozen=True)
class FuseOptions:
    """How a mount shows up, and who may use it."""

    source: str
    """First field of its line in /proc/mounts, where tools look for "tracefs" or "debugfs"."""
    subtype: str = "kprobefs"
    allow_other: bool = False
    """Let other users in, as far as modes allow."""
    flags: tuple[str, ...] = ()
    """Further ones that libfuse knows: noexec and its like."""
    is_ordered: bool = False
    """What is asked, and in which order it is answered, doesn't hang on how fast anybody is."""


class Server:
    """One FUSE session over a GuestMount; serve() runs it, stop() ends what blocks in it."""

    def __init__(self, mount: ServedMount, options: FuseOptions) -> None:
        self._options = options
        self._lock = mount.lock
        self._stopping = threading.Event()
        self._operations = _Operations(mount, self._stopping)

    def serve(self, directory: str, ready: Callable[[], None]) -> None:
        """Mount on `directory` and answer requests until it is unmounted.

        `ready` is called when the mount is there; requests wait until it returns. Signal handlers must be
        installed before: libfuse replaces default ones alone. Raises: CliError.
        """
        self._operations.ready = ready
        # entry_timeout 0: a deleted event's directory must be gone for the next lookup.
        # attr_timeout: what a lookup brought serves the permission check right behind it, no more.
        # atomic_o_trunc: what O_TRUNC does, and its errno, belongs to open(2).
        # max_readahead: a page that a splice(2) has read ahead would be missing from the reads that follow.
        options: dict[str, Any] = {
            "direct_io": True,
            "entry_timeout": 0,
            "attr_timeout": 0 if self._options.is_ordered else ATTRIBUTES_AGE,
            "atomic_o_trunc": True,
            "max_readahead": 0,
            "use_ino": True,
            "hard_remove": True,
            "fsname": self._options.source,
            "subtype": self._options.subtype,
            "allow_other": self._options.allow_other,
            **dict.fromkeys(self._options.flags, True),
        }
        # Root alone may enter, and modes keep nothing from it: without checks of its own the kernel asks
        # for an access where a process changes its directory, the one sign of that.
        if os.geteuid() or self._options.allow_other:
            options["default_permissions"] = True
        try:
            _libfuse.fuse_main_real = self._main
            _Session(
                self._operations, directory, raw_fi=True, foreground=True, encoding=PATH_CODEC, **options
            )
        except RuntimeError as error:
            raise CliError(f"{directory}: FUSE refused the mount", is_explained=True) from error

    def _main(self, argc: int, argv: Any, operations: Any, size: int, data: Any) -> int:
        """What libfuse's main does, with loops of ours between set-up and end."""
        mountpoint = ctypes.c_void_p()
        threaded = ctypes.c_int()
        session = _libfuse.fuse_setup(
            argc, argv, operations, size, ctypes.byref(mountpoint), ctypes.byref(threaded), data
        )
        if not session:
            return 1
        # A close comes as a request that nobody waits for: two threads could answer it and the next open
        # in any order.
        free = 1 if self._options.is_ordered else FREE_LOOPS
        ours = self._operations
        read = partial(_guarded, ours, ours.read_at_once)
        release = partial(_guarded, ours, ours.release)
        walks = None if self._options.is_ordered else ours.walks
        loop = SessionLoop(
            _libfuse, _libfuse.fuse_get_session(session), read, release, walks, ours.clients_own
        )
        loops = WorkerThreads(loop.run, free)
        self._operations.blocking = loops.blocking
        if not self._options.is_ordered:
            self._lock.waiting = loops.waiting
        loops.run()
        _libfuse.fuse_teardown(session, mountpoint)
        return 0

    def stop(self) -> None:
        """Let requests that block end with EIO. The caller unmounts."""
        self._stopping.set()

    @property
    def faults(self) -> int:
        """Requests that ended in an internal fault since the start."""
        return self._operations.faults


_ADDRESSES = {
    "getattr": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p),
    "fgetattr": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p),
    "open": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p),
    "release": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    "read": ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        _fuse.c_off_t,
        ctypes.c_void_p,
    ),
}
"""What every open, read and close takes: structures come as addresses, without an object for the pointer."""


class _PollStructure(ctypes.Structure):
    """struct fuse_operations up to its end; fusepy's stops before poll."""

    _fields_ = [
        *((name, _ADDRESSES.get(name, form), *bits) for name, form, *bits in _fuse.fuse_operations._fields_),
        (
            "poll",
            ctypes.CFUNCTYPE(
                ctypes.c_int,
                ctypes.c_char_p,
                ctypes.POINTER(_fuse.fuse_file_info),
                ctypes.c_void_p,
                ctypes.POINTER(ctypes.c_uint),
            ),
        ),
        ("write_buf", ctypes.c_void_p),
        ("read_buf", ctypes.c_void_p),
        ("flock", ctypes.c_void_p),
        ("fallocate", ctypes.c_void_p),
    ]


_fuse.fuse_operations = _PollStructure
_libfuse.fuse_setup.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_size_t, *[ctypes.c_void_p] * 3]
_libfuse.fuse_setup.restype = ctypes.c_void_p
_libfuse.fuse_get_session.argtypes = [ctypes.c_void_p]
_libfuse.fuse_get_session.restype = ctypes.c_void_p
_libfuse.fuse_session_next_chan.argtypes = [ctypes.c_void_p] * 2
_libfuse.fuse_session_next_chan.restype = ctypes.c_void_p
_libfuse.fuse_session_process.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libfuse.fuse_session_process.restype = None
_libfuse.fuse_chan_fd.argtypes = [ctypes.c_void_p]
_libfuse.fuse_chan_bufsize.argtypes = [ctypes.c_void_p]
_libfuse.fuse_chan_bufsize.restype = ctypes.c_size_t
_libfuse.fuse_chan_new.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]
_libfuse.fuse_chan_new.restype = ctypes.c_void_p
_libfuse.fuse_teardown.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_libfuse.fuse_teardown.restype = None
_libfuse.fuse_notify_poll.argtypes = [ctypes.c_void_p]
_libfuse.fuse_pollhandle_destroy.argtypes = [ctypes.c_void_p]
_libfuse.fuse_pollhandle_destroy.restype = None


def _path_codec(name: str) -> codecs.CodecInfo | None:
    if name != PATH_CODEC:
        return None
    return codecs.CodecInfo(
        encode=lambda text, _errors="": codecs.utf_8_encode(text, "surrogateescape"),
        decode=lambda data, _errors="": codecs.utf_8_decode(data, "surrogateescape", True),
        name=PATH_CODEC,
    )


codecs.register(_path_codec)


def _guarded(operations: _Operations, func: Callable[..., T], *args: object) -> T | int:
    """What a request comes to, or -errno; raises nothing."""
    try:
        try:
            if monotonic() >= operations.reserve.next_check:
                operations.reserve.check()
            return func(*args)
        except KernelError as error:
            found = errno.EOPNOTSUPP if error.errno == _ENOTSUPP else error.errno or errno.EIO
            return -found if 0 < found <= _MOST else -errno.EIO
        except MemoryError:
            operations.reserve.give_back()
            return -errno.ENOMEM
        # A SystemExit or KeyboardInterrupt that reached libfuse would become a garbage answer.
        except BaseException as error:
            # A library couldn't be mapped.
            if operations.reserve.is_scarce and isinstance(error, ImportError):
                return -errno.ENOMEM
            operations.faults += 1
            log.exception("internal fault in %s", func.__name__)
    # There may be no memory to say so: ctypes would answer 0, which is success.
    except BaseException:
        pass
    return 0 if func.__name__ == "init" else -errno.EIO


class _Session(_fuse.FUSE):  # type: ignore[misc]  # fusepy has no types
    """fusepy's loop, with a guard that lets no exception into C, and poll."""

    @staticmethod
    def _wrapper(func: Callable[..., int | None], *args: object) -> int:
        operations: _Operations = func.__self__.operations  # type: ignore[attr-defined]
        found = _guarded(operations, func, *args) or 0
        # A guest that is damaged says anything of what it has written.
        return found if -_MOST <= found <= _INT_MAX else -errno.EIO

    # What every open, read and close takes, without fusepy's detours: they cost 2 to 8 us a request.

    def getattr(self, path: bytes, stat: int) -> int:
        """struct fuse_operations.getattr."""
        _copy(stat, _packed(self.operations.getattr(path.decode("utf-8", "surrogateescape"))), _STAT.size)
        return 0

    def fgetattr(self, path: bytes | None, stat: int, file_info: int) -> int:
        """struct fuse_operations.fgetattr."""
        name = path and path.decode("utf-8", "surrogateescape")
        _copy(stat, _packed(self.operations.getattr(name, _file_info(file_info))), _STAT.size)
        return 0

    def open(self, path: bytes, file_info: int) -> int:
        """struct fuse_operations.open."""
        self.operations.open(path.decode("utf-8", "surrogateescape"), _file_info(file_info))
        return 0

    def read(self, _path: int | None, buffer: int, size: int, offset: int, file_info: int) -> int:
        """struct fuse_operations.read."""
        data: bytes = self.operations.read(None, size, offset, _file_info(file_info))
        # libfuse's buffer has no more room.
        if len(data) > size:
            raise ValueError(f"{len(data)} bytes for a read of {size}")
        _copy(buffer, data, len(data))
        return len(data)

    def readdir(self, _path: bytes, buffer: int, filler: Any, offset: int, file_info: Any) -> int:
        """struct fuse_operations.readdir; of the attributes libfuse passes on type and number alone.

        With offsets, so that each getdents64(2) is a request.
        """
        attributes = _fuse.c_stat()
        entries = self.operations.readdir(file_info.contents, offset)
        for number, (name, attributes.st_mode, attributes.st_ino) in enumerate(entries, offset + 1):
            if filler(buffer, name.encode("utf-8", "surrogateescape"), attributes, number):
                break
        return 0

    def release(self, _path: int | None, file_info: int) -> int:
        """struct fuse_operations.release: of an open that nobody waits for any more."""
        self.operations.release(_file_info(file_info).fh)
        return 0

    def poll(self, path: bytes | None, file_info: Any, handle: int | None, mask: Any) -> int:
        """struct fuse_operations.poll; not in fusepy."""
        del path
        mask[0] = self.operations("poll", file_info.contents, handle)
        return 0


class _Pollers:
    """Poll handles of libfuse that wait for their notification, by file handle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[int, int] = {}

    def add(self, file_handle: int, poll_handle: int) -> bool:
        """Take charge of a poll handle; whether this file had none waiting."""
        with self._lock:
            old = self._handles.get(file_handle)
            self._handles[file_handle] = poll_handle
        if old is not None:
            _libfuse.fuse_pollhandle_destroy(old)
        return old is None

    def notify(self, file_handle: int) -> None:
        """Wake who polls the file."""
        self._drop(file_handle, _libfuse.fuse_notify_poll)

    def forget(self, file_handle: int) -> None:
        """The file was closed."""
        if file_handle in self._handles:
            self._drop(file_handle, lambda _handle: None)

    def _drop(self, file_handle: int, action: Callable[[int], object]) -> None:
        with self._lock:
            handle = self._handles.pop(file_handle, None)
        if handle is not None:
            action(handle)
            _libfuse.fuse_pollhandle_destroy(handle)


class _Thread(threading.local):
    """Who asks for attributes next: the client, or within a request that made a file libfuse itself."""

    def __init__(self) -> None:
        self.client: Callable[[], Client] | None = _client


def _not_served() -> NoReturn:
    raise AssertionError("no session serves these operations yet")


class _Operations:
    """What fusepy calls. An operation that isn't here costs one ENOSYS; the kernel asks no more."""

    use_ns = True
    flag_nullpath_ok = 1
    # libfuse locks a path, and all above it, while a request that gets it runs: one that sleeps would keep
    # rmdir(2) waiting, and that all others below.
    flag_nopath = 1
    flag_utime_omit_ok = 1

    def __init__(self, mount: ServedMount, stopping: threading.Event) -> None:
        self._mount = mount
        self._stopping = stopping
        self._pollers = _Pollers()
        self.ready: Callable[[], None] = _not_served
        self.blocking: Callable[[], AbstractContextManager[int]] = _not_served
        """Around what waits: gives the requests another thread."""
        self.faults = 0
        self.reserve = MemoryReserve()
        self._thread = _Thread()
        self._open_paths: dict[int, str] = {}
        self.clients_own = mount.clients_own
        self._status: dict[int, int] = {}
        """STATUS_FLAGS as the mount has them, by handle; of most they are 0, and not here."""

    def __call__(self, operation: str, *arguments: Any) -> Any:
        return getattr(self, operation)(*arguments)

    def init(self, path: str) -> None:
        del path
        self.ready()

    def walks(self) -> None:
        """What is asked for next is a name of a path: who wants its attributes asks for them."""
        self._thread.client = None

    def getattr(self, path: str | None, info: Any = None) -> Stat:
        client = self._thread.client
        if client is None:
            self._thread.client = _client
        try:
            if info is not None and info.fh:
                found = self._mount.fgetattr(info.fh, client)
            else:
                found = self._mount.getattr(_named(path), client)
        except KernelError as error:
            if path == STATE_PATH and error.errno == errno.ENOENT:
                return STATE_ATTRIBUTES
            raise
        # Without blocks cp(1) takes it for a sparse file, whose data it seeks.
        return found._replace(size=PAGED_SIZE, blocks=PAGED_SIZE // 512) if found.is_paged else found

    def opendir(self, path: str) -> int:
        self._needs_reserve()
        try:
            return self._mount.opendir(_client(), path)
        except KernelError as error:
            raise self._seen_again(path, error) from error

    def releasedir(self, _path: str, handle: int) -> None:
        self._mount.release(handle)

    def access(self, path: str, mode: int) -> None:
        """access(2) by root, or chdir(2), which asks for the same."""
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

    def fsync(self, path: str | None, _datasync: int, info: Any) -> None:
        del path
        self._mount.fsync(_client(), info.fh)

    def statfs(self, path: str) -> dict[str, int]:
        room = self._mount.statfs(path)
        return {
            "f_bsize": room.block_size,
            "f_frsize": room.block_size,
            "f_blocks": room.blocks,
            "f_bfree": room.free,
            "f_bavail": room.available,
            "f_files": room.files,
            "f_ffree": room.free_files,
            "f_namemax": NAME_MAX,
        }

    def open(self, path: str, info: Any) -> int:
        self._needs_reserve()
        try:
            handle = self._mount.open(_client(), path, info.flags)
        except KernelError as error:
            raise self._seen_again(path, error) from error
        return self._opened(info, path, handle)

    def _seen_again(self, path: str, error: KernelError) -> KernelError:
        """ESTALE for what the guest itself has removed of a client's: the host's kernel looks it up then."""
        if error.errno == errno.ENOENT and path.split("/", 2)[1] in self.clients_own:
            return KernelError(errno.ESTALE, path)
        return error

    def create(self, path: str, mode: int, info: Any) -> int:
        self._needs_memory()
        handle = self._mount.create(_client(), path, mode, info.flags)
        self._thread.client = None
        return self._opened(info, path, handle)

    def read_at_once(
        self, uid: int, gid: int, pid: int, handle: int, offset: int, size: int, owner: int, flags: int
    ) -> bytes | None:
        """A read that needs nothing of libfuse; None if it has to wait."""
        try:
            data = self._read(_known_client(pid, uid, gid), handle, size, offset, owner, flags)
        except WouldBlock:
            return None
        # The host's kernel refuses such an answer, and its client waits for ever.
        if len(data) > size:
            raise ValueError(f"{len(data)} bytes for a read of {size}")
        return data

    def read(self, path: str | None, size: int, offset: int, info: Any) -> bytes:
        """A read that has to wait."""
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
        # The host's page cache has no owner of locks; whoever called read(2) has.
        read = self._mount.read if owner else self._mount.read_page
        return read(client, handle, size, offset)

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

    def release(self, handle: int) -> None:
        """The last descriptor of an open file is gone."""
        self._pollers.forget(handle)
        try:
            self._mount.release(handle)
        finally:
            self._open_paths.pop(handle, None)
            self._status.pop(handle, None)

    def poll(self, info: Any, poll_handle: int | None) -> int:
        handle: int = info.fh
        notify = None
        if poll_handle and self._pollers.add(handle, poll_handle):

            def notify() -> None:
                self._pollers.notify(handle)

        return self._mount.poll(handle, notify)

    def truncate(self, path: str | None, length: int, info: Any = None) -> None:
        if length:
            self._needs_memory()
        if info is None:
            self._mount.truncate(_client(), _named(path), length)
        else:
            self._mount.ftruncate(_client(), info.fh, length)

    def listxattr(self, path: str) -> tuple[str, ...]:
        del path
        return ()

    def mknod(self, path: str, mode: int, _device: int) -> None:
        self._needs_memory()
        self._mount.mknod(_client(), path, mode)
        self._thread.client = None

    def link(self, target: str, source: str) -> None:
        self._needs_memory()
        self._mount.link(_client(), source, target)
        self._thread.client = None

    def mkdir(self, path: str, mode: int) -> None:
        self._needs_memory()
        self._mount.mkdir(_client(), path, mode)
        self._thread.client = None

    def rmdir(self, path: str) -> None:
        is_instance = INSTANCES in path
        if is_instance:
            self._await_closes(f"{path}/")
        self._mount.rmdir(_client(), path)
        if is_instance:
            # Its files refer to each other: five had 40 MB until the next full collection.
            gc.collect()

    def _await_closes(self, prefix: str) -> None:
        """Files that were closed a moment ago are: close(2) doesn't wait until it is told here.

        What stays open keeps its instance, as it does for Linux.
        """
        end = monotonic() + CLOSING
        while any(map(str.startswith, tuple(self._open_paths.values()), repeat(prefix))):
            if monotonic() > end:
                return
            sleep(CLOSING / 50)

    def unlink(self, path: str) -> None:
        self._mount.unlink(_client(), path)

    def rename(self, old: str, new: str) -> None:
        self._needs_memory()
        self._mount.rename(_client(), old, new)

    def symlink(self, target: str, source: str) -> None:
        self._needs_memory()
        self._mount.symlink(_client(), target, source)
        self._thread.client = None

    def readlink(self, path: str) -> str:
        if path == STATE_PATH:
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
        self._mount.utimens(_client(), path, *map(_time_set, times))

    def _needs_memory(self, data: bytes = b"more") -> None:
        """Raises: KernelError ENOMEM (there is none for what isn't an end of something)."""
        if not self.reserve.allows(data):
            raise KernelError(errno.ENOMEM, "the host has no memory")

    def _needs_reserve(self) -> None:
        """Raises: KernelError ENOMEM (closing files is all that can be done)."""
        if self.reserve.is_spent:
            raise KernelError(errno.ENOMEM, "the host has no memory, and the reserve is held by others")

    def _opened(self, info: Any, path: str, handle: int) -> int:
        info.fh = handle
        self._open_paths[handle] = path
        if status := info.flags & STATUS_FLAGS:
            self._status[handle] = status
        info.nonseekable = self._mount.is_stream(handle)
        return 0

    def _blocking(self, client: Client, info: Any, operation: Callable[[], T]) -> T:
        """Wait until it can be done, and do it. Raises: KernelError EAGAIN, EINTR, EIO (the mount ends).

        The flags are those of the request: fcntl(F_SETFL) after open counts.
        """
        if info.flags & os.O_NONBLOCK:
            self._give_up(client, info, errno.EAGAIN)
        while not self._stopping.is_set():
            try:
                with self.blocking() as blocked:
                    self._mount.wait(info.fh, max(WAIT_SLICE, blocked / LOOKS))
            except KernelError as error:
                self._give_up(client, info, error.errno or errno.EIO)
            if _libfuse.fuse_interrupted():
                self._give_up(client, info, errno.EINTR)
            with suppress(WouldBlock):
                return operation()
        raise KernelError(errno.EIO, "the mount ends")

    def _give_up(self, client: Client, info: Any, error: int) -> NoReturn:
        self._mount.give_up(client, info.fh, error)
        raise KernelError(error)


class _FuseContext(ctypes.Structure):
    """struct fuse_context up to its end; fusepy's stops before umask."""

    _fields_ = [
        ("fuse", ctypes.c_void_p),
        ("uid", ctypes.c_uint),
        ("gid", ctypes.c_uint),
        ("pid", ctypes.c_int),
        ("private_data", ctypes.c_void_p),
        ("umask", ctypes.c_uint),
    ]


# Calls that take no time keep the interpreter's lock: who gave it up would wait for it behind other requests.
_get_context = ctypes.PyDLL(_libfuse._name).fuse_get_context
_get_context.restype = ctypes.c_void_p
_copy = ctypes.PyDLL(None).memmove
_copy.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
_copy.restype = None
_file_info = _fuse.fuse_file_info.from_address
_known_client = lru_cache(_KEPT)(Client)


_this_thread = threading.local()


def _client() -> Client:
    """Who asks; libfuse says it in the same place for all requests that a thread answers."""
    try:
        context = _this_thread.context
    except AttributeError:
        context = _this_thread.context = _FuseContext.from_address(_get_context())
    return _known_client(context.pid, context.uid, context.gid, context.umask)


def _time_set(value: int) -> int | None:
    """A time of utimensat(2) in nanoseconds; libfuse passes its two special values with zero seconds."""
    if value == UTIME_NOW:
        return time_ns()
    return None if value == UTIME_OMIT else value


def _named(path: str | None) -> str:
    if path is None:
        raise KernelError(errno.ENOENT, "the file has no name any more")
    return path


_MEMBERS = "ino", "mode", "nlink", "uid", "gid", "size", "blocks", "rdev", "blksize"
_FORMS = {2: "H", 4: "I", 8: "Q"}
_WORD = (1 << 64) - 1


def _stat_layout() -> tuple[struct.Struct, Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """struct stat as fusepy has it for this machine, and what brings values into its order."""
    whole = _fuse.c_stat
    found = [
        (member.offset, _FORMS[member.size]) for name in _MEMBERS if (member := getattr(whole, f"st_{name}"))
    ]
    for time in (whole.st_atimespec, whole.st_mtimespec, whole.st_ctimespec):
        half = time.size // 2
        found += [(time.offset, _FORMS[half]), (time.offset + half, _FORMS[half])]
    form = "="
    end = 0
    for at, code in sorted(found):
        form += f"{at - end}x{code}"
        end = at + struct.calcsize(f"={code}")
    form += f"{ctypes.sizeof(whole) - end}x"
    return struct.Struct(form), itemgetter(*(found.index(each) for each in sorted(found)))


_STAT, _in_order = _stat_layout()


@lru_cache(_KEPT)
def _packed(found: Stat) -> bytes:
    """A struct stat."""
    ino, mode, nlink, uid, gid, size, atime, mtime, ctime, blocks, rdev, _ = found
    # A guest that is damaged says anything.
    times = map(_WORD.__and__, (*divmod(atime, _SECOND), *divmod(mtime, _SECOND), *divmod(ctime, _SECOND)))
    sizes = size & _WORD, blocks & _WORD
    return _STAT.pack(*_in_order((ino & _WORD, mode, nlink, uid, gid, *sizes, rdev, BLOCK_SIZE, *times)))
