"""Replacements for parts of fusepy and libfuse 2, with the reasons.

Further replacements are in reply_channels.py and session_loop.py. The docstring of a replacement names the
replaced code ("Replaces:"). It also names the effect that needs the replacement ("Needed for:", with its
test), or the time that the replacement saves. The measurements are in docs/reports/2026-11-28-fuse.md, and
benchmarks/fuse_replacements.py repeats them.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from time import monotonic
from typing import Any, TypeVar

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Stat
from kprobefs.common.errors import CliError
from kprobefs.fuse.protocol import (
    BLOCK_SIZE,
    MAX_ERRNO,
)

# With a name given, fusepy does not run ldconfig(8), which takes longer and is not installed everywhere.
_is_named = "FUSE_LIBRARY_PATH" in os.environ
os.environ.setdefault("FUSE_LIBRARY_PATH", "libfuse.so.2")
try:
    import fuse
except ImportError as error:
    raise CliError("fusepy: Python package missing; run pip install fusepy") from error
except OSError as error:
    raise CliError("libfuse 2: missing; install it (Debian: libfuse2, Fedora: fuse-libs)") from error
finally:
    if not _is_named:
        del os.environ["FUSE_LIBRARY_PATH"]

_fuse: Any = fuse
library: Any = _fuse._libfuse
"""The C library libfuse 2. The functions that are used here have their result and argument types set."""

log = logging.getLogger("kprobefs.fuse")

T = TypeVar("T")

PATH_CODEC = "kprobefs_path"
"""Name of the codec that register_path_codec() registers."""
CACHED_ATTRIBUTES = 500
"""Maximum number of results of stat_bytes() that are cached."""
REQUEST_SIZE = 128 << 10
"""Maximum number of bytes that one request reads or writes. libfuse 2 sets this limit for writes."""

INT_MAX = (1 << 31) - 1
"""Largest number of bytes that libfuse can report for a request."""
_ENOTSUPP = 524
"""The errno ENOTSUPP, which kernels return although it is above MAX_ERRNO. Clients get EOPNOTSUPP.

Mirrors: include/linux/errno.h (v6.1).
"""
_SECOND = 1_000_000_000

_POINTER = ctypes.c_void_p
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "fuse_setup": (_POINTER, [ctypes.c_int, _POINTER, _POINTER, ctypes.c_size_t, *[_POINTER] * 3]),
    "fuse_get_session": (_POINTER, [_POINTER]),
    "fuse_session_next_chan": (_POINTER, [_POINTER, _POINTER]),
    "fuse_session_process": (None, [_POINTER, _POINTER, ctypes.c_size_t, _POINTER]),
    "fuse_chan_fd": (ctypes.c_int, [_POINTER]),
    "fuse_chan_bufsize": (ctypes.c_size_t, [_POINTER]),
    "fuse_chan_new": (_POINTER, [_POINTER, ctypes.c_int, ctypes.c_size_t, _POINTER]),
    "fuse_teardown": (None, [_POINTER, _POINTER]),
    "fuse_notify_poll": (ctypes.c_int, [_POINTER]),
    "fuse_pollhandle_destroy": (None, [_POINTER]),
    "fuse_interrupted": (ctypes.c_int, []),
}
for _name, (_result, _arguments) in _PROTOTYPES.items():
    _function = getattr(library, _name)
    _function.restype = _result
    _function.argtypes = _arguments


class FuseContext(ctypes.Structure):
    """Layout of struct fuse_context, which describes the client of the request that a thread answers.

    Replaces: fusepy's fuse_context, which ends before `umask`.
    Needed for: the modes of files that a client makes in the guest while something is probed
    (test_client_calls.py:test_the_umask_of_a_client).
    """

    _fields_ = [
        ("fuse", ctypes.c_void_p),
        ("uid", ctypes.c_uint),
        ("gid", ctypes.c_uint),
        ("pid", ctypes.c_int),
        ("private_data", ctypes.c_void_p),
        ("umask", ctypes.c_uint),
    ]


library.fuse_get_context.restype = ctypes.POINTER(FuseContext)


def context() -> FuseContext:
    """Return the context of the request that this thread answers."""
    found: FuseContext = library.fuse_get_context().contents
    return found


class _Served(threading.local):
    opcode = 0
    """Opcode of the request; 0 before the first request."""


served = _Served()
"""The request that the calling thread serves."""


def is_interrupted() -> bool:
    """Return True if the client of the request that this thread answers has received a signal."""
    return bool(library.fuse_interrupted())


_BY_ADDRESS = {
    "getattr": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p),
    "fgetattr": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p),
    "open": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p),
}
"""Name of an operation -> its C prototype, with pointers to structures as plain numbers.

ctypes then creates no objects for them.
"""


class FuseOperations(ctypes.Structure):
    """Layout of the complete struct fuse_operations.

    Replaces: fusepy's fuse_operations, which ends before `poll`.
    Needed for: poll(2) on trace_pipe (test_pipe.py:test_readiness).
    _BY_ADDRESS saves 2 to 3 % of the time of an open, read and close by path, and of a stat(2).
    """

    _fields_ = [
        *((name, _BY_ADDRESS.get(name, form), *bits) for name, form, *bits in _fuse.fuse_operations._fields_),
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


def register_path_codec() -> None:
    """Register PATH_CODEC: UTF-8, with a surrogate for each byte that is not UTF-8.

    Replaces: fusepy's strict decoding of paths. fusepy takes only the name of a codec.
    Needed for: names that are not UTF-8 (test_session_loop.py:test_a_name_that_is_not_utf_8).
    """
    codecs.register(lambda name: _PATH_CODEC if name == PATH_CODEC else None)


_PATH_CODEC = codecs.CodecInfo(
    encode=lambda text, _errors="": codecs.utf_8_encode(text, "surrogateescape"),
    decode=lambda data, _errors="": codecs.utf_8_decode(data, "surrogateescape", True),
    name=PATH_CODEC,
)


@lru_cache(CACHED_ATTRIBUTES)
def stat_bytes(attributes: Stat) -> bytes:
    """Return attributes as the bytes of a struct stat.

    ctypes truncates numbers that do not fit, which a damaged guest may return.

    Replaces: fusepy's set_st_attrs(), which sets the members of libfuse's structure by name at each request.
    This saves a fifth of the time of an open, read and close by path, and more than a quarter of the time of
    a stat(2). A quarter of the saving is due to the cache: most attributes are requested again unchanged.
    """
    found = _fuse.c_stat()
    found.st_ino = attributes.ino
    found.st_mode = attributes.mode
    found.st_nlink = attributes.nlink
    found.st_uid = attributes.uid
    found.st_gid = attributes.gid
    found.st_size = attributes.size
    found.st_blocks = attributes.blocks
    found.st_rdev = attributes.rdev
    found.st_blksize = BLOCK_SIZE
    for member, time in (
        (found.st_atimespec, attributes.atime_ns),
        (found.st_mtimespec, attributes.mtime_ns),
        (found.st_ctimespec, attributes.ctime_ns),
    ):
        member.tv_sec, member.tv_nsec = divmod(time, _SECOND)
    return bytes(found)


def guarded(operations: Any, func: Callable[..., T], *args: object) -> T | int:
    """Call `func`, and return its result, or -errno if it raises. Raises nothing.

    `operations.faults` counts the exceptions other than KernelError. `operations.reserve` is the
    MemoryReserve.

    Replaces: FUSE._wrapper, which answers an unexpected exception with EINVAL, and passes on any errno. It
    also lets SystemExit reach libfuse, which then sends a garbage reply.
    Needed for: EIO for internal faults (test_session_loop.py:test_reads_and_closes); a smaller errno in place
    of one above MAX_ERRNO, with which the client would hang (test_an_errno_of_the_kernels_own_is_an_answer);
    and ENOMEM if the host has no memory (test_operations.py:test_no_memory_is_an_answer_and_no_fault).
    """
    try:
        try:
            if monotonic() >= operations.reserve.next_check:
                operations.reserve.check()
            return func(*args)
        except KernelError as error:
            found = errno.EOPNOTSUPP if error.errno == _ENOTSUPP else error.errno or errno.EIO
            return -found if 0 < found <= MAX_ERRNO else -errno.EIO
        except MemoryError:
            operations.reserve.give_back()
            return -errno.ENOMEM
        # Hazard: if a SystemExit or KeyboardInterrupt reached libfuse, it would send a garbage reply.
        except BaseException as error:
            # For lack of memory, a shared library could not be mapped.
            if operations.reserve.is_scarce and isinstance(error, ImportError):
                return -errno.ENOMEM
            operations.faults += 1
            log.exception("internal fault in %s", func.__name__)
    # Hazard: logging may have failed for lack of memory. ctypes would then return 0, which is success.
    except BaseException:
        pass
    return 0 if func.__name__ == "init" else -errno.EIO


class Session(_fuse.FUSE):  # type: ignore[misc]  # fusepy has no types
    """A mounted FUSE session: fusepy's FUSE with faster operations, and with operations that fusepy lacks."""

    def __init__(
        self, operations: Any, directory: str, options: dict[str, Any], serve: Callable[[int], None]
    ) -> None:
        """Mount on `directory`, call `serve` with the address of a struct fuse_session, and unmount.

        `operations` answers the requests. `options` are the mount options of libfuse.

        Raises: RuntimeError (libfuse refused the mount).
        """
        register_path_codec()
        _fuse.fuse_operations = FuseOperations
        library.fuse_main_real = partial(fuse_main, serve)
        super().__init__(operations, directory, raw_fi=True, foreground=True, encoding=PATH_CODEC, **options)

    @staticmethod
    def _wrapper(func: Callable[..., int | None], *args: object) -> int:
        """Call an operation by guarded(); return libfuse's result: a number of bytes, 0 or -errno."""
        found = guarded(func.__self__.operations, func, *args) or 0  # type: ignore[attr-defined]
        # A damaged guest may return any number as the count of bytes that it wrote.
        return found if -MAX_ERRNO <= found <= INT_MAX else -errno.EIO

    def getattr(self, path: bytes, stat: int) -> int:
        """Write a file's attributes to the struct stat at the address `stat`, and return 0.

        Replaces: FUSE.getattr, which takes more time; see stat_bytes().
        """
        data = stat_bytes(self.operations.getattr(path.decode("utf-8", "surrogateescape")))
        ctypes.memmove(stat, data, len(data))
        return 0

    def fgetattr(self, path: bytes | None, stat: int, file_info: int) -> int:
        """Write an open file's attributes to the struct stat at the address `stat`, and return 0.

        Replaces: FUSE.fgetattr, which takes more time; see stat_bytes().
        """
        name = path and path.decode("utf-8", "surrogateescape")
        info = _fuse.fuse_file_info.from_address(file_info)
        data = stat_bytes(self.operations.getattr(name, info))
        ctypes.memmove(stat, data, len(data))
        return 0

    def open(self, path: bytes, file_info: int) -> int:
        """Open a file, store its handle in the struct fuse_file_info at `file_info`, and return 0.

        Replaces: FUSE.open, which decodes the path by PATH_CODEC and finds the operation by its name. This
        saves 2 to 3 % of the time of an open, read and close.
        """
        info = _fuse.fuse_file_info.from_address(file_info)
        self.operations.open(path.decode("utf-8", "surrogateescape"), info)
        return 0

    def readdir(self, _path: bytes, buffer: int, filler: Any, offset: int, file_info: Any) -> int:
        """Pass a directory's entries, from index `offset` on, to libfuse's function `filler`; return 0.

        libfuse uses only the type and the inode number of an entry.
        Replaces: FUSE.readdir, which lists the whole directory and ignores `offset`.
        Needed for: one request for each getdents64(2) (test_client_calls.py:test_listing).
        The use of one struct stat for all entries saves more than half of a listing's time.
        """
        attributes = _fuse.c_stat()
        entries = self.operations.readdir(file_info.contents, offset)
        for number, (name, attributes.st_mode, attributes.st_ino) in enumerate(entries, offset + 1):
            if filler(buffer, name.encode("utf-8", "surrogateescape"), attributes, number):
                break
        return 0

    def poll(self, path: bytes | None, file_info: Any, handle: int | None, mask: Any) -> int:
        """Set the mask to the events for which an open file is ready, and return 0.

        `mask`: pointer to the mask of poll(2) events. `handle`: libfuse's poll handle, which is kept to
        notify the client later; None: the client wants no notification.
        """
        del path
        mask[0] = self.operations.poll(file_info.contents, handle)
        return 0


class PollHandles:
    """Keeps the poll handles of libfuse (struct fuse_pollhandle) that wait for notifications, by file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, file_handle: int, poll_handle: int) -> bool:
        """Keep `poll_handle` for the open file `file_handle`, in place of an earlier poll handle.

        Return True if there was no earlier one.
        """
        with self._lock:
            old = self._handles.get(file_handle)
            self._handles[file_handle] = poll_handle
        if old is not None:
            library.fuse_pollhandle_destroy(old)
        return old is None

    def notify(self, file_handle: int) -> None:
        """Wake the clients that poll the open file with the handle `file_handle`."""
        self._drop(file_handle, library.fuse_notify_poll)

    def forget(self, file_handle: int) -> None:
        """Drop the poll handle of a closed file, whose handle was `file_handle`."""
        if file_handle in self._handles:
            self._drop(file_handle, lambda _handle: None)

    def _drop(self, file_handle: int, action: Callable[[int], object]) -> None:
        with self._lock:
            handle = self._handles.pop(file_handle, None)
        if handle is not None:
            action(handle)
            library.fuse_pollhandle_destroy(handle)


def fuse_main(
    serve: Callable[[int], None], argc: int, argv: Any, operations: Any, size: int, data: Any
) -> int:
    """Set up a session, call `serve` with the address of its struct fuse_session, and tear it down.

    Return 0, or 1 if libfuse refused the mount.

    Replaces: fuse_main_real(), which runs its loop in a pool of libfuse's threads.
    Requests then take less time, because WorkerThreads starts and ends fewer threads than libfuse's pool.
    """
    mountpoint = ctypes.c_void_p()
    threaded = ctypes.c_int()
    handle = library.fuse_setup(
        argc, argv, operations, size, ctypes.byref(mountpoint), ctypes.byref(threaded), data
    )
    if not handle:
        return 1
    serve(library.fuse_get_session(handle))
    library.fuse_teardown(handle, mountpoint)
    return 0
