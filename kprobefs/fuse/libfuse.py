"""Replacements for parts of fusepy and libfuse 2, with the reasons.

The docstring of a replacement names the replaced code ("Replaces:"). It also names the effect that needs the
replacement ("Needed for:", with its test), or the time that the replacement saves ("Gains:"). The
measurements are in docs/reports/2026-11-28-fuse.md, and benchmarks/fuse_replacements.py repeats them.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache, partial
from time import monotonic, sleep
from typing import Any, TypeVar

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.vfs.core.client import Stat
from kprobefs.common.errors import CliError
from kprobefs.fuse.known_nodes import BLOCK_SIZE, KnownNodes, attr_bytes
from kprobefs.fuse.own_paths import CHANGES, OwnPaths
from kprobefs.fuse.protocol import (
    ATTR_OUT,
    ATTR_REPLY_SIZE,
    ATTR_VALIDITIES,
    ENTRY_NODE,
    ENTRY_REPLY_SIZE,
    ENTRY_VALID,
    ENTRY_VALIDITIES,
    FIRST_WORD,
    FOPEN_DIRECT_IO,
    FOPEN_NONSEEKABLE,
    FORGET_IN,
    FORGET_ONE,
    FORGET_ONE_OFFSET,
    FUSE_BATCH_FORGET,
    FUSE_FORGET,
    FUSE_GETATTR,
    FUSE_INIT,
    FUSE_LINK,
    FUSE_LOOKUP,
    FUSE_MAX_PAGES,
    FUSE_NOTIFY_INVAL_INODE,
    FUSE_OPEN,
    FUSE_READ,
    FUSE_RELEASE,
    FUSE_RENAME,
    FUSE_RENAME2,
    FUSE_RMDIR,
    FUSE_ROOT_ID,
    FUSE_SETATTR,
    FUSE_WRITE,
    GETATTR_IN,
    HANDLE_FLAGS,
    IN_HEADER,
    INIT_IN,
    INIT_OUT_FLAGS,
    INIT_OUT_FLAGS_OFFSET,
    INIT_OUT_MAX_PAGES,
    INIT_OUT_MAX_PAGES_OFFSET,
    INIT_REPLY_SIZE,
    INVALIDATION,
    LINK_IN,
    MAX_ERRNO,
    OPCODE,
    OPCODE_OFFSET,
    OPEN_OUT,
    OUT_HEADER,
    READ_IN,
    RELEASE_IN,
    UNIQUE,
    WRITE_IN,
    WRITE_OUT,
)
from kprobefs.fuse.worker_threads import FAILED

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
_libfuse: Any = _fuse._libfuse

log = logging.getLogger("kprobefs.fuse")

T = TypeVar("T")

PATH_CODEC = "kprobefs_path"
"""Name of the codec that register_path_codec() registers."""
CACHED_ATTRIBUTES = 500
"""Maximum number of results of stat_bytes() that are cached."""
VALIDITY = 3600
"""Seconds for which the host's kernel may keep the name of a directory that exists as long as the mount."""
RENAME_WINDOW = 1.0
"""Seconds after a rename(2) during which the host's kernel may still request the replaced file."""
REQUEST_SIZE = 128 << 10
"""Maximum number of bytes that one request reads or writes. libfuse 2 sets this limit for writes."""
MAX_PAGES = 33
"""Maximum number of pages of a client's buffer in one request: REQUEST_SIZE bytes with any alignment."""
RELEASE_PAUSE = 0.0001
"""Seconds between two checks whether another thread has replied to its RELEASE request."""
RETRY_DELAY = 0.01
"""Seconds between two attempts to send a reply, if the first attempt failed for lack of memory."""

_INT_MAX = (1 << 31) - 1
_ENOTSUPP = 524
"""The errno ENOTSUPP, which is above MAX_ERRNO, but which kernels return to processes.

Mirrors: include/linux/errno.h (v6.1)
"""
_SECOND = 1_000_000_000
_INTERRUPTED = (errno.EINTR, errno.EAGAIN, errno.ENOENT)
"""Errnos of a failed read of /dev/fuse after which the thread reads the next request."""
_NO_MEMORY = struct.pack("=Ii", OUT_HEADER.size, -errno.ENOMEM)
"""First bytes of a reply with the error ENOMEM, up to the field `unique`, which is not included."""
_DONE = b"done"
"""Result of a function that has already sent the reply to its request."""
_NAME_LASTS = struct.pack("=Q", VALIDITY)
_NAME_LASTS_ATTRIBUTES_DO_NOT = struct.pack("=QQII", VALIDITY, 0, 0, 0)

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
    _function = getattr(_libfuse, _name)
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


_libfuse.fuse_get_context.restype = ctypes.POINTER(FuseContext)


def context() -> FuseContext:
    """Return the context of the request that this thread answers."""
    found: FuseContext = _libfuse.fuse_get_context().contents
    return found


class _Served(threading.local):
    pid = 0


_served = _Served()


def served_pid() -> int:
    """Return the pid of the process whose request the calling thread serves; 0 before the first request."""
    return _served.pid


def is_interrupted() -> bool:
    """Return True if the client of the request that this thread answers has received a signal."""
    return bool(_libfuse.fuse_interrupted())


_BY_ADDRESS = {
    "getattr": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p),
    "fgetattr": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p),
    "open": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p),
}
"""Operation -> prototype with addresses in place of pointers, for which ctypes creates no objects."""


class FuseOperations(ctypes.Structure):
    """Layout of the complete struct fuse_operations.

    Replaces: fusepy's fuse_operations, which ends before `poll`.
    Needed for: poll(2) on trace_pipe (test_pipe.py:test_readiness).
    Gains: _BY_ADDRESS saves 2 to 3 % of the time of an open, read and close by path, and of a stat(2).
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
    Gains: a fifth of the time of an open, read and close by path, and more than a quarter of the time of a
    stat(2). A quarter of the gain is due to the cache: most attributes are requested again unchanged.
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
    Needed for: EIO for internal faults (test_session_loop.py:test_reads_and_closes); a reply for an errno
    above MAX_ERRNO, after which the client would hang (test_an_errno_of_the_kernels_own_is_an_answer); and
    ENOMEM if the host has no memory (test_operations.py:test_no_memory_is_an_answer_and_no_fault).
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
        _libfuse.fuse_main_real = partial(fuse_main, serve)
        super().__init__(operations, directory, raw_fi=True, foreground=True, encoding=PATH_CODEC, **options)

    @staticmethod
    def _wrapper(func: Callable[..., int | None], *args: object) -> int:
        """Call an operation by guarded(), and return a number of bytes, 0 or -errno for libfuse."""
        found = guarded(func.__self__.operations, func, *args) or 0  # type: ignore[attr-defined]
        # A damaged guest may return any number as the count of bytes that it wrote.
        return found if -MAX_ERRNO <= found <= _INT_MAX else -errno.EIO

    def getattr(self, path: bytes, stat: int) -> int:
        """Write a file's attributes to the struct stat at the address `stat`.

        Replaces: FUSE.getattr. Gains: see stat_bytes().
        """
        data = stat_bytes(self.operations.getattr(path.decode("utf-8", "surrogateescape")))
        ctypes.memmove(stat, data, len(data))
        return 0

    def fgetattr(self, path: bytes | None, stat: int, file_info: int) -> int:
        """Write an open file's attributes to the struct stat at the address `stat`.

        Replaces: FUSE.fgetattr. Gains: see stat_bytes().
        """
        name = path and path.decode("utf-8", "surrogateescape")
        info = _fuse.fuse_file_info.from_address(file_info)
        data = stat_bytes(self.operations.getattr(name, info))
        ctypes.memmove(stat, data, len(data))
        return 0

    def open(self, path: bytes, file_info: int) -> int:
        """Open a file, and store its handle in the struct fuse_file_info at the address `file_info`.

        Replaces: FUSE.open, which decodes the path by PATH_CODEC and finds the operation by its name.
        Gains: 2 to 3 % of the time of an open, read and close.
        """
        info = _fuse.fuse_file_info.from_address(file_info)
        self.operations.open(path.decode("utf-8", "surrogateescape"), info)
        return 0

    def readdir(self, _path: bytes, buffer: int, filler: Any, offset: int, file_info: Any) -> int:
        """List a directory from the entry with index `offset` on. libfuse uses only type and inode number.

        Replaces: FUSE.readdir, which lists the whole directory and ignores `offset`.
        Needed for: one request for each getdents64(2) (test_client_calls.py:test_listing).
        Gains: more than half of a listing's time, by one struct stat for all entries.
        """
        attributes = _fuse.c_stat()
        entries = self.operations.readdir(file_info.contents, offset)
        for number, (name, attributes.st_mode, attributes.st_ino) in enumerate(entries, offset + 1):
            if filler(buffer, name.encode("utf-8", "surrogateescape"), attributes, number):
                break
        return 0

    def poll(self, path: bytes | None, file_info: Any, handle: int | None, mask: Any) -> int:
        """Set the poll mask of an open file, and keep the poll handle to notify the client later."""
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
        """Keep `poll_handle` for the open file `file_handle`.

        Return True if the file had no other poll handle.
        """
        with self._lock:
            old = self._handles.get(file_handle)
            self._handles[file_handle] = poll_handle
        if old is not None:
            _libfuse.fuse_pollhandle_destroy(old)
        return old is None

    def notify(self, file_handle: int) -> None:
        """Wake the clients that poll the open file with the handle `file_handle`."""
        self._drop(file_handle, _libfuse.fuse_notify_poll)

    def forget(self, file_handle: int) -> None:
        """Drop the poll handle of a closed file, whose handle was `file_handle`."""
        if file_handle in self._handles:
            self._drop(file_handle, lambda _handle: None)

    def _drop(self, file_handle: int, action: Callable[[int], object]) -> None:
        with self._lock:
            handle = self._handles.pop(file_handle, None)
        if handle is not None:
            action(handle)
            _libfuse.fuse_pollhandle_destroy(handle)


def fuse_main(
    serve: Callable[[int], None], argc: int, argv: Any, operations: Any, size: int, data: Any
) -> int:
    """Set up a session, call `serve` with the address of its struct fuse_session, and tear it down.

    Return 0, or 1 if libfuse refused the mount.

    Replaces: fuse_main_real(), which runs its loop in a pool of libfuse's threads.
    Gains: requests take less time, because WorkerThreads starts and ends fewer threads than libfuse's pool.
    """
    mountpoint = ctypes.c_void_p()
    threaded = ctypes.c_int()
    handle = _libfuse.fuse_setup(
        argc, argv, operations, size, ctypes.byref(mountpoint), ctypes.byref(threaded), data
    )
    if not handle:
        return 1
    serve(_libfuse.fuse_get_session(handle))
    _libfuse.fuse_teardown(handle, mountpoint)
    return 0


class _Iovec(ctypes.Structure):
    """Layout of struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


_SEND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Iovec), ctypes.c_size_t)


class _ChannelOperations(ctypes.Structure):
    """Layout of struct fuse_chan_ops."""

    _fields_ = [("receive", ctypes.c_void_p), ("send", _SEND), ("destroy", ctypes.c_void_p)]


class ReplyChannels:
    """The channels to the host's kernel that libfuse gets with each request; some change libfuse's reply.

    The host's kernel looks up each directory of a path, except names with a validity. libfuse has one
    validity for all names. It is 0 here, because the directory of a deleted event has to be gone at once.
    These channels give a validity to two kinds of names. One kind is the directories `lasting` in the root,
    which exist as long as the mount. The other kind is all names below the directories `clients_own`, in
    which only clients change names; these directories also exist as long as the mount. A file with several
    links has a node for each name, and the host's kernel does not know that they change together. Therefore
    such names get no validity, and their attributes are requested at each stat(2).

    The host's kernel also gets a larger limit of pages. By default, it splits a read or write of 128 KiB
    whose buffer is not aligned, and the guest makes two calls.

    Replaces: libfuse's replies to INIT, LOOKUP and GETATTR, and its ENOENT after a rename(2).
    Gains: `lasting` saves a ninth of the time of an open, read and close, and a sixth of that of a stat(2).
    `clients_own` saves a quarter of the time of an open, read and close in scratch/.
    Needed for: the new file instead of ENOENT if rename(2) replaces a file that another client looks up
    (test_session_loop.py:test_who_asks_for_what_is_replaced_gets_the_new_file).
    """

    def __init__(
        self,
        session: int,
        walks: Callable[[], None] | None = None,
        lasting: Collection[str] = (),
        clients_own: Collection[str] = (),
        nodes: KnownNodes | None = None,
    ) -> None:
        """Make the channels of `session`, which is the address of a struct fuse_session.

        If `walks` is None, only the reply to INIT is changed. Otherwise, `walks` is called before libfuse
        looks up one of `lasting`. `walks` must record that libfuse, and no client, requests the next
        attributes. `lasting` and `clients_own` have names of directories in the root; see the class.
        `nodes` records the nodes of control files. If `nodes` is None, no node is recorded.
        """
        self.channel: int = _libfuse.fuse_session_next_chan(session, None)
        """The channel of the session itself, which sends replies unchanged."""
        self.device: int = _libfuse.fuse_chan_fd(self.channel)
        self.request_size: int = _libfuse.fuse_chan_bufsize(self.channel)
        """Maximum size of a request in bytes."""
        self._walks = walks
        self._nodes = nodes
        if nodes is not None:
            nodes.device = self.device
        self._looked_up = threading.local()
        """Arguments of KnownNodes.learn() while libfuse looks up a control file in this thread."""
        self._lasting = frozenset(name.encode() + b"\0" for name in lasting)
        self._lasting_nodes: set[int] = set()
        self._clients_own = frozenset(name.encode() + b"\0" for name in clients_own)
        self._own_nodes: set[int] = set()
        """Node ids of the directories `clients_own` and of the directories below them."""
        self.own_paths = OwnPaths()
        """Paths of the directories in `_own_nodes`, and of files in them."""
        self._linked_nodes: set[int] = set()
        """Node ids of files to which clients have made further links."""
        self._rename_window_end = 0.0
        """Monotonic time until which a request may be for a file that a rename(2) has replaced."""
        self._callbacks: list[_ChannelOperations] = []
        """C callbacks of the other channels.

        The list keeps these objects alive as long as libfuse may call them.
        """
        self._for_lasting = self._changed_by(self._let_directory_last)
        self._for_own = self._changed_by(self._let_name_last)
        self._for_replaced = self._changed_by(_look_up_again)
        self._for_linked_replaced = self._changed_by(self._end_validity_or_look_up_again)
        self._for_control = self._changed_by(lambda _reply: None)
        self._for_init = self._changed_by(_allow_unaligned)

    def select(self, opcode: int, node: int, request: bytearray, size: int) -> int:
        """Return the channel through which libfuse must reply to a request, and note the request's effects.

        `self.channel` passes a reply on unchanged; most other channels change it. The effects of lookups,
        renames, links and forgotten nodes are noted, because later replies depend on them.
        `node` is the node id in the request, and `size` is the size of the request in bytes.
        """
        if opcode == FUSE_INIT:
            (flags, _) = INIT_IN.unpack_from(request, IN_HEADER.size)
            return self._for_init if flags & FUSE_MAX_PAGES else self.channel
        if self._walks is None:
            return self.channel
        if opcode == FUSE_LOOKUP:
            name = bytes(request[IN_HEADER.size : size])
            if node in self._own_nodes:
                self.own_paths.expect(node, name[:-1])
                return self._for_own
            lasts = node == FUSE_ROOT_ID and name in self._lasting
            is_control = self._expect(node, name[:-1], may_last=not lasts)
            if lasts:
                self._walks()
                if name not in self._clients_own:
                    return self._for_lasting
                self.own_paths.expect(node, name[:-1])
                return self._for_own
            if is_control:
                return self._for_control
        elif opcode in HANDLE_FLAGS:
            has_attributes = opcode in (FUSE_GETATTR, FUSE_SETATTR)
            if has_attributes and (node in self._lasting_nodes or self._was_removed(node)):
                return self._for_lasting
            is_linked = has_attributes and node in self._linked_nodes
            if monotonic() < self._rename_window_end:
                (flags,) = FIRST_WORD.unpack_from(request, IN_HEADER.size)
                # libfuse finds the file of a request without a handle by the node's name.
                if not flags & HANDLE_FLAGS[opcode]:
                    return self._for_linked_replaced if is_linked else self._for_replaced
            if is_linked:
                return self._for_lasting
        elif opcode in (FUSE_RENAME, FUSE_RENAME2):
            self._rename_window_end = monotonic() + RENAME_WINDOW
        elif opcode == FUSE_LINK and node in self._own_nodes:
            self._share(*LINK_IN.unpack_from(request, IN_HEADER.size))
        elif opcode == FUSE_FORGET:
            self._forget(node)
        elif opcode == FUSE_BATCH_FORGET:
            for each, _ in FORGET_ONE.iter_unpack(request[FORGET_ONE_OFFSET:size]):
                self._forget(each)
        return self.channel

    def _expect(self, node: int, name: bytes, *, may_last: bool) -> bool:
        """Return True if a LOOKUP of `name` in the directory with the node id `node` is for a control file.

        If it is, also store the arguments with which _send() passes libfuse's reply to KnownNodes.learn().
        `may_last`: the host's kernel may keep the name for NAME_VALIDITY seconds, if the file system allows
        this.
        """
        nodes = self._nodes
        path = nodes and nodes.path_of(node, name)
        self._looked_up.arguments = None
        if nodes is not None and path is not None:
            self._looked_up.arguments = (node, name, path, nodes.ends, may_last)
        return path is not None

    def _send(self, reply: bytearray) -> None:
        """Send a reply of libfuse to the host's kernel. Raises: OSError (not sent).

        If the reply is for a LOOKUP of a control file, also record the node that the reply contains.
        """
        looked_up = self._looked_up
        arguments = getattr(looked_up, "arguments", None)
        if arguments is None or self._nodes is None:
            os.write(self.device, reply)
        else:
            looked_up.arguments = None
            self._nodes.learn(reply, *arguments)

    def _was_removed(self, node: int) -> bool:
        return self._nodes is not None and node in self._nodes.removed

    def is_lasting(self, node: int) -> bool:
        """Return True if the node id `node` is that of a directory that exists as long as the mount.

        Return False for the directories `clients_own`, although they exist as long as the mount, too.
        """
        return node in self._lasting_nodes

    def _forget(self, node: int) -> None:
        self._lasting_nodes.discard(node)
        self._own_nodes.discard(node)
        self._linked_nodes.discard(node)
        self.own_paths.forget(node)

    def _share(self, node: int) -> None:
        """Record that the node with the id `node` gets another link.

        Invalidate the node's attributes in the host's kernel.
        """
        self._linked_nodes.add(node)
        size = INVALIDATION.size
        # The write fails if the host's kernel has no attributes of the node.
        with suppress(OSError):
            os.write(self.device, INVALIDATION.pack(size, FUSE_NOTIFY_INVAL_INODE, 0, node, -1, 0))

    def _changed_by(self, change: Callable[[bytearray], None]) -> int:
        """Return a new channel that calls `change` with each reply before it sends the reply.

        If there is no memory for the channel, return the session's own channel.
        """

        def send(_channel: int, pieces: Any, count: int) -> int:
            try:
                parts = [ctypes.string_at(pieces[at].base, pieces[at].size) for at in range(count)]
                reply = bytearray(b"".join(parts))
                change(reply)
                self._send(reply)
            except OSError as error:
                # libfuse forgets a lookup whose reply was not sent.
                if len(reply) == ENTRY_REPLY_SIZE:
                    self.own_paths.forget(ENTRY_NODE.unpack(reply)[0])
                return -(error.errno or errno.EIO)
            # Hazard: for an exception that reached libfuse, ctypes would return an arbitrary number.
            except BaseException:
                return -errno.ENOMEM
            return 0

        callbacks = _ChannelOperations(None, _SEND(send), None)
        self._callbacks.append(callbacks)
        made = _libfuse.fuse_chan_new(ctypes.byref(callbacks), self.device, self.request_size, None)
        return made or self.channel

    def _let_directory_last(self, reply: bytearray) -> None:
        """In a reply, give attributes no validity.

        In a reply to LOOKUP, give the name of a directory a validity. Without a validity of the attributes,
        each stat(2) is still a request. Record the directory's node id.
        """
        if len(reply) == ATTR_REPLY_SIZE:
            reply[ATTR_VALIDITIES] = bytes(12)
        elif len(reply) == ENTRY_REPLY_SIZE:
            node, mode, _ = ENTRY_NODE.unpack(reply)
            if stat.S_ISDIR(mode):
                self._lasting_nodes.add(node)
                reply[ENTRY_VALIDITIES] = _NAME_LASTS_ATTRIBUTES_DO_NOT

    def _end_validity_or_look_up_again(self, reply: bytearray) -> None:
        """Give the attributes in a reply to GETATTR no validity, because the file has several links.

        If the reply is ENOENT, change it by _look_up_again().
        """
        self._let_directory_last(reply)
        _look_up_again(reply)

    def _let_name_last(self, reply: bytearray) -> None:
        """Give the name in a reply a validity, because only clients change the name.

        The name of a file with several links gets none. If the reply is for a directory, record the
        directory.
        """
        if len(reply) == ENTRY_REPLY_SIZE:
            node, mode, links = ENTRY_NODE.unpack(reply)
            if stat.S_ISDIR(mode):
                self._own_nodes.add(node)
            elif links > 1:
                return
            self.own_paths.learn(node, mode)
            reply[ENTRY_VALID] = _NAME_LASTS


def _allow_unaligned(reply: bytearray) -> None:
    """In a reply to INIT, allow requests of REQUEST_SIZE bytes whose buffers are not aligned to pages."""
    _, error, unique = OUT_HEADER.unpack_from(reply)
    if error or len(reply) > INIT_REPLY_SIZE:
        return
    reply += bytes(INIT_REPLY_SIZE - len(reply))
    (flags,) = INIT_OUT_FLAGS.unpack_from(reply, INIT_OUT_FLAGS_OFFSET)
    OUT_HEADER.pack_into(reply, 0, INIT_REPLY_SIZE, 0, unique)
    INIT_OUT_FLAGS.pack_into(reply, INIT_OUT_FLAGS_OFFSET, flags | FUSE_MAX_PAGES)
    INIT_OUT_MAX_PAGES.pack_into(reply, INIT_OUT_MAX_PAGES_OFFSET, MAX_PAGES)


def _look_up_again(reply: bytearray) -> None:
    """Change ENOENT in a reply to ESTALE, after which the host's kernel looks the path up once more.

    libfuse answers ENOENT for the node of a file that a rename(2) has replaced, since the node has no name.
    """
    size, error, unique = OUT_HEADER.unpack_from(reply)
    if error == -errno.ENOENT:
        OUT_HEADER.pack_into(reply, 0, size, -errno.ESTALE, unique)


class _LoopState:
    """The request to which a thread of a SessionLoop replies now. Other threads read this state."""

    def __init__(self, request: bytearray) -> None:
        self._request = request
        self._stat = f"/proc/self/task/{threading.get_native_id()}/stat"

    @property
    def _opcode(self) -> int:
        """Opcode of the request, or 0 if the thread has read none since clear()."""
        opcode: int = OPCODE.unpack_from(self._request, OPCODE_OFFSET)[0]
        return opcode

    def clear(self) -> None:
        """Forget the request, because the thread has replied to it."""
        OPCODE.pack_into(self._request, OPCODE_OFFSET, 0)

    @property
    def is_releasing(self) -> bool:
        """Whether the request is a RELEASE."""
        return self._opcode == FUSE_RELEASE

    def may_be_releasing(self) -> bool:
        """Return True if the thread may be answering a RELEASE that left the queue before this call.

        Hazard: the host's kernel takes a request out of the queue before it copies the request to the
        thread's buffer. So a thread whose buffer has no request may still have taken one, unless the thread
        sleeps.
        """
        if not self._opcode and self._is_running():
            return True
        return self.is_releasing

    def _is_running(self) -> bool:
        try:
            with open(self._stat, "rb") as stat_file:
                return stat_file.read().rpartition(b")")[2].split()[:1] != [b"S"]
        # The thread has ended.
        except OSError:
            return False


class AtOnce(NamedTuple):
    """The operations of a mount that SessionLoop calls without libfuse.

    The functions raise nothing. If an operation fails, its function returns -errno.
    """

    read: Callable[[int, int, int, int, int, int, int, int], bytes | int | None]
    """Reads from an open file.

    The arguments are the client's uid, gid and pid, the handle fh, offset and size in bytes, the lock owner,
    and the flags of the request. Returns the data, or -errno if the read fails. If the read has to wait,
    returns None; then SessionLoop passes the request to libfuse, which waits.
    """
    release: Callable[[int], object]
    """Releases the open file with the handle fh."""
    getattr: Callable[[int, int, int, str], Stat | int]
    """Returns the attributes of a control file, given the client's uid, gid and pid, and the path."""
    fgetattr: Callable[[int, int, int, int], Stat | int]
    """Returns the attributes of an open file, given the client's uid, gid and pid, and the handle fh."""
    open: Callable[[int, int, int, str, int], tuple[int, bool] | int]
    """Opens a file, given the client's uid, gid and pid, path and flags.

    Returns (handle fh, whether the file is a stream).
    """
    write: Callable[[int, int, int, int, int, int, memoryview], int | None]
    """Writes to an open file, given the client's uid, gid and pid, fh, offset in bytes, flags and data.

    Returns the number of bytes written, or None if libfuse has to write.
    """
    skip_client: Callable[[], None]
    """Records that libfuse itself, and no client, makes this thread's next request for attributes."""
    validity: int
    """Nanoseconds for which the host's kernel may use the attributes in a reply."""


class SessionLoop:
    """The loop that reads requests from /dev/fuse; several threads may run it.

    The loop itself answers READ, RELEASE, and WRITE of files whose writes read no host files. It also answers
    LOOKUP, GETATTR and OPEN of control files with known nodes, and OPEN of files in `OwnPaths`. It passes all
    other requests to libfuse.

    close(2) returns when its RELEASE is in the queue of /dev/fuse, and no program waits for the reply. So a
    later request could be answered before the close has had its effect. While the close of an open file would
    have an effect, a thread that has read a request waits until other threads have answered earlier RELEASEs.

    Replaces: fuse_session_loop().
    Needed for: ReplyChannels; replies when the host has no free memory, because a client that waits for one
    cannot even be killed (test_session_loop.py:test_who_asks_where_there_is_no_memory_is_answered); the
    effect of a close(2) (test_session_loop.py:test_a_request_after_a_close_sees_its_effect).
    Gains: READ saves a fifth of the time of a small pread(2), and a quarter of the time of one of 128 KiB,
    whose data libfuse would copy again. RELEASE saves 4 % of the time of an open, read and close.
    """

    def __init__(
        self,
        session: int,
        replies: ReplyChannels,
        operations: AtOnce,
        nodes: KnownNodes | None = None,
        acting: Collection[int] = (),
    ) -> None:
        """Make a loop over the struct fuse_session at the address `session`.

        `nodes` has the nodes of control files. If `nodes` is None, libfuse replies to the requests about
        them. `acting` has the handle fh of each open file whose release has an effect that other files
        show. A handle stays in `acting` until the release has returned.
        """
        self._session = session
        self._replies = replies
        self._device = replies.device
        self._read = operations.read
        self._release = operations.release
        self._operations = operations
        self._nodes = nodes
        self._acting = acting
        self._states: list[_LoopState] = []
        self._answers: dict[int, Callable[[KnownNodes, bytearray, int], bytes | int | None]] = {
            FUSE_LOOKUP: self._look_up,
            FUSE_GETATTR: self._get_attributes,
            FUSE_OPEN: self._open,
            FUSE_WRITE: self._write,
            FUSE_FORGET: self._forget,
            FUSE_BATCH_FORGET: self._forget_batch,
            FUSE_RMDIR: self._remove,
            FUSE_INIT: self._initialise,
        }
        """Opcode -> function that tries to reply to a request without libfuse.

        The function returns the data of the reply, or -errno for a reply with an error. It returns _DONE if
        no reply is left to send, and None if libfuse has to reply.
        """

    def run(self) -> int:
        """Answer requests until the mount is gone; return 0.

        Return FAILED if the thread has no memory for its buffer, or cannot read requests.
        """
        try:
            buffer = bytearray(self._replies.request_size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            refusal = _NO_MEMORY, memoryview(buffer)[UNIQUE]
            state = _LoopState(buffer)
            self._states.append(state)
        except MemoryError:
            return FAILED
        try:
            return self._answer(buffer, address, refusal, state)
        finally:
            self._states.remove(state)

    def _answer(
        self, buffer: bytearray, address: int, refusal: tuple[bytes, memoryview], state: _LoopState
    ) -> int:
        while True:
            try:
                state.clear()
                try:
                    size = os.readv(self._device, (buffer,))
                except OSError as error:
                    if error.errno in _INTERRUPTED:
                        continue
                    return 0 if error.errno == errno.ENODEV else FAILED
                if self._acting:
                    self._await_releases(state)
                if not self._process(buffer, address, size):
                    self._refuse(refusal)
            # ctypes raises ArgumentError if there is no memory for an argument.
            except (MemoryError, ctypes.ArgumentError):
                self._refuse(refusal)
                sleep(RETRY_DELAY)

    def _process(self, request: bytearray, address: int, size: int) -> bool:
        """Answer the request of `size` bytes in the buffer `request`, whose address is `address`.

        Return False if the reply may not have been sent for lack of memory, else True.
        """
        opcode, unique, node, uid, gid, pid = IN_HEADER.unpack_from(request)
        _served.pid = pid
        if self._nodes is not None:
            self._nodes.begin(opcode)
        found: bytes | int | None = None
        if opcode == FUSE_READ:
            found = self._read(uid, gid, pid, *READ_IN.unpack_from(request, IN_HEADER.size))
        elif opcode == FUSE_RELEASE:
            self._release(*RELEASE_IN.unpack_from(request, IN_HEADER.size))
            found = b""
        elif self._nodes is not None and (answer := self._answers.get(opcode)) is not None:
            found = answer(self._nodes, request, size)
            if found is _DONE:
                return True
        # libfuse answers a read that has to wait, because libfuse notices an interrupt of the client.
        if found is None:
            channel = self._replies.select(opcode, node, request, size)
            if opcode in CHANGES:
                self._change_names(opcode, node, request, address, size, channel)
            else:
                _libfuse.fuse_session_process(self._session, address, size, channel)
            return channel == self._replies.channel
        error, data = (found, b"") if isinstance(found, int) else (0, found)
        try:
            os.writev(self._device, (OUT_HEADER.pack(OUT_HEADER.size + len(data), error, unique), data))
        # The client was interrupted, or the mount is gone.
        except OSError:
            if opcode == FUSE_OPEN and data:
                self._release(*OPEN_OUT.unpack(data)[:1])
        return True

    def _change_names(
        self, opcode: int, directory: int, request: bytearray, address: int, size: int, channel: int
    ) -> None:
        """Make libfuse execute a request that removes or changes a name in `directory`."""
        # A RENAME has other fields before its names, and concerns all paths.
        name = bytes(request[IN_HEADER.size : size - 1])
        with self._replies.own_paths.changing(opcode, directory, name):
            _libfuse.fuse_session_process(self._session, address, size, channel)

    def _look_up(self, nodes: KnownNodes, request: bytearray, size: int) -> bytes | int | None:
        """Answer the LOOKUP of a known control file. Results: see `_answers`.

        If the name gets a validity, its attributes get none.
        """
        _, unique, directory, uid, gid, pid = IN_HEADER.unpack_from(request)
        name = bytes(memoryview(request)[IN_HEADER.size : size - 1])
        node = nodes.by_name.get((directory, name))
        if node is None or self._replies.is_lasting(node.id):
            return None
        ends = nodes.ends
        found = self._operations.getattr(uid, gid, pid, node.path)
        if isinstance(found, int):
            return found
        if nodes.answer(unique, directory, name, node, ends, attr_bytes(found), self._operations.validity):
            return _DONE
        # The client's call is repeated in the guest already.
        self._operations.skip_client()
        return None

    def _get_attributes(self, nodes: KnownNodes, request: bytearray, _size: int) -> bytes | int | None:
        """Return the reply to the GETATTR of a known control file. Other results: see `_answers`."""
        _, _, number, uid, gid, pid = IN_HEADER.unpack_from(request)
        node = nodes.by_id.get(number)
        if node is None or self._replies.is_lasting(number):
            return None
        flags, handle = GETATTR_IN.unpack_from(request, IN_HEADER.size)
        if flags & HANDLE_FLAGS[FUSE_GETATTR]:
            found = self._operations.fgetattr(uid, gid, pid, handle)
        else:
            found = self._operations.getattr(uid, gid, pid, node.path or "/")
        if isinstance(found, int):
            return found
        validity = 0 if nodes.lets_names_last else self._operations.validity
        return ATTR_OUT.pack(0, validity) + attr_bytes(found)

    def _open(self, nodes: KnownNodes, request: bytearray, _size: int) -> bytes | int | None:
        """Open a known control file or a file with a path of its own, and return the reply.

        Other results: see `_answers`. An open(2) that truncates can take long, so libfuse answers it.
        """
        _, _, number, uid, gid, pid = IN_HEADER.unpack_from(request)
        (flags,) = FIRST_WORD.unpack_from(request, IN_HEADER.size)
        if flags & os.O_TRUNC:
            return None
        node = nodes.by_id.get(number)
        if node is not None:
            found = self._operations.open(uid, gid, pid, node.path, flags)
        else:
            own = self._replies.own_paths
            opened = own.begin_open(number)
            if opened is None:
                return None
            try:
                found = self._operations.open(uid, gid, pid, opened[1], flags)
            finally:
                own.end_open(opened[0])
        if isinstance(found, int):
            return found
        handle, is_stream = found
        return OPEN_OUT.pack(handle, FOPEN_DIRECT_IO | is_stream * FOPEN_NONSEEKABLE)

    def _write(self, _nodes: KnownNodes, request: bytearray, size: int) -> bytes | int | None:
        """Execute a WRITE to a file whose writes read no host files, and return the reply.

        Other results: see `_answers`.
        """
        _, _, _, uid, gid, pid = IN_HEADER.unpack_from(request)
        handle, offset, _, flags = WRITE_IN.unpack_from(request, IN_HEADER.size)
        with memoryview(request)[IN_HEADER.size + WRITE_IN.size : size] as data:
            count = self._operations.write(uid, gid, pid, handle, offset, flags, data)
        if count is None or -MAX_ERRNO <= count < 0:
            return count
        # A damaged guest may return any number.
        return WRITE_OUT.pack(count) if 0 <= count <= _INT_MAX else -errno.EIO

    @staticmethod
    def _forget(nodes: KnownNodes, request: bytearray, _size: int) -> bytes | int | None:
        """Count the FORGET in `nodes`, and leave in the request only LOOKUPs to which libfuse has replied.

        Return _DONE if none of the LOOKUPs is left; otherwise None, after which libfuse handles the
        request.
        """
        (count,) = FORGET_IN.unpack_from(request, IN_HEADER.size)
        _, _, number, *_ = IN_HEADER.unpack_from(request)
        count = nodes.forget(number, count)
        FORGET_IN.pack_into(request, IN_HEADER.size, count)
        return None if count else _DONE

    @staticmethod
    def _forget_batch(nodes: KnownNodes, request: bytearray, size: int) -> None:
        """Count the BATCH_FORGET in `nodes`; keep in the request only LOOKUPs that libfuse has answered."""
        for at in range(FORGET_ONE_OFFSET, size, FORGET_ONE.size):
            number, count = FORGET_ONE.unpack_from(request, at)
            FORGET_ONE.pack_into(request, at, number, nodes.forget(number, count))

    @staticmethod
    def _remove(nodes: KnownNodes, request: bytearray, size: int) -> None:
        """Drop the known nodes of a directory and of its descendants, before libfuse executes an rmdir(2)."""
        _, _, directory, *_ = IN_HEADER.unpack_from(request)
        nodes.remove(directory, bytes(request[IN_HEADER.size : size - 1]))

    @staticmethod
    def _initialise(nodes: KnownNodes, request: bytearray, _size: int) -> None:
        """Record in `nodes` whether the host's kernel can expire names, as the INIT request says."""
        nodes.initialise(request)

    def _await_releases(self, own: _LoopState) -> None:
        """Wait until other threads have answered the RELEASEs that they read before this call.

        If this thread's own request is a RELEASE, do not wait.
        """
        if own.is_releasing:
            return
        for state in self._states.copy():
            while state is not own and state.may_be_releasing():
                sleep(RELEASE_PAUSE)

    def _refuse(self, refusal: tuple[bytes, memoryview]) -> None:
        """Reply ENOMEM to the latest request, unless a reply was sent already.

        `refusal`: parts of this reply. Without a reply, the client could not even be killed.
        """
        while True:
            try:
                os.writev(self._device, refusal)
            except MemoryError:
                sleep(RETRY_DELAY)
                continue
            # The write fails if the request was answered already.
            except OSError:
                pass
            return
