"""OwnPaths: paths of the files in directories where clients change names, so that OPEN needs no libfuse.

While a request removes or changes a name, no path is recorded. Before such a request, the paths that it
changes are dropped, and the request waits until all opens in progress have ended. So no open uses a path that
has changed.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from time import sleep

from kprobefs.fuse.protocol import FUSE_RENAME, FUSE_RENAME2, FUSE_RMDIR, FUSE_ROOT_ID, FUSE_UNLINK

CHANGES = frozenset({FUSE_RENAME, FUSE_RENAME2, FUSE_RMDIR, FUSE_UNLINK})
"""Opcodes of the requests that remove or change names."""
_PAUSE = 0.0001
"""Seconds between two checks whether opens have ended."""


class OwnPaths:
    """Paths of regular files and directories by node id, with which an OPEN is answered without libfuse.

    If a node has no path here, libfuse answers the OPEN of the node.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Lock around each change of names, and around each new path."""
        self._paths: dict[int, str] = {}
        self._roots: dict[int, str] = {}
        """Node id -> path of a directory in the root. No client can rename or remove such a directory."""
        self._changing = 0
        """Number of requests in progress that change names."""
        self._changes = 0
        """Number of requests so far that change names, including those in progress."""
        self._numbers = count()
        self._opening: set[int] = set()
        """Numbers of the opens in progress, as begin_open() has returned them."""
        self._looked_up = threading.local()
        """The lookup of each thread, which expect() records and learn() reads.

        It consists of the directory's path, the name, and the value of `_changes` at the time.
        """

    def expect(self, directory: int, name: bytes) -> None:
        """Record that the calling thread looks up `name` in the directory with the node id `directory`."""
        above = "" if directory == FUSE_ROOT_ID else self._path(directory)
        self._looked_up.arguments = above, name, self._changes

    def learn(self, number: int, mode: int) -> None:
        """Record the path of the node that libfuse has found for the name of the last expect().

        `number`: node id. `mode`: st_mode of the file. Record nothing if the file is neither regular nor a
        directory, if a name has changed since expect(), or if the path of the file's directory is not known.
        """
        above, name, changes = getattr(self._looked_up, "arguments", (None, b"", 0))
        if above is None or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return
        path = _joined(above, name)
        with self._lock:
            if not above:
                self._roots[number] = path
            elif self._changes == changes and not self._changing:
                self._paths[number] = path

    def forget(self, number: int) -> None:
        """Drop the path of the node with the id `number`, which the host's kernel has forgotten."""
        self._paths.pop(number, None)
        self._roots.pop(number, None)

    def _path(self, number: int) -> str | None:
        return self._paths.get(number) or self._roots.get(number)

    def begin_open(self, number: int) -> tuple[int, str] | None:
        """Begin an open of the node with the id `number`; return (number of the open, path of the node).

        Return None if the node has no path here. The path stays valid until end_open() is called with the
        number of the open.
        """
        if number not in self._paths:
            return None
        opened = next(self._numbers)
        # Order matters, as in changing(): either the path is gone, or that method sees the open.
        self._opening.add(opened)
        path = self._paths.get(number)
        if path is None:
            self._opening.discard(opened)
            return None
        return opened, path

    def end_open(self, opened: int) -> None:
        """End the open that has the number `opened`."""
        self._opening.discard(opened)

    @contextmanager
    def changing(self, opcode: int, directory: int, name: bytes) -> Iterator[None]:
        """Drop the paths that a request may change, and record no path during the `with` block.

        The `with` block executes the request. `opcode`: opcode of the request. `directory` and `name`: node
        id of a directory, and the name that the request removes from it.
        """
        with self._lock:
            self._changing += 1
            self._changes += 1
            self._drop(opcode, directory, name)
        try:
            opened = self._opening.copy()
            while not opened.isdisjoint(self._opening):
                sleep(_PAUSE)
            yield
        finally:
            with self._lock:
                self._changing -= 1

    def _drop(self, opcode: int, directory: int, name: bytes) -> None:
        above = self._path(directory)
        if opcode in (FUSE_RENAME, FUSE_RENAME2) or above is None:
            self._paths.clear()
            return
        gone = _joined(above, name)
        for number, path in list(self._paths.items()):
            if path == gone or path.startswith(f"{gone}/"):
                del self._paths[number]


def _joined(directory: str, name: bytes) -> str:
    return f"{directory}/{name.decode('utf-8', 'surrogateescape')}"
