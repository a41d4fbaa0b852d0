"""A FUSE session's loop: reads and closes are answered here, what needs a path goes to libfuse."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

from kprobefs.fuse.worker_threads import FAILED

LASTING = frozenset((b"kprobes\0", b"machine\0", b"scratch\0", b"tracing\0"))
"""Directories in the root that are there as long as the mount is, whichever kernel it shows."""
_AGE = 3600
"""Seconds that the host's kernel knows them without asking; libfuse has one age for all names.

Their attributes have none: each stat(2) is a request, as it is where the name is looked up.
"""
_LOOKUP = 1
_FORGET = 2
_GETATTR = 3
_SETATTR = 4
_READLINK = 5
_RENAME = 12
_OPEN = 14
_READ = 15
_RELEASE = 18
_OPENDIR = 27
_BATCH_FORGET = 42
_RENAME2 = 45
_ROOT = 1
_HEADER = struct.Struct("=4xIQQIII4x")
"""struct fuse_in_header: opcode, unique, nodeid, uid, gid, pid."""
_READ_IN = struct.Struct("=QQI4xQI4x")
"""struct fuse_read_in: fh, offset, size, lock_owner, flags."""
_RELEASE_IN = struct.Struct("=Q")
"""struct fuse_release_in: fh."""
_FORGOTTEN = struct.Struct("=Q8x")
"""struct fuse_forget_one: nodeid."""
_FORGOTTEN_AT = _HEADER.size + 8
"""Where they begin, behind struct fuse_batch_forget_in."""
_NAMED = {_GETATTR: 1, _SETATTR: 1 << 6, _READLINK: 0, _OPEN: 0, _OPENDIR: 0}
"""What is asked of a file by the name that libfuse has for it, but with this bit in the first word: by fh."""
_FLAGS = struct.Struct("=I")
"""The first word of those requests."""
_RENAMED = 1.0
"""Seconds behind a rename(2) in which the host's kernel may still ask for the file that was replaced."""
_OUT = struct.Struct("=IiQ")
"""struct fuse_out_header: len, error, unique."""
_ENTRY, _ATTRIBUTES = 144, 120
"""Bytes of a reply with a struct fuse_entry_out, or a fuse_attr_out."""
_ENTRY_NODE = struct.Struct("=16xQ92xI24x")
"""nodeid, attr.mode."""
_ENTRY_AGE, _ENTRY_AGES, _ATTRIBUTES_AGE = slice(32, 40), slice(32, 56), slice(16, 28)
"""entry_valid; this, attr_valid and the nanoseconds of both; attr_valid, its nanoseconds."""
_STAYS = struct.pack("=Q", _AGE)
_LASTS = struct.pack("=QQII", _AGE, 0, 0, 0)
_INTERRUPTED = errno.EINTR, errno.EAGAIN, errno.ENOENT
_NO_MEMORY = struct.pack("=Ii", _OUT.size, -errno.ENOMEM)
"""A reply up to its unique."""
_UNIQUE = slice(8, 16)
_PAUSE = 0.01
"""Seconds until what had no memory is tried again."""


class _Iovec(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


_SEND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Iovec), ctypes.c_size_t)


class _ChannelOperations(ctypes.Structure):
    """struct fuse_chan_ops."""

    _fields_ = [("receive", ctypes.c_void_p), ("send", _SEND), ("destroy", ctypes.c_void_p)]


class SessionLoop:
    """libfuse's fuse_session_loop(), for any number of threads.

    A switch to this process and back costs more than what is done here: each name of a path would be a
    request in front of the open. And libfuse has nothing to add to what is asked of an open file.
    """

    def __init__(
        self,
        libfuse: Any,
        session: int,
        read: Callable[[int, int, int, int, int, int, int, int], bytes | int | None],
        release: Callable[[int], object],
        walks: Callable[[], None] | None,
        clients_own: Collection[str] = (),
    ) -> None:
        """`read` of uid, gid, pid, fh, offset, size, lock owner, flags: data, -errno, None if it has to wait.

        `release` of fh. `walks`: no client wants the attributes that libfuse asks for next; None where each
        name is looked up each time. None of them raises.

        `clients_own`: lasting directories in which clients alone change names, so that all below lasts, too.
        An open(2) of what is gone all the same ends in ESTALE, for which the host's kernel looks names up.
        """
        self._libfuse = libfuse
        self._session = session
        self._read = read
        self._release = release
        self._walks = walks
        self._channel: int = libfuse.fuse_session_next_chan(session, None)
        self._device: int = libfuse.fuse_chan_fd(self._channel)
        self._size: int = libfuse.fuse_chan_bufsize(self._channel)
        self._held: list[_ChannelOperations] = []
        """As long as libfuse may call them."""
        self._lasting, self._staying = self._changed_by(self._lasts), self._changed_by(self._stays)
        self._replaced = self._changed_by(_look_again)
        self._may_be_replaced = 0.0
        """Until when a file that is asked for may be one that a rename(2) has replaced."""
        self._nodes: set[int] = set()
        """Of the lasting directories."""
        self._own_names = frozenset(name.encode() + b"\0" for name in clients_own)
        self._own_nodes: set[int] = set()
        """Of the directories whose names last, and of those below."""

    def run(self) -> int:
        """Answer requests until the mount is gone, then 0; FAILED where a thread can't begin, or go on."""
        process = self._libfuse.fuse_session_process
        try:
            buffer = bytearray(self._size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            refusal = _NO_MEMORY, memoryview(buffer)[_UNIQUE]
        except MemoryError:
            return FAILED
        while True:
            try:
                try:
                    size = os.readv(self._device, (buffer,))
                except OSError as error:
                    if error.errno in _INTERRUPTED:
                        continue
                    return 0 if error.errno == errno.ENODEV else FAILED
                if not self._answers(buffer):
                    channel = self._channel_of(buffer, size)
                    process(self._session, address, size, channel)
                    # Where there was no memory to change the reply.
                    if channel != self._channel:
                        self._refuse(refusal)
            # ctypes has the second one for arguments that there was no memory for.
            except (MemoryError, ctypes.ArgumentError):
                self._refuse(refusal)
                sleep(_PAUSE)

    def _refuse(self, refusal: tuple[bytes, memoryview]) -> None:
        """Answer the latest request, if it isn't: who asked can't be killed until then."""
        while True:
            try:
                os.writev(self._device, refusal)
            except MemoryError:
                sleep(_PAUSE)
                continue
            except OSError:
                pass
            return

    def _answers(self, request: bytearray) -> bool:
        opcode, unique, _, *client = _HEADER.unpack_from(request)
        found: bytes | int | None
        if opcode == _READ:
            found = self._read(*client, *_READ_IN.unpack_from(request, _HEADER.size))
            # To wait takes to be interrupted, which libfuse knows how to tell.
            if found is None:
                return False
        elif opcode == _RELEASE:
            self._release(*_RELEASE_IN.unpack_from(request, _HEADER.size))
            found = b""
        else:
            return False
        error, data = (found, b"") if isinstance(found, int) else (0, found)
        # Nobody waits for it any more, or the mount is gone.
        with suppress(OSError):
            os.writev(self._device, (_OUT.pack(_OUT.size + len(data), error, unique), data))
        return True

    def _channel_of(self, request: bytearray, size: int) -> int:
        """Where libfuse sends its reply."""
        if self._walks is None:
            return self._channel
        opcode, _, node, *_ = _HEADER.unpack_from(request)
        if opcode == _LOOKUP:
            if node in self._own_nodes:
                return self._staying
            name = bytes(request[_HEADER.size : size]) if node == _ROOT else b""
            if name in LASTING:
                self._walks()
                return self._staying if name in self._own_names else self._lasting
        elif opcode in _NAMED:
            if opcode == _GETATTR and node in self._nodes:
                return self._lasting
            if monotonic() < self._may_be_replaced:
                (flags,) = _FLAGS.unpack_from(request, _HEADER.size)
                return self._channel if flags & _NAMED[opcode] else self._replaced
        elif opcode in (_RENAME, _RENAME2):
            self._may_be_replaced = monotonic() + _RENAMED
        elif opcode == _FORGET:
            self._forget(node)
        elif opcode == _BATCH_FORGET:
            for (each,) in _FORGOTTEN.iter_unpack(request[_FORGOTTEN_AT:size]):
                self._forget(each)
        return self._channel

    def _forget(self, node: int) -> None:
        """Of the names in it each is looked up from now on, should it still be known."""
        self._nodes.discard(node)
        self._own_nodes.discard(node)

    def _changed_by(self, change: Callable[[bytearray], None]) -> int:
        """A channel to the host's kernel that changes replies; the session's own where there is no memory."""

        def send(_channel: int, pieces: Any, count: int) -> int:
            try:
                parts = [ctypes.string_at(pieces[at].base, pieces[at].size) for at in range(count)]
                reply = bytearray(b"".join(parts))
                change(reply)
                os.write(self._device, reply)
            except OSError as error:
                return -(error.errno or errno.EIO)
            # None reaches libfuse: it takes whatever ctypes answers then.
            except BaseException:
                return -errno.ENOMEM
            return 0

        operations = _ChannelOperations(None, _SEND(send), None)
        self._held.append(operations)
        made = self._libfuse.fuse_chan_new(ctypes.byref(operations), self._device, self._size, None)
        return made or self._channel

    def _lasts(self, reply: bytearray) -> None:
        """What libfuse has found of a lasting directory."""
        if len(reply) == _ATTRIBUTES:
            reply[_ATTRIBUTES_AGE] = bytes(12)
        elif len(reply) == _ENTRY:
            node, mode = _ENTRY_NODE.unpack(reply)
            if stat.S_ISDIR(mode):
                self._nodes.add(node)
                reply[_ENTRY_AGES] = _LASTS

    def _stays(self, reply: bytearray) -> None:
        """What libfuse has found of a name that clients alone change."""
        if len(reply) == _ENTRY:
            node, mode = _ENTRY_NODE.unpack(reply)
            if stat.S_ISDIR(mode):
                self._own_nodes.add(node)
            reply[_ENTRY_AGE] = _STAYS


def _look_again(reply: bytearray) -> None:
    """libfuse has forgotten the name of a file that was replaced: the host's kernel has to find the new one.

    It looks for it once, where ESTALE comes of a call with a path.
    """
    size, error, unique = _OUT.unpack_from(reply)
    if error == -errno.ENOENT:
        _OUT.pack_into(reply, 0, size, -errno.ESTALE, unique)
