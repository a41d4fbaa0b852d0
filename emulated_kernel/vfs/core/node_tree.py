"""NodeTree: finds nodes by path, and raises Linux's errno for operations that a node does not support."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from itertools import count
from typing import NoReturn

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import INO_SPACES, Client, DirEntry, Stat
from emulated_kernel.vfs.core.node import Directory, Node, Owner
from emulated_kernel.vfs.core.open_file import File, OpenFile

CONTROL = ".control"
"""Name of the directory for kprobes/, machine/ and sysctl/ if the root is tracefs. Listings omit it."""
_MAX_CACHED_NAMES = 500
"""Maximum number of paths whose nodes are cached. Clients use few paths at a time."""
NAME_MAX = 255
"""Maximum length of a file name in bytes."""


class NodeTree:
    """A tree of nodes. Methods that are named like those of FileSystem do the same for paths in the tree."""

    def __init__(self, root: Directory, owner: Owner | None = None) -> None:
        self.root = root
        self.owner = owner or Owner()
        self._inode_numbers = count(INO_SPACES, INO_SPACES)
        self._found: dict[str, Node] = {}
        """Path -> node, for paths that were looked up since the kernel last removed names.

        `is_cached` of these nodes is set.
        """
        self.on_removal: Callable[[str], object] = _ignore
        """Function to call, under the control lock, when the kernel has removed directories.

        Its argument is the last part of the removed directories' paths, such as GROUP/EVENT.
        """

    def removed(self, path: str) -> None:
        """Empty the cache of nodes and call `on_removal`, because the kernel has removed directories.

        `path` is the last part of the removed directories' paths, such as GROUP/EVENT. Lock: held.
        """
        self._forget()
        self.on_removal(path)

    def _forget(self) -> None:
        for node in self._found.values():
            node.is_cached = False
        self._found.clear()

    def lookup(self, path: str) -> Node:
        """Return the node at an absolute path, with one dictionary lookup for each component.

        Nodes whose names only the kernel removes are cached by path until removed() is called.
        Raises: KernelError ENOENT, ENOTDIR, ENAMETOOLONG.
        """
        found = self._found.get(path)
        if found is not None:
            return found
        node: Node = self.root
        is_kernels = True
        for name in filter(None, path.split("/")):
            if not isinstance(node, Directory):
                raise KernelError(errno.ENOTDIR, node.name)
            child = node.get(name)
            if child is None:
                raise KernelError(errno.ENAMETOOLONG if _is_too_long(name) else errno.ENOENT, name)
            if node.names_are_clients:
                is_kernels = False
            node = child
        if is_kernels:
            if len(self._found) >= _MAX_CACHED_NAMES:
                self._forget()
            self._found[path] = node
            node.is_cached = True
        return node

    def is_kernels_name(self, path: str) -> bool:
        """Return True if `path` exists, and if only the kernel creates and removes names in its directory."""
        try:
            above = self.lookup(path).parent
        except KernelError:
            return False
        return above is None or not above.names_are_clients

    def getattr(self, path: str) -> Stat:
        """Return the attributes of the node at `path`. Raises: the errors of lookup()."""
        return self.stat(self.lookup(path))

    def stat(self, node: Node) -> Stat:
        """Return the attributes of `node`."""
        node.number(self._inode_numbers)
        return node.stat(self.owner)

    def readdir(self, path: str) -> list[DirEntry]:
        """Return the entries of the directory at `path`, "." and ".." first.

        Raises: KernelError ENOTDIR (`path` is no directory), and the errors of lookup().
        """
        directory = self._directory(path)
        numbers = self._inode_numbers
        parent = directory.parent or directory
        return [
            DirEntry(".", directory.kind, directory.number(numbers)),
            DirEntry("..", parent.kind, parent.number(numbers)),
            *directory.entries(numbers),
        ]

    def open(self, path: str, flags: int, client: Client) -> OpenFile:
        """Open the file at `path` for a client.

        Clients cannot create files in any directory of the tree, so O_CREAT with a new name fails with
        EACCES.
        Raises: KernelError EACCES, EEXIST (O_EXCL is set), EISDIR (`path` is a directory), ENOTDIR
        (O_DIRECTORY is set), the errors of lookup(), and those of the OpenFile's constructor.
        """
        try:
            node = self.lookup(path)
        except KernelError as error:
            if error.errno == errno.ENOENT and flags & os.O_CREAT:
                self.create(path)
            raise
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise KernelError(errno.EEXIST, path)
        if not isinstance(node, File):
            raise KernelError(errno.EISDIR, path)
        if flags & os.O_DIRECTORY:
            raise KernelError(errno.ENOTDIR, path)
        opened = node.opened_as(node, flags, client)
        node.count_open(1)
        return opened

    @staticmethod
    def release(opened: OpenFile) -> None:
        """Release a file that open() returned, after its last descriptor was closed."""
        opened.node.count_open(-1)
        opened.release()

    def create(self, path: str) -> NoReturn:
        """Refuse to create a file at `path`.

        Raises: KernelError EEXIST (`path` exists), otherwise EACCES, as in a Linux directory without
        ->create; also the errors of lookup().
        """
        self._absent(path)
        raise KernelError(errno.EACCES, path)

    def mkdir(self, _client: Client, path: str, mode: int) -> None:
        """Create a directory at `path` through its parent's method Directory.mkdir.

        Raises: KernelError EEXIST, and the errors of lookup() and of Directory.mkdir.
        """
        directory, name = self._absent(path)
        directory.mkdir(name, mode)

    def rmdir(self, _client: Client, path: str) -> None:
        """Remove the directory at `path` through its parent's method Directory.rmdir.

        Raises: KernelError ENOTDIR, EBUSY (the root), and the errors of lookup() and of Directory.rmdir.
        """
        node = self._directory(path)
        if node.parent is None:
            raise KernelError(errno.EBUSY, path)
        node.parent.rmdir(node.name)

    def unlink(self, _client: Client, path: str) -> NoReturn:
        """Refuse to remove a file.

        Raises: KernelError EISDIR (`path` is a directory), otherwise EPERM; also the errors of lookup().
        """
        node = self.lookup(path)
        raise KernelError(errno.EISDIR if isinstance(node, Directory) else errno.EPERM, path)

    def rename(self, _client: Client, old: str, new: str) -> NoReturn:
        """Refuse to rename a file or directory. Raises: KernelError EPERM, and the errors of lookup()."""
        self.lookup(old)
        self._split(new)
        raise KernelError(errno.EPERM, old)

    def symlink(self, _client: Client, path: str, _target: str) -> NoReturn:
        """Refuse to create a symbolic link at `path`.

        Raises: KernelError EEXIST (`path` exists), otherwise EPERM; also the errors of lookup().
        """
        self._absent(path)
        raise KernelError(errno.EPERM, path)

    def link(self, _client: Client, old: str, new: str) -> NoReturn:
        """Refuse to create a hard link at `new`.

        Raises: KernelError EEXIST (`new` exists), otherwise EPERM; also the errors of lookup().
        """
        self.lookup(old)
        self._absent(new)
        raise KernelError(errno.EPERM, new)

    def mknod(self, _client: Client, path: str, mode: int) -> NoReturn:
        """Refuse to create a special or regular file.

        Raises: KernelError EEXIST (`path` exists), EACCES (a regular file), otherwise EPERM; also the errors
        of lookup().
        """
        self._absent(path)
        raise KernelError(errno.EACCES if stat.S_IFMT(mode) in (0, stat.S_IFREG) else errno.EPERM, path)

    def readlink(self, _client: Client, path: str) -> NoReturn:
        """Refuse to read a link, because no node is a symbolic link.

        Raises: KernelError EINVAL, and the errors of lookup().
        """
        self.lookup(path)
        raise KernelError(errno.EINVAL, path)

    def truncate(self, _client: Client, path: str, size: int) -> None:
        """Do nothing, because control files have no size.

        Raises: KernelError EISDIR, EINVAL (a negative size), and the errors of lookup().
        """
        if size < 0:
            raise KernelError(errno.EINVAL, path)
        if isinstance(self.lookup(path), Directory):
            raise KernelError(errno.EISDIR, path)

    def chmod(self, _client: Client, path: str, mode: int) -> None:
        """Set the permission bits of a node, after the front end has checked the client's permission.

        Raises: the errors of lookup().
        """
        self.lookup(path).chmod(mode)

    def chown(self, _client: Client, path: str, uid: int, gid: int) -> None:
        """Set the owner and the group of a node, after the front end has checked the client's permission.

        Raises: the errors of lookup().
        """
        self.lookup(path).chown(uid, gid)

    def utimens(self, _client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times of a node in nanoseconds since the epoch; None leaves a time unchanged.

        Raises: the errors of lookup().
        """
        self.lookup(path).utimens(atime_ns, mtime_ns)

    def runs_guest(self, path: str) -> bool:
        """Return True if a write to the file at `path` runs guest code. Raises: the errors of lookup()."""
        node = self.lookup(path)
        return isinstance(node, File) and node.runs_guest

    def _directory(self, path: str) -> Directory:
        node = self.lookup(path)
        if not isinstance(node, Directory):
            raise KernelError(errno.ENOTDIR, path)
        return node

    def _split(self, path: str) -> tuple[Directory, str]:
        parent, _, name = path.rstrip("/").rpartition("/")
        return self._directory(parent), name

    def _absent(self, path: str) -> tuple[Directory, str]:
        directory, name = self._split(path)
        if _is_too_long(name):
            raise KernelError(errno.ENAMETOOLONG, name)
        if not name or directory.get(name) is not None:
            raise KernelError(errno.EEXIST, path)
        return directory, name


def _ignore(_path: str) -> None:
    """Do nothing: default of `on_removal`, used until a front end caches names."""


def _is_too_long(name: str) -> bool:
    # UTF-8 needs at most four bytes for a character, so short names need no encoding.
    return len(name) > NAME_MAX // 4 and len(os.fsencode(name)) > NAME_MAX
