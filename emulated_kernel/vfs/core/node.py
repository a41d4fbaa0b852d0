"""Nodes: named files with mode, owner, times and inode number, as in kernfs, and directories of nodes."""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import ClassVar, Generic, TypeVar

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.vfs.core.client import Client, DirEntry, Stat

PERMISSION_BITS = 0o7777
"""Mask of the mode's bits that chmod(2) changes."""
_MIN_LIMIT = 64
"""Number of _Member objects below which a DynamicDirectory does not look for those of removed objects."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Owner:
    """The user who created the mount, and this user's group.

    They own each node until chown(2) changes the node's owner.
    """

    uid: int = 0
    gid: int = 0

    def is_privileged(self, client: Client) -> bool:
        """Return True if `client` is root or the owner, and so is treated as having CAP_SYSLOG."""
        return client.uid in (0, self.uid)


class Node:
    """A file or directory with a name. A node is in at most one directory."""

    kind: ClassVar[int] = stat.S_IFREG
    is_paged: ClassVar[bool] = False
    """Whether open files of the node implement OpenFile.read_page()."""
    is_listed: ClassVar[bool] = True
    """Whether listings of the node's directory contain the node."""
    __slots__ = ("_gid", "_permissions", "_times_ns", "_uid", "ino", "is_cached", "name", "parent")

    def __init__(self, mode: int) -> None:
        now = time.time_ns()
        self._permissions = mode & PERMISSION_BITS
        self._uid: int | None = None
        self._gid: int | None = None
        self._times_ns = (now, now, now)
        self.ino = 0
        self.name = ""
        self.parent: Directory | None = None
        self.is_cached = False
        """Whether NodeTree has the node in its cache of paths.

        If so, the node is certainly in the tree, and clients cannot remove a directory above the node.
        """

    @property
    def mode(self) -> int:
        """File type and permission bits."""
        return self.kind | self._permissions

    @property
    def nlink(self) -> int:
        """Number of hard links, as stat(2) shows it."""
        return 1

    def number(self, numbers: Iterator[int]) -> int:
        """Return the inode number of the node. The first call takes the number from `numbers`."""
        if self.ino == 0:
            self.ino = next(numbers)
        return self.ino

    def stat(self, owner: Owner) -> Stat:
        """Return the attributes of the node. `owner` supplies the user and group that chown(2) has not set.

        The size is 0, as in debugfs and tracefs.
        """
        atime, mtime, ctime = self._times_ns
        return Stat(
            ino=self.ino,
            mode=self.mode,
            nlink=self.nlink,
            uid=owner.uid if self._uid is None else self._uid,
            gid=owner.gid if self._gid is None else self._gid,
            atime_ns=atime,
            mtime_ns=mtime,
            ctime_ns=ctime,
            is_paged=self.is_paged,
        )

    def chmod(self, mode: int) -> None:
        """Set the permission bits of the node to the permission bits of `mode`."""
        self._permissions = mode & PERMISSION_BITS
        self._touch()

    def chown(self, uid: int, gid: int) -> None:
        """Set the user and the group of the node; -1 leaves either unchanged."""
        if uid != -1:
            self._uid = uid
        if gid != -1:
            self._gid = gid
        self._touch()

    def inherit(self, uid: int | None, gid: int | None) -> None:
        """Take over the user and the group of the directory above, in which the node is being created.

        `uid` and `gid`: the ids that chown(2) has set for this directory; None if chown(2) has set none.
        Mirrors: fs/tracefs/inode.c:tracefs_create_file (v6.1).
        """
        self._uid = uid
        self._gid = gid

    def utimens(self, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set access and modification time in nanoseconds since the epoch; None leaves a time unchanged."""
        atime, mtime, _ = self._times_ns
        self._times_ns = (
            atime if atime_ns is None else atime_ns,
            mtime if mtime_ns is None else mtime_ns,
            time.time_ns(),
        )

    def check_attached(self) -> None:
        """Check that the node is still in the tree.

        Raises: KernelError ENODEV (the kernel object of the node, or of a directory above it, was removed).
        """
        if self.is_cached:
            return
        node = self
        while node.parent is not None:
            if node.parent.get(node.name) is not node:
                raise KernelError(errno.ENODEV, "the file's object was removed")
            node = node.parent

    def count_open(self, change: int) -> None:
        """Add `change`, 1 for an open and -1 for a close, to `open_files` of the directories above the node.

        Only a directory whose parent has `is_kept_by_open_files` set counts open files.
        """
        if self.is_cached:
            return
        directory = self.parent
        while directory is not None and directory.parent is not None:
            if directory.parent.is_kept_by_open_files:
                directory.open_files += change
            directory = directory.parent

    def _touch(self) -> None:
        atime, mtime, _ = self._times_ns
        self._times_ns = (atime, mtime, time.time_ns())


class Directory(Node):
    """A directory with fixed children: name -> node."""

    kind = stat.S_IFDIR
    is_kept_by_open_files: ClassVar[bool] = False
    """Whether rmdir(2) of a subdirectory returns EBUSY while files in the subdirectory are open.

    A class that sets this to True must also set `names_are_clients` to True.
    """
    names_are_clients: ClassVar[bool] = False
    """Whether clients create and remove names in the directory. If False, only the kernel does."""
    __slots__ = ("_children", "_subdirectories", "open_files")

    def __init__(self, mode: int, children: Mapping[str, Node]) -> None:
        super().__init__(mode)
        self._children: dict[str, Node] = {}
        self._subdirectories = 0
        self.open_files = 0
        """Number of files that are open in the directory and in its subdirectories.

        The files are counted only if `is_kept_by_open_files` of the parent is set.
        """
        for name, child in children.items():
            self._adopt(name, child)
            self._children[name] = child
            self._subdirectories += isinstance(child, Directory) and child.is_listed

    @property
    def nlink(self) -> int:
        """Number of hard links: two, and one for the ".." of each subdirectory."""
        return 2 + self._subdirectories

    def inherit(self, uid: int | None, gid: int | None) -> None:
        """Set the user and the group of the directory and of its fixed children; see Node.inherit."""
        super().inherit(uid, gid)
        for child in self._children.values():
            child.inherit(uid, gid)

    def get(self, name: str) -> Node | None:
        """Return the child called `name`, or None if there is no such child."""
        return self._children.get(name)

    def names(self) -> list[str]:
        """Return the names of the children that listings show."""
        return [name for name, child in self._children.items() if child.is_listed]

    def entries(self, numbers: Iterator[int]) -> list[DirEntry]:
        """Return the entries for readdir(3). Children without an inode number take one from `numbers`."""
        listed = ((name, child) for name, child in self._children.items() if child.is_listed)
        return [DirEntry(name, child.kind, child.number(numbers)) for name, child in listed]

    def mkdir(self, name: str, mode: int) -> None:
        """Create a subdirectory. Raises: KernelError EPERM, unless a subclass overrides this method."""
        raise KernelError(errno.EPERM, f"no directory can be made here: {name} ({mode:o})")

    def rmdir(self, name: str) -> None:
        """Remove a subdirectory. Raises: KernelError EPERM, unless a subclass overrides this method."""
        raise KernelError(errno.EPERM, f"{name} can't be removed")

    def _adopt(self, name: str, child: Node) -> None:
        if child.parent is not None:
            raise ValueError(f"{name}: the node is already called {child.name}")
        child.name = name
        child.parent = self


class UnlistedDirectory(Directory):
    """A directory that can be opened by name, but that listings omit."""

    is_listed = False
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Objects(Generic[T]):
    """Named kernel objects that are created and removed; a DynamicDirectory has a subdirectory for each."""

    names: Callable[[], Collection[str]]
    """Function that returns the names of the current objects, in the order of readdir(3).

    len() of the result must be fast, because each stat(2) of the directory calls it for st_nlink.
    """
    find: Callable[[str], T | None]
    """Function that takes a name, and returns the object of this name, or None if there is no such object.

    While an object exists, each call with the object's name must return the same object.
    """
    make: Callable[[T], Directory]
    """Function that creates the directory that shows an object."""


@dataclass(slots=True)
class _Member(Generic[T]):
    """An object of a DynamicDirectory, with the inode number and the node of its subdirectory.

    The first listing sets the number, and the first lookup creates the node.
    """

    object: T
    ino: int = 0
    directory: Directory | None = None
    owner: tuple[int | None, int | None] | None = None
    """(uid, gid) that the subdirectory inherits; None if it inherits those of the DynamicDirectory.

    A pair is set if chown(2) has changed those of the DynamicDirectory since the object was created. It has
    the ids from before that, in which None means that chown(2) had set none.
    """

    def number(self, numbers: Iterator[int]) -> int:
        """Return the inode number of the object's subdirectory.

        If the subdirectory has no number, give it the next of `numbers`. This works before the node of the
        subdirectory exists.
        """
        if self.directory is not None:
            return self.directory.number(numbers)
        self.ino = self.ino or next(numbers)
        return self.ino


class DynamicDirectory(Directory, Generic[T]):
    """A directory with a subdirectory for each kernel object, in addition to fixed children.

    The node of a subdirectory exists as long as its object. A new object of the same name gets a new node and
    a new inode number. Files that are still open in the old node return ENODEV.
    """

    __slots__ = ("_limit", "_members", "_mkdir", "_objects", "_rmdir", "_shares_owner")

    def __init__(
        self,
        mode: int,
        objects: Objects[T],
        children: Mapping[str, Node] | None = None,
        mkdir: Callable[[str], object] | None = None,
        rmdir: Callable[[str], object] | None = None,
        *,
        shares_owner: bool = True,
    ) -> None:
        """Create the directory. `children`: the fixed children, by name.

        `mkdir` and `rmdir`: functions that create or remove the object of a given name; None: not supported.
        `shares_owner`: whether new subdirectories get the user and group of this directory. If False, they
        get those of the mount's Owner.
        """
        super().__init__(mode, children or {})
        self._shares_owner = shares_owner
        self._objects = objects
        self._members: dict[str, _Member[T]] = {}
        self._limit = _MIN_LIMIT
        self._mkdir = mkdir
        self._rmdir = rmdir

    @property
    def nlink(self) -> int:
        """Number of hard links: two, and one for the ".." of each subdirectory."""
        return super().nlink + len(self._objects.names())

    def get(self, name: str) -> Node | None:
        """Return the fixed child `name`, or else the subdirectory of the object `name`, or else None."""
        fixed = self._children.get(name)
        if fixed is not None:
            return fixed
        member = self._member(name)
        if member is None:
            return None
        if member.directory is None:
            member.directory = self._objects.make(member.object)
            member.directory.ino = member.ino
            if self._shares_owner:
                member.directory.inherit(*(member.owner or (self._uid, self._gid)))
            self._adopt(name, member.directory)
        return member.directory

    def _member(self, name: str) -> _Member[T] | None:
        found = self._objects.find(name)
        if found is None:
            self._members.pop(name, None)
            return None
        member = self._members.get(name)
        if member is None or member.object is not found:
            if len(self._members) >= self._limit:
                self._forget_removed()
            member = _Member(found)
            self._members[name] = member
        return member

    def _forget_removed(self) -> None:
        """Drop the members of removed objects, and set the number of members at which to do so again.

        A lookup of a removed object's name also drops that object's member.
        """
        alive = set(self._objects.names())
        self._members = {name: member for name, member in self._members.items() if name in alive}
        self._limit = max(_MIN_LIMIT, 2 * len(self._members))

    def names(self) -> list[str]:
        """Return the names of the fixed children, and then the names of the objects.

        A fixed child hides an object of the same name.
        """
        return [*super().names(), *(name for name in self._objects.names() if name not in self._children)]

    def entries(self, numbers: Iterator[int]) -> list[DirEntry]:
        """Return the entries for readdir(3), without creating nodes for the objects' subdirectories.

        Children and subdirectories without an inode number take one from `numbers`.
        """
        entries = super().entries(numbers)
        for name in self._objects.names():
            if name not in self._children and (member := self._member(name)) is not None:
                entries.append(DirEntry(name, stat.S_IFDIR, member.number(numbers)))
        return entries

    def chown(self, uid: int, gid: int) -> None:
        """Set the user and the group of the directory. Subdirectories of existing objects keep theirs."""
        for name in self._objects.names():
            member = self._member(name)
            if member is not None and member.owner is None:
                member.owner = self._uid, self._gid
        super().chown(uid, gid)

    def mkdir(self, name: str, mode: int) -> None:
        """Create the object `name`, shown as a subdirectory. Raises: KernelError EPERM (not supported)."""
        if self._mkdir is None:
            super().mkdir(name, mode)
        else:
            self._mkdir(name)

    def rmdir(self, name: str) -> None:
        """Remove the object `name`. Raises: KernelError EPERM (not supported, or `name` is a fixed child)."""
        if self._rmdir is None or super().get(name) is not None:
            super().rmdir(name)
        else:
            self._rmdir(name)
            self._members.pop(name, None)
