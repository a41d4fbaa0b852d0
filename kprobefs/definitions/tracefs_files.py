"""Files: access to a tracefs, through a mount or inside the daemon, to apply and save definitions.

Names are relative to the mount's root. Text has surrogates for bytes that are not UTF-8.
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
"""Names of directories outside of the tracefs. Definition files may name the files in them, too."""
READ_SIZE = 1 << 16
"""Number of bytes that one read requests."""


def control_root(directory: str) -> Path:
    """Return the directory that contains kprobes/, machine/ and sysctl/ in the mount on `directory`."""
    unlisted = Path(directory, CONTROL)
    return unlisted if unlisted.is_dir() else Path(directory)


class Files(ABC):
    """Interface to the files of a mount. All methods raise OSError."""

    @abstractmethod
    def read(self, name: str) -> str:
        """Return the content of the file `name`. Make few requests, because each of them may hit a probe."""

    @abstractmethod
    def write(self, name: str, text: str) -> None:
        """Write `text` to the file `name`. Open it without O_TRUNC, which would delete existing events."""

    def define(self, name: str, text: str) -> None:
        """Write the definition `text` to `name`, which is the path of the file dynamic_events."""
        self.write(name, text)

    @abstractmethod
    def mode(self, name: str) -> int:
        """Return the st_mode of the file `name`."""

    @abstractmethod
    def names(self, name: str) -> list[str]:
        """Return the names of all entries of the directory `name`."""

    @abstractmethod
    def directories(self, name: str) -> list[str]:
        """Return the names of the subdirectories of the directory `name`."""

    @abstractmethod
    def mkdir(self, name: str) -> None:
        """Make the directory `name`."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return True if the file `name` exists."""

    def configured_events(self, directory: str) -> Iterator[str]:
        """Yield group/name of each event that may have a filter, triggers or soft mode in a trace array.

        `directory` is the array's directory: empty, or with a slash at its end. Events are sorted by group.
        """
        for group in sorted(self.directories(f"{directory}events")):
            for event in sorted(self.directories(f"{directory}events/{group}")):
                yield f"{group}/{event}"

    def tracefs(self) -> str:
        """Return the directory of the tracefs: "" or with a slash at its end.

        Raises: CliError (the mount has no tracefs).
        """
        for directory in ("tracing/", ""):
            if self.exists(f"{directory}dynamic_events"):
                return directory
        raise CliError("no tracefs is mounted there")


def read_all(read: Callable[[int], bytes]) -> str:
    """Return all data of a file. `read` takes a size, and may return less before the end of the file."""
    data = b""
    while part := read(READ_SIZE):
        data += part
    return data.decode("utf-8", "surrogateescape")


def write_all(write: Callable[[bytes], int], text: str) -> None:
    """Write all of the text by repeated writes, because some files accept only one word from each write.

    `write` returns the number of bytes that it has written.
    """
    left = text.encode("utf-8", "surrogateescape")
    while left and (taken := write(left)):
        left = left[taken:]


class HostFiles(Files):
    """The files of a mount, accessed by system calls of this process."""

    def __init__(self, directory: str) -> None:
        self._root = Path(directory)
        self._control_root = control_root(directory)

    def _path(self, name: str) -> Path:
        return (self._control_root if name.partition("/")[0] in OUTSIDE else self._root) / name

    def read(self, name: str) -> str:
        """Return the content of the file `name`."""
        descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_all(lambda size: os.read(descriptor, size))
        finally:
            os.close(descriptor)

    def write(self, name: str, text: str) -> None:
        """Write `text` to the file `name`, which is opened without O_TRUNC."""
        descriptor = os.open(self._path(name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_all(lambda data: os.write(descriptor, data), text)
        finally:
            os.close(descriptor)

    def mode(self, name: str) -> int:
        """Return the st_mode of the file `name`."""
        return self._path(name).stat().st_mode

    def names(self, name: str) -> list[str]:
        """Return the names of all entries of the directory `name`."""
        return os.listdir(self._path(name))

    def directories(self, name: str) -> list[str]:
        """Return the names of the subdirectories of the directory `name`."""
        with os.scandir(self._path(name)) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def mkdir(self, name: str) -> None:
        """Make the directory `name`."""
        self._path(name).mkdir()

    def exists(self, name: str) -> bool:
        """Return True if the file `name` exists."""
        return self._path(name).exists()


class TreeFiles(Files):
    """The files of a kernel in this process, accessed without system calls and without guest tasks.

    The caller must hold the control lock.
    """

    def __init__(self, tree: NodeTree, client: Client) -> None:
        self._tree = tree
        self._client = client

    def read(self, name: str) -> str:
        """Return the content of the file `name`."""
        with self._opened(name, os.O_RDONLY) as opened:
            position = 0

            def read(size: int) -> bytes:
                nonlocal position
                data = opened.read(size, position)
                position += len(data)
                return data

            return read_all(read)

    def write(self, name: str, text: str) -> None:
        """Write `text` to the file `name`, which is opened without O_TRUNC."""
        with self._opened(name, os.O_WRONLY) as opened:
            write_all(lambda data: opened.write(data, opened.next_offset), text)

    def mode(self, name: str) -> int:
        """Return the st_mode of the file `name`."""
        with host_errors():
            return self._tree.getattr(f"/{name}").mode

    def names(self, name: str) -> list[str]:
        """Return the names of all entries of the directory `name`."""
        with host_errors():
            return [entry.name for entry in self._tree.readdir(f"/{name}")[2:]]

    def directories(self, name: str) -> list[str]:
        """Return the names of the subdirectories of the directory `name`."""
        with host_errors():
            return [entry.name for entry in self._tree.readdir(f"/{name}")[2:] if stat.S_ISDIR(entry.kind)]

    def mkdir(self, name: str) -> None:
        """Make the directory `name`."""
        with host_errors():
            self._tree.mkdir(self._client, f"/{name}", 0o755)

    def exists(self, name: str) -> bool:
        """Return True if the file `name` exists."""
        with suppress(FileNotFoundError), host_errors():
            self._tree.lookup(f"/{name}")
            return True
        return False

    @contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[OpenFile]:
        with host_errors():
            opened = self._tree.open(f"/{name}", flags, self._client)
            try:
                yield opened
            finally:
                self._tree.release(opened)


@contextmanager
def host_errors() -> Iterator[None]:
    """Convert a KernelError of a `with` block to the OSError of a system call, such as FileNotFoundError."""
    try:
        yield
    except KernelError as error:
        raise host_error(error) from error


def host_error(error: KernelError) -> OSError:
    """Return the OSError that a system call raises for the errno of `error`, such as FileNotFoundError."""
    number = error.errno or errno.EIO
    return OSError(number, os.strerror(number))
