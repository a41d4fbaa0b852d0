"""Nodes with modes, owners, times and inode numbers, as kernfs keeps them, and directories of them."""

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
_FEW = 64
"""Nodes of objects that a directory keeps without looking whether they still exist."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom nodes belong to that were never chown(2)ed: the user who mounts."""

    uid: int = 0
    gid: int = 0

    def is_privileged(self, client: Client) -> bool:
        """Whether `client` counts as holding CAP_SYSLOG: root, or whose kernel it is."""
        return client.uid in (0, self.uid)


class Node:
    """Something with a name. A node sits in one directory at most."""

    kind: ClassVar[int] = stat.S_IFREG
    is_paged: ClassVar[bool] = False
    """It has read_page()."""
    is_listed: ClassVar[bool] = True
    """Listings show it."""
    __slots__ = ("_gid", "_permissions", "_times_ns", "_uid", "ino", "name", "parent")

    def __init__(self, mode: int) -> None:
        now = time.time_ns()
        self._permissions = mode & PERMISSION_BITS
        self._uid: int | None = None
        self._gid: int | None = None
        self._times_ns = (now, now, now)
        self.ino = 0
        self.name = ""
        self.parent: Directory | None = None

    @property
    def mode(self) -> int:
        """File type and permission bits."""
        return self.kind | self._permissions

    @property
    def nlink(self) -> int:
        """Number of names, as stat(2) counts them."""
        return 1

    def number(self, numbers: Iterator[int]) -> int:
        """The inode number, taken from `numbers` when first asked for."""
        if self.ino == 0:
            self.ino = next(numbers)
        return self.ino

    def stat(self, owner: Owner) -> Stat:
        """Attributes, with `owner` where nobody changed it. Size is 0, as in debugfs and tracefs."""
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
        """Replace the permission bits."""
        self._permissions = mode & PERMISSION_BITS
        self._touch()

    def chown(self, uid: int, gid: int) -> None:
        """Replace owner and group; -1 leaves one alone."""
        if uid != -1:
            self._uid = uid
        if gid != -1:
            self._gid = gid
        self._touch()

    def utimens(self, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set access and modification time, in nanoseconds since the epoch; None leaves one alone."""
        atime, mtime, _ = self._times_ns
        self._times_ns = (
            atime if atime_ns is None else atime_ns,
            mtime if mtime_ns is None else mtime_ns,
            time.time_ns(),
        )

    def check_attached(self) -> None:
        """Raises: KernelError ENODEV (once an object was removed: the parents' own lookups don't find it)."""
        node = self
        while node.parent is not None:
            if node.parent.get(node.name) is not node:
                raise KernelError(errno.ENODEV, "the file's object was removed")
            node = node.parent

    def count_open(self, change: int) -> None:
        """The node was opened (1) or closed (-1): all directories above it have to know."""
        directory = self.parent
        while directory is not None:
            directory.open_files += change
            directory = directory.parent

    def _touch(self) -> None:
        atime, mtime, _ = self._times_ns
        self._times_ns = (atime, mtime, time.time_ns())


class Directory(Node):
    """A directory with fixed children; a literal with modes beside names."""

    kind = stat.S_IFDIR
    is_kept_by_open_files: ClassVar[bool] = False
    """rmdir(2) of one of its subdirectories is EBUSY while files are open in that."""
    __slots__ = ("_children", "_subdirectories", "open_files")

    def __init__(self, mode: int, children: Mapping[str, Node]) -> None:
        super().__init__(mode)
        self._children: dict[str, Node] = {}
        self._subdirectories = 0
        self.open_files = 0
        """Files open now in it and below it."""
        for name, child in children.items():
            self._adopt(name, child)
            self._children[name] = child
            self._subdirectories += isinstance(child, Directory) and child.is_listed

    @property
    def nlink(self) -> int:
        """Two, and one for each subdirectory's ".."."""
        return 2 + self._subdirectories

    def get(self, name: str) -> Node | None:
        """The child called `name`; a dictionary lookup, not a scan."""
        return self._children.get(name)

    def names(self) -> list[str]:
        """Names of all children that are listed."""
        return [name for name, child in self._children.items() if child.is_listed]

    def entries(self, numbers: Iterator[int]) -> list[DirEntry]:
        """What readdir(3) shows of the children; `numbers` has the inode numbers of those without one."""
        listed = ((name, child) for name, child in self._children.items() if child.is_listed)
        return [DirEntry(name, child.kind, child.number(numbers)) for name, child in listed]

    def mkdir(self, name: str, mode: int) -> None:
        """mkdir(2) in this directory. Raises: KernelError EPERM (unless a subclass makes directories)."""
        raise KernelError(errno.EPERM, f"no directory can be made here: {name} ({mode:o})")

    def rmdir(self, name: str) -> None:
        """rmdir(2) in this directory. Raises: KernelError EPERM (unless a subclass removes directories)."""
        raise KernelError(errno.EPERM, f"{name} can't be removed")

    def _adopt(self, name: str, child: Node) -> None:
        if child.parent is not None:
            raise ValueError(f"{name}: the node is already called {child.name}")
        child.name = name
        child.parent = self


class UnlistedDirectory(Directory):
    """One that is there for who knows its name."""

    is_listed = False
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Objects(Generic[T]):
    """Where a DynamicDirectory gets its subdirectories: named objects of the kernel that come and go."""

    names: Callable[[], Collection[str]]
    """Names now, in the order of readdir; len() of it must be cheap, since nlink is made of it."""
    find: Callable[[str], T | None]
    """The object of that name; the same one as long as it exists."""
    make: Callable[[T], Directory]
    """The directory that shows an object."""


@dataclass(slots=True)
class _Member(Generic[T]):
    """An object of a DynamicDirectory; a listing gives it a number, and looking it up its directory."""

    object: T
    ino: int = 0
    directory: Directory | None = None

    def number(self, numbers: Iterator[int]) -> int:
        """The inode number of its directory, whether that was made or not."""
        if self.directory is not None:
            return self.directory.number(numbers)
        self.ino = self.ino or next(numbers)
        return self.ino


class DynamicDirectory(Directory, Generic[T]):
    """A directory with a subdirectory for each of some objects, beside fixed children.

    A node lives as long as its object: a new object of an old name gets a new node and inode number,
    and files still open under the old one are detached.
    """

    __slots__ = ("_limit", "_members", "_mkdir", "_objects", "_rmdir")

    def __init__(
        self,
        mode: int,
        objects: Objects[T],
        children: Mapping[str, Node] | None = None,
        mkdir: Callable[[str], object] | None = None,
        rmdir: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(mode, children or {})
        self._objects = objects
        self._members: dict[str, _Member[T]] = {}
        self._limit = _FEW
        self._mkdir = mkdir
        self._rmdir = rmdir

    @property
    def nlink(self) -> int:
        """Two, and one for each subdirectory's ".."."""
        return super().nlink + len(self._objects.names())

    def get(self, name: str) -> Node | None:
        """The fixed child or the object's directory called `name`."""
        fixed = self._children.get(name)
        if fixed is not None:
            return fixed
        member = self._member(name)
        if member is None:
            return None
        if member.directory is None:
            member.directory = self._objects.make(member.object)
            member.directory.ino = member.ino
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
            member = self._members[name] = _Member(found)
        return member

    def _forget_removed(self) -> None:
        """Most objects go without anybody asking for their names again."""
        alive = set(self._objects.names())
        self._members = {name: member for name, member in self._members.items() if name in alive}
        self._limit = max(_FEW, 2 * len(self._members))

    def names(self) -> list[str]:
        """Names of the fixed children, then of the objects; a fixed child hides an object of its name."""
        return [*super().names(), *(name for name in self._objects.names() if name not in self._children)]

    def entries(self, numbers: Iterator[int]) -> list[DirEntry]:
        """As of a Directory; directories of objects aren't made for it."""
        entries = super().entries(numbers)
        for name in self._objects.names():
            if name not in self._children and (member := self._member(name)) is not None:
                entries.append(DirEntry(name, stat.S_IFDIR, member.number(numbers)))
        return entries

    def mkdir(self, name: str, mode: int) -> None:
        """Make an object. Raises: KernelError EPERM (none can be made)."""
        if self._mkdir is None:
            super().mkdir(name, mode)
        else:
            self._mkdir(name)

    def rmdir(self, name: str) -> None:
        """Remove an object. Raises: KernelError EPERM (none can be removed, or for a fixed child)."""
        if self._rmdir is None or super().get(name) is not None:
            super().rmdir(name)
        else:
            self._rmdir(name)
            self._members.pop(name, None)
