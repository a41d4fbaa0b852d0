"""KnownNodes: nodes of control files for which kprobefs itself replies, and names that the kernel caches.

libfuse finds a file's path by its node id, in a table with a lock, and calls back through ctypes. Clients
cannot rename control files, so the path of a control file's node never changes. kprobefs keeps the paths of
these nodes, and replies to requests about them without libfuse.
The host's kernel looks each directory of a path up again unless the reply gives the directory's name a
validity. A name of a control file gets a validity if only the guest's kernel can remove the name. When such a
name is removed, kprobefs notifies the host's kernel.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from time import monotonic
from typing import Protocol

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.util.threads import start_thread
from emulated_kernel.vfs.core.client import Stat
from kprobefs.fuse.libfuse import served
from kprobefs.fuse.protocol import (
    ATTR,
    BLOCK_SIZE,
    ENTRY_GENERATION,
    ENTRY_INVALIDATION,
    ENTRY_NODE,
    ENTRY_OUT,
    FUSE_EXPIRE_ONLY,
    FUSE_HAS_EXPIRE_ONLY,
    FUSE_INIT_EXT,
    FUSE_NOTIFY_INVAL_ENTRY,
    FUSE_OPEN,
    FUSE_READ,
    FUSE_RELEASE,
    FUSE_ROOT_ID,
    FUSE_WRITE,
    IN_HEADER,
    INIT_IN,
    OUT_HEADER,
)

NAME_VALIDITY = 10
"""Seconds for which the host's kernel may keep a name, unless end_names() ends the validity earlier."""
MAX_NAMES = 500
"""Maximum number of names that have a validity at the same time."""
CACHED_ATTRIBUTES = 500
"""Maximum number of results of attr_bytes() that are cached."""
PAGED_SIZE = 1 << 40
"""Value of st_size, in bytes, of files that can be spliced. A splice(2) ends at this offset."""

_Key = tuple[int, bytes]
"""Node id of a directory, and a name in the directory."""
_SECOND = 1_000_000_000
_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1
_WITHOUT_DIRECTORY = frozenset({0, FUSE_OPEN, FUSE_READ, FUSE_WRITE, FUSE_RELEASE})
"""Opcodes of requests for which the host's kernel has locked no directory; 0: the thread serves no request.
"""


class Names(Protocol):
    """The methods of a mount by which KnownNodes checks properties of paths."""

    def is_control(self, path: str, /) -> bool:
        """Return True if `path` is in a file system of control files."""

    def name_lasts(self, path: str, /) -> bool:
        """Return True if the host's kernel may keep the name at `path` for NAME_VALIDITY seconds.

        This is so if only the guest's kernel can remove the name.
        """

    def exists(self, path: str, /) -> bool:
        """Return True if there is a file at `path`."""


class Node(NamedTuple):
    """The FUSE node of a control file. The host's kernel names the node by its id."""

    path: str
    id: int
    generation: int


@lru_cache(CACHED_ATTRIBUTES)
def attr_bytes(attributes: Stat) -> bytes:
    """Return attributes as the bytes of a struct fuse_attr. Numbers that do not fit are truncated.

    A file that can be spliced gets a size and a number of blocks. If the number were 0, cp(1) would
    consider the file sparse, and look for its data with lseek(2).
    """
    times = [divmod(t, _SECOND) for t in (attributes.atime_ns, attributes.mtime_ns, attributes.ctime_ns)]
    is_paged = attributes.is_paged
    return ATTR.pack(
        attributes.ino & _U64,
        PAGED_SIZE if is_paged else attributes.size & _U64,
        PAGED_SIZE // 512 if is_paged else attributes.blocks & _U64,
        *(second & _U64 for second, _ in times),
        *(nanosecond for _, nanosecond in times),
        attributes.mode & _U32,
        attributes.nlink & _U32,
        attributes.uid & _U32,
        attributes.gid & _U32,
        attributes.rdev & _U32,
        BLOCK_SIZE,
    )


class KnownNodes:
    """The nodes of control files that the host's kernel has looked up, by id, and by directory and name.

    For each node, libfuse counts the LOOKUPs to which libfuse has replied. A FORGET contains the number of
    all LOOKUPs of the node. So the LOOKUPs to which kprobefs has replied itself are subtracted before libfuse
    gets the FORGET.
    Replaces: libfuse's replies to LOOKUP, GETATTR and OPEN of control files. This saves two thirds of the
    time of an open, read and close by path.
    """

    def __init__(self, names: Names, *, may_last: bool) -> None:
        """Start with only the node of the root.

        `may_last`: whether names may get a validity. Even if True, they get one only if the host's kernel can
        expire names.

        `names`: the mount, which answers questions about paths.
        """
        self._names = names
        self.device = -1
        """Descriptor of /dev/fuse, which ReplyChannels sets; -1 before that."""
        self._lock = threading.Lock()
        """Lock around each change of this object's maps, and around sending a reply to a LOOKUP.

        So a FORGET of a node waits until the maps are changed and the reply to the node's LOOKUP is sent.
        """
        self.by_id: dict[int, Node] = {FUSE_ROOT_ID: Node("", FUSE_ROOT_ID, 0)}
        self.by_name: dict[_Key, Node] = {}
        self._names_of: dict[int, _Key] = {}
        """Node id -> (node id of its directory, its name), which is the key of the node in `by_name`."""
        self._answered: dict[int, int] = {}
        """Node id -> number of LOOKUPs that answer() has answered and that no FORGET has included yet."""
        self._are_allowed = may_last
        self.removed: set[int] = set()
        """Ids of nodes that remove() has dropped, and for which no LOOKUP or FORGET has come since."""
        self.lets_names_last = False
        """Whether names of control files may get a validity.

        If a file's name has a validity, the file's attributes get none.
        """
        self._lasting: dict[_Key, tuple[float, str]] = {}
        """(node id of a directory, name) -> (end of the name's validity, path), for names with a validity.

        The end is a time of time.monotonic(), in seconds.
        """
        self.ends = 0
        """Number of calls of end_names() so far."""
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Function that returns a context manager, in whose block the calling thread may wait.

        If possible, another thread reads requests meanwhile.
        """

    def initialise(self, request: bytearray) -> None:
        """Set `lets_names_last` from the INIT request `request`.

        It becomes True if the constructor's `may_last` was True and the host's kernel supports
        FUSE_EXPIRE_ONLY. This flag of a notification makes the kernel look a name up again, but keep the
        directory that is cached under the name.
        """
        flags, more = INIT_IN.unpack_from(request, IN_HEADER.size)
        can_expire = bool(flags & FUSE_INIT_EXT and more & FUSE_HAS_EXPIRE_ONLY)
        self.lets_names_last = self._are_allowed and can_expire

    def path_of(self, directory: int, name: bytes) -> str | None:
        """Return the path of `name` in the directory with the node id `directory`.

        Return None if the directory is not known, or if the path is not that of a control file.
        """
        above = self.by_id.get(directory)
        if above is None:
            return None
        path = f"{above.path}/{name.decode('utf-8', 'surrogateescape')}"
        return path if self._names.is_control(path) else None

    def learn(
        self, reply: bytearray, directory: int, name: bytes, path: str, ends: int, may_last: bool
    ) -> None:
        """Send libfuse's reply to the LOOKUP of a control file, and record the node that the reply contains.

        A reply with an error is only sent.

        `directory` is the node id of the directory in which `name` was looked up, and `path` is the path of
        the file. `ends` is the number of calls of end_names() when the request came. `may_last`: whether the
        name may get a validity of NAME_VALIDITY seconds.
        Raises: OSError (the reply cannot be sent).
        """
        if len(reply) != ENTRY_OUT.size + OUT_HEADER.size + ATTR.size:
            os.write(self.device, reply)
            return
        number, mode, _ = ENTRY_NODE.unpack(reply)
        (generation,) = ENTRY_GENERATION.unpack(reply)
        lasts = may_last and self._may_last(path)
        with self._lock:
            if lasts:
                validity = self._let_last((directory, name), path, ends)
                ENTRY_OUT.pack_into(reply, OUT_HEADER.size, number, generation, validity, 0, 0, 0)
            # The kernel can use the node in another request before write() returns.
            if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                node = Node(path, number, generation)
                self.by_id[number] = node
                self.by_name[directory, name] = node
                self._names_of[number] = (directory, name)
                self.removed.discard(number)
            try:
                os.write(self.device, reply)
            # libfuse forgets a lookup whose reply was not sent.
            except OSError:
                self._drop(number)
                raise

    def answer(
        self,
        unique: int,
        directory: int,
        name: bytes,
        node: Node,
        ends: int,
        attributes: bytes,
        validity: int,
    ) -> bool:
        """Reply to a LOOKUP that has found `node`, and return True.

        If a FORGET has removed the node meanwhile, send nothing and return False.

        `unique` is the id of the request. `directory` is the node id of the directory in which `name` was
        looked up. `attributes` is a struct fuse_attr. `validity` is the attributes' validity in nanoseconds,
        which is used only if the file system allows no validity for the name. Otherwise, the attributes get
        none. `ends` is the number of calls of end_names() when the request came. If there were further calls
        since then, the name gets no validity.
        """
        key = (directory, name)
        lasts = self._may_last(node.path)
        with self._lock:
            if self.by_name.get(key) is not node:
                return False
            seconds = 0
            if lasts:
                seconds = self._let_last(key, node.path, ends)
                validity = 0
            entry = ENTRY_OUT.pack(node.id, node.generation, seconds, 0, 0, validity)
            size = OUT_HEADER.size + ENTRY_OUT.size + ATTR.size
            # If the reply is not sent, the client was interrupted, or the mount is gone.
            with suppress(OSError):
                os.writev(self.device, (OUT_HEADER.pack(size, 0, unique), entry, attributes))
                self._answered[node.id] = self._answered.get(node.id, 0) + 1
        return True

    def forget(self, number: int, count: int) -> int:
        """Process a FORGET of `count` LOOKUPs of the node with the id `number`.

        Return the number of these LOOKUPs to which libfuse has replied.
        """
        if number == FUSE_ROOT_ID:
            return count
        with self._lock:
            answered = self._answered.pop(number, 0)
            if answered > count:
                self._answered[number] = answered - count
            if answered >= count:
                return 0
            if number in self._names_of:
                self._lasting.pop(self._names_of[number], None)
            self._drop(number)
            self.removed.discard(number)
            return count - answered

    def remove(self, directory: int, name: bytes) -> None:
        """Drop the nodes of the directory `name` and of its descendants, before a client's rmdir(2).

        `directory`: node id of the parent directory. If the rmdir(2) fails, the host's kernel keeps the
        names. The ids of the dropped nodes stay in `removed` until a node's next LOOKUP or FORGET.
        """
        with self._lock:
            node = self.by_name.get((directory, name))
            if node is not None:
                below = f"{node.path}/"
                gone = [each.id for each in self.by_id.values() if f"{each.path}/".startswith(below)]
                self.removed.update(gone)
                for number in gone:
                    self._drop(number)

    def _drop(self, number: int) -> None:
        self.by_id.pop(number, None)
        key = self._names_of.pop(number, None)
        if key is not None:
            self.by_name.pop(key, None)

    def _may_last(self, path: str) -> bool:
        return self.lets_names_last and self._names.name_lasts(path)

    def _let_last(self, key: _Key, path: str, ends: int) -> int:
        """Record that the host's kernel may keep the name `key`, and return the name's validity in seconds.

        `key`: node id of the directory, and name. `path`: path of the file. `ends`: number of calls of
        end_names() when the LOOKUP came. Return 0 if MAX_NAMES names have a validity already, or if
        end_names() has been called since then.
        Hazard: in the latter case, the result of the LOOKUP may be out of date.
        """
        now = monotonic()
        if len(self._lasting) >= MAX_NAMES:
            self._forget_expired(now)
        if self.ends != ends or len(self._lasting) >= MAX_NAMES:
            return 0
        self._lasting[key] = (now + NAME_VALIDITY, path)
        return NAME_VALIDITY

    def _forget_expired(self, now: float) -> None:
        self._lasting = {key: lasting for key, lasting in self._lasting.items() if lasting[0] > now}

    def end_names(self, ends: Collection[str | None]) -> None:
        """Tell the host's kernel which names are gone, and which names it must look up again.

        `ends`: an item for each change of the file system. The item is the last part of the paths of removed
        directories, such as GROUP/EVENT. It is "" if any name may be gone, and None if the kernel must look
        up each name again.
        Hazard: to drop a name, the host's kernel locks the name's directory. If the current request is one
        for which the kernel holds such a lock, this thread must not wait: another thread then notifies the
        kernel.
        """
        with self._lock:
            self.ends += 1
            self._forget_expired(monotonic())
            lasting = [(key, path) for key, (_, path) in self._lasting.items()]
        removed = [each for each in ends if each is not None]
        may_be_gone = [(key, path) for key, path in lasting if any(_concerns(each, path) for each in removed)]
        expired = [key for key, _ in lasting] if None in ends else []
        if not may_be_gone and not expired:
            return
        if served.opcode in _WITHOUT_DIRECTORY:
            with self.waiting():
                self._invalidate_all(may_be_gone, expired)
        else:
            # Without a thread, the names last until their validity has passed.
            with suppress(KernelError):
                start_thread("fuse-names", self._invalidate_all, may_be_gone, expired)

    def _invalidate_all(self, may_be_gone: list[tuple[_Key, str]], expired: list[_Key]) -> None:
        # A directory comes before the names in it. Without it, the kernel would not find them.
        for key, path in reversed(may_be_gone):
            if not self._names.exists(path):
                self._invalidate(key, 0)
        for key in expired:
            self._invalidate(key, FUSE_EXPIRE_ONLY)

    def _invalidate(self, key: _Key, flags: int) -> None:
        directory, name = key
        size = ENTRY_INVALIDATION.size + len(name) + 1
        head = ENTRY_INVALIDATION.pack(size, FUSE_NOTIFY_INVAL_ENTRY, 0, directory, len(name), flags)
        # The kernel does not have the name, or the mount is gone.
        with suppress(OSError):
            os.write(self.device, b"".join((head, name, b"\0")))


def _concerns(removed: str, path: str) -> bool:
    """Return True if `path` may be gone after the kernel has removed an event's directories.

    `removed` is the last part of these directories' paths, such as GROUP/EVENT. The directories of the
    group may be gone too. If `removed` is empty, any path may be gone.
    """
    if not removed or f"/{removed}/" in f"{path}/":
        return True
    return path.endswith("/" + removed.partition("/")[0])
