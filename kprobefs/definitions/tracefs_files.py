"""The files that definitions are applied to and saved from: a mount's, or those of a kernel in this process.

Names are relative to the mount's root; text has surrogates for bytes that are no UTF-8.
"""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.node_tree import CONTROL
from kprobefs.common.errors import CliError

if TYPE_CHECKING:
    from emulated_kernel.vfs.core.client import Client
    from emulated_kernel.vfs.core.node_tree import NodeTree
    from emulated_kernel.vfs.core.open_file import OpenFile

OUTSIDE = ("kprobes", "sysctl")
"""Directories beside the tracefs whose files definitions may name too, where the mount has them."""
READ_SIZE = 1 << 16
"""Bytes; a read that gives less has come to the file's end."""


def control_root(directory: str) -> Path:
    """Where a mount has machine/ and what else isn't its tracefs's."""
    unlisted = Path(directory, CONTROL)
    return unlisted if unlisted.is_dir() else Path(directory)


class Files(ABC):
    """Some files; all methods raise OSError."""

    @abstractmethod
    def read(self, name: str) -> str:
        """A file's contents, by as few requests as can be: each may be a hit."""

    @abstractmethod
    def write(self, name: str, text: str) -> None:
        """Write without O_TRUNC, which deletes the events that are there."""

    @abstractmethod
    def names(self, name: str) -> list[str]:
        """What a directory has."""

    @abstractmethod
    def directories(self, name: str) -> list[str]:
        """The directories among them."""

    @abstractmethod
    def mkdir(self, name: str) -> None:
        """mkdir(2)."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    def tracefs(self) -> str:
        """The directory that is a tracefs: "" or with a slash at its end. Raises: CliError."""
        for directory in ("tracing/", ""):
            if self.exists(f"{directory}dynamic_events"):
                return directory
        raise CliError("no tracefs is mounted there")


def read_all(read: Callable[[int], bytes]) -> str:
    """What a file gives by reads of READ_SIZE; one that gives less need not be the last."""
    data = b""
    while part := read(READ_SIZE):
        data += part
    return data.decode("utf-8", "surrogateescape")


def write_all(write: Callable[[bytes], int], text: str) -> None:
    """Some files take a word at a time."""
    left = text.encode("utf-8", "surrogateescape")
    while left and (taken := write(left)):
        left = left[taken:]


class HostFiles(Files):
    """Those that are mounted on a directory."""

    def __init__(self, directory: str) -> None:
        self._root = Path(directory)
        self._control_root = control_root(directory)

    def _path(self, name: str) -> Path:
        return (self._control_root if name.partition("/")[0] in OUTSIDE else self._root) / name

    def read(self, name: str) -> str:
        """See Files."""
        descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_all(lambda size: os.read(descriptor, size))
        finally:
            os.close(descriptor)

    def write(self, name: str, text: str) -> None:
        """See Files."""
        descriptor = os.open(self._path(name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_all(lambda data: os.write(descriptor, data), text)
        finally:
            os.close(descriptor)

    def names(self, name: str) -> list[str]:
        """See Files."""
        return os.listdir(self._path(name))

    def directories(self, name: str) -> list[str]:
        """See Files."""
        with os.scandir(self._path(name)) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def mkdir(self, name: str) -> None:
        """See Files."""
        self._path(name).mkdir()

    def exists(self, name: str) -> bool:
        """See Files."""
        return self._path(name).exists()


class TreeFiles(Files):
    """Those of a kernel in this process, used by no task of its guest. Needs the control lock."""

    def __init__(self, tree: NodeTree, client: Client) -> None:
        self._tree = tree
        self._client = client

    def read(self, name: str) -> str:
        """See Files."""
        with self._opened(name, os.O_RDONLY) as opened:
            position = 0

            def read(size: int) -> bytes:
                nonlocal position
                data = opened.read(size, position)
                position += len(data)
                return data

            return read_all(read)

    def write(self, name: str, text: str) -> None:
        """See Files."""
        with self._opened(name, os.O_WRONLY) as opened:
            write_all(lambda data: opened.write(data, 0), text)

    def names(self, name: str) -> list[str]:
        """See Files."""
        with _as_the_hosts():
            return [entry.name for entry in self._tree.readdir(f"/{name}")[2:]]

    def directories(self, name: str) -> list[str]:
        """See Files."""
        with _as_the_hosts():
            return [entry.name for entry in self._tree.readdir(f"/{name}")[2:] if stat.S_ISDIR(entry.kind)]

    def mkdir(self, name: str) -> None:
        """See Files."""
        with _as_the_hosts():
            self._tree.mkdir(self._client, f"/{name}", 0o755)

    def exists(self, name: str) -> bool:
        """See Files."""
        with suppress(FileNotFoundError), _as_the_hosts():
            self._tree.lookup(f"/{name}")
            return True
        return False

    @contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[OpenFile]:
        with _as_the_hosts():
            opened = self._tree.open(f"/{name}", flags, self._client)
            try:
                yield opened
            finally:
                self._tree.release(opened)


@contextmanager
def _as_the_hosts() -> Iterator[None]:
    """An errno arrives as from a system call: FileNotFoundError and so on."""
    try:
        yield
    except KernelError as error:
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number)) from error
