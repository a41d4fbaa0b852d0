"""A FUSE session's loop: reads and closes are answered here, what needs a path goes to libfuse."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kprobefs.loops import FAILED

LASTING = frozenset((b"kprobes\0", b"machine\0", b"scratch\0", b"tracing\0"))
"""Directories in the root that are there as long as the mount is, whichever kernel it shows."""
_AGE = 3600
"""Seconds that the host's kernel knows them without asking; libfuse has one age for all names.

Their attributes have none: each stat(2) is a request, as it is where the name is looked up.
"""
_LOOKUP, _GETATTR, _READ, _RELEASE = 1, 3, 15, 18
_ROOT = 1
_HEADER = struct.Struct("=4xIQQIII4x")
"""struct fuse_in_header: opcode, unique, nodeid, uid, gid, pid."""
_READ_IN = struct.Struct("=QQI4xQI4x")
"""struct fuse_read_in: fh, offset, size, lock_owner, flags."""
_RELEASE_IN = struct.Struct("=Q")
"""struct fuse_release_in: fh."""
_OUT = struct.Struct("=IiQ")
"""struct fuse_out_header: len, error, unique."""
_ENTRY, _ATTRIBUTES = 144, 120
"""Bytes of a reply with a struct fuse_entry_out, or a fuse_attr_out."""
_ENTRY_NODE = struct.Struct("=16xQ92xI24x")
"""nodeid, attr.mode."""
_ENTRY_AGES, _ATTRIBUTES_AGE = slice(32, 56), slice(16, 28)
"""entry_valid, attr_valid, the nanoseconds of both; attr_valid, its nanoseconds."""
_LASTS = struct.pack("=QQII", _AGE, 0, 0, 0)
_INTERRUPTED = errno.EINTR, errno.EAGAIN, errno.ENOENT


class _Piece(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


_SEND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Piece), ctypes.c_size_t)


class _ChannelOperations(ctypes.Structure):
    """struct fuse_chan_ops."""

    _fields_ = [("receive", ctypes.c_void_p), ("send", _SEND), ("destroy", ctypes.c_void_p)]


class SessionLoop:
    """libfuse's fuse_session_loop(), for any number of threads.

    A switch to this process and back costs more than what is done here: a lookup in scratch/ by its absolute
    path would be two requests. And libfuse has nothing to add to what is asked of an open file.
    """

    def __init__(
        self,
        libfuse: Any,
        session: int,
        read: Callable[[int, int, int, int, int, int, int, int], bytes | int | None],
        release: Callable[[int], object],
        walks: Callable[[], None] | None,
    ) -> None:
        """`read` of uid, gid, pid, fh, offset, size, lock owner, flags: data, -errno, None if it has to wait.

        `release` of fh. `walks`: no client wants the attributes that libfuse asks for next; None where each
        name is looked up each time. None of them raises.
        """
        self._session, self._read, self._release, self._walks = session, read, release, walks
        self._process = libfuse.fuse_session_process
        self._channel: int = libfuse.fuse_session_next_chan(session, None)
        self._device: int = libfuse.fuse_chan_fd(self._channel)
        self._size: int = libfuse.fuse_chan_bufsize(self._channel)
        # Held as long as libfuse may call it.
        self._operations = _ChannelOperations(None, _SEND(self._send), None)
        operations = ctypes.byref(self._operations)
        self._lasting: int = libfuse.fuse_chan_new(operations, self._device, self._size, None)
        self._nodes: set[int] = set()
        """Of the lasting directories."""

    def run(self) -> int:
        """Answer requests until the mount is gone, then 0; FAILED where a thread can't go on."""
        try:
            buffer = bytearray(self._size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            while True:
                try:
                    size = os.readv(self._device, (buffer,))
                except OSError as error:
                    if error.errno in _INTERRUPTED:
                        continue
                    return 0 if error.errno == errno.ENODEV else FAILED
                if not self._answers(buffer):
                    self._process(self._session, address, size, self._channel_of(buffer, size))
        except MemoryError:
            return FAILED

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
        opcode, _, node, *_ = _HEADER.unpack_from(request)
        if self._walks is None or not self._lasting:
            return self._channel
        if opcode == _LOOKUP and node == _ROOT and bytes(request[_HEADER.size : size]) in LASTING:
            self._walks()
            return self._lasting
        return self._lasting if opcode == _GETATTR and node in self._nodes else self._channel

    def _send(self, _channel: int, pieces: Any, count: int) -> int:
        """What libfuse has found of a lasting directory, with ages of ours."""
        try:
            parts = [ctypes.string_at(pieces[at].base, pieces[at].size) for at in range(count)]
            reply = bytearray(b"".join(parts))
            if len(reply) == _ATTRIBUTES:
                reply[_ATTRIBUTES_AGE] = bytes(12)
            elif len(reply) == _ENTRY:
                node, mode = _ENTRY_NODE.unpack(reply)
                if stat.S_ISDIR(mode):
                    self._nodes.add(node)
                    reply[_ENTRY_AGES] = _LASTS
            os.write(self._device, reply)
        except OSError as error:
            return -(error.errno or errno.EIO)
        # None reaches libfuse: it takes whatever ctypes answers then.
        except BaseException:
            return -errno.ENOMEM
        return 0
