"""ReplyChannels: the channels through which libfuse replies to the host's kernel; some change the reply."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from time import monotonic
from typing import Any

from kprobefs.fuse.known_nodes import KnownNodes
from kprobefs.fuse.libfuse import library
from kprobefs.fuse.own_paths import OwnPaths
from kprobefs.fuse.protocol import (
    ATTR_REPLY_SIZE,
    ATTR_VALIDITIES,
    ENTRY_NODE,
    ENTRY_REPLY_SIZE,
    ENTRY_VALID,
    ENTRY_VALIDITIES,
    FIRST_WORD,
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
    FUSE_RENAME,
    FUSE_RENAME2,
    FUSE_ROOT_ID,
    FUSE_SETATTR,
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
    OUT_HEADER,
)

VALIDITY = 3600
"""Seconds for which the host's kernel may keep the name of a directory that exists as long as the mount."""
RENAME_WINDOW = 1.0
"""Seconds after a rename(2) during which the host's kernel may still request the replaced file."""
MAX_PAGES = 33
"""Maximum number of pages of a client's buffer in one request: REQUEST_SIZE bytes with any alignment."""
_NAME_LASTS = struct.pack("=Q", VALIDITY)
_NAME_LASTS_ATTRIBUTES_DO_NOT = struct.pack("=QQII", VALIDITY, 0, 0, 0)


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
    The validity of `lasting` saves a ninth of the time of an open, read and close, and a sixth of that of a
    stat(2). That of `clients_own` saves a quarter of the time of an open, read and close in scratch/.
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
        looks up one of `lasting`. `walks` must record that the guest must not repeat this thread's next
        getattr as a client's system call. `lasting` and `clients_own`: names of directories in the root; see
        the class. `nodes` records the nodes of control files. If `nodes` is None, no node is recorded.
        """
        self.channel: int = library.fuse_session_next_chan(session, None)
        """Address of the session's own struct fuse_chan, through which replies are sent unchanged."""
        self.device: int = library.fuse_chan_fd(self.channel)
        self.request_size: int = library.fuse_chan_bufsize(self.channel)
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
        """Paths of files below the directories `clients_own`, with which SessionLoop itself opens the files.

        The files are directories, and regular files that had one link when they were looked up. A path whose
        name may have changed is dropped.
        """
        self._linked_nodes: set[int] = set()
        """Node ids of files to which clients have made further links."""
        self._rename_window_end = 0.0
        """Monotonic time until which a request may be for a file that a rename(2) has replaced."""
        self._callbacks: list[_ChannelOperations] = []
        """C callbacks of the channels that _changed_by() has made.

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
        The result is the address of a struct fuse_chan. `node` is the node id in the request, and `size` is
        the size of the request in bytes.
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

        If the result is True, also store the arguments with which _send() passes libfuse's reply to
        KnownNodes.learn(). `may_last`: the name may get a validity of NAME_VALIDITY seconds, if the file
        system allows this; False: it gets none.
        """
        nodes = self._nodes
        path = nodes and nodes.path_of(node, name)
        self._looked_up.arguments = None
        if nodes is not None and path is not None:
            self._looked_up.arguments = (node, name, path, nodes.ends, may_last)
        return path is not None

    def _send(self, reply: bytearray) -> None:
        """Send a reply of libfuse to the host's kernel. Raises: OSError (it cannot be sent).

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
        """Return True if `node` is the node id of a directory in `lasting` that is not in `clients_own`."""
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
        """Return the address of a new channel that calls `change` with each reply before it sends the reply.

        If there is no memory for the channel, return `self.channel`, which changes nothing.
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
        made = library.fuse_chan_new(ctypes.byref(callbacks), self.device, self.request_size, None)
        return made or self.channel

    def _let_directory_last(self, reply: bytearray) -> None:
        """In a reply to LOOKUP, give a directory's name a validity of VALIDITY seconds, its attributes none.

        Also record the directory's node id, for which is_lasting() then returns True. A reply to the LOOKUP
        of another file stays unchanged. In a reply to GETATTR, the attributes do not stay valid, either. So
        each stat(2) is still a request.
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
        """In a reply to LOOKUP, give the name a validity, because only clients change the name.

        The name of a file with several links gets no validity. Record the path of any other file in
        `own_paths`, and the node id of a directory in `_own_nodes`.
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
