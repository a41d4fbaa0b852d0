"""Mount: every request that a front end may make, with the types that cross that border."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Client(NamedTuple):
    """The process that a request comes from, in the daemon's pid and user namespace."""

    pid: int
    uid: int
    gid: int


class Stat(NamedTuple):
    """A node's attributes as stat(2) shows them; times in nanoseconds, size in bytes."""

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    blocks: int = 0
    rdev: int = 0


@dataclass(frozen=True, slots=True)
class StatFs:
    """statvfs(3) of a pseudo filesystem: it has a block size and nothing to count."""

    block_size: int = 4096
    name_max: int = 255


class Mount(Protocol):
    """A filesystem that a front end serves. Methods may be called from several threads at once.

    Paths are absolute and start at the mount's root. All methods raise KernelError with Linux's errno.
    """

    def getattr(self, path: str) -> Stat:
        """Attributes of the node at `path`; cheap, since the front end asks for every path component."""

    def fgetattr(self, handle: int) -> Stat:
        """Attributes of an open file, whose name may be gone."""

    def opendir(self, client: Client, path: str) -> None:
        """A directory is about to be listed."""

    def chdir(self, client: Client, path: str) -> None:
        """The client makes a directory its working directory, and names it so."""

    def readdir(self, path: str) -> list[str]:
        """Plain names in the directory, without "." and ".."."""

    def statfs(self) -> StatFs:
        """The whole filesystem's figures."""

    def open(self, client: Client, path: str, flags: int) -> int:
        """Open with open(2)'s flags, O_TRUNC included; returns the handle for the calls below."""

    def create(self, client: Client, path: str, mode: int, flags: int) -> int:
        """Make a regular file and open it."""

    def is_stream(self, handle: int) -> bool:
        """Whether lseek(2) on the handle has to answer ESPIPE."""

    def read(self, client: Client, handle: int, size: int, offset: int) -> bytes:
        """At most `size` bytes; b"" is the end of the file.

        Raises: WouldBlock when there is nothing yet; the caller answers EAGAIN or calls wait().
        """

    def write(self, client: Client, handle: int, data: bytes, offset: int) -> int:
        """Number of bytes taken. Raises: WouldBlock as read() does."""

    def wait(self, handle: int, timeout: float) -> None:
        """Return once the handle may have something to give, or after `timeout` seconds."""

    def give_up(self, client: Client, handle: int, error: int) -> None:
        """The client doesn't wait for what raised WouldBlock: it gets this errno instead."""

    def poll(self, handle: int, notify: Callable[[], None] | None) -> int:
        """Readiness as poll(2)'s mask; `notify` is called once, when the mask has changed."""

    def release(self, handle: int) -> None:
        """Forget the handle: its last descriptor was closed."""

    def truncate(self, client: Client, path: str, size: int) -> None:
        """truncate(2); O_TRUNC comes with open()."""

    def mkdir(self, client: Client, path: str, mode: int) -> None:
        """mkdir(2)."""

    def rmdir(self, client: Client, path: str) -> None:
        """rmdir(2)."""

    def unlink(self, client: Client, path: str) -> None:
        """unlink(2)."""

    def rename(self, client: Client, old: str, new: str) -> None:
        """rename(2)."""

    def symlink(self, client: Client, path: str, target: str) -> None:
        """Make `path` a symbolic link to `target`."""

    def readlink(self, path: str) -> str:
        """Where a symbolic link points."""

    def chmod(self, client: Client, path: str, mode: int) -> None:
        """Set the permission bits."""

    def chown(self, client: Client, path: str, uid: int, gid: int) -> None:
        """Set the owner; -1 leaves a field alone."""

    def utimens(self, client: Client, path: str, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times, in nanoseconds since the epoch; None leaves one alone."""

    def close(self) -> None:
        """The mount ends: wake every waiter, refuse further work."""
