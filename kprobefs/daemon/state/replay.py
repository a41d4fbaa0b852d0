"""Replay: applies the entries of a journal to the files of another kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.open_file import OpenFile, Piece, finish
from kprobefs.daemon.state.journal import Entry
from kprobefs.definitions.loader import Loader
from kprobefs.definitions.syntax import Line
from kprobefs.definitions.tracefs_files import TreeFiles

MODULES = "machine/modules"
PLACE = "what was defined"
"""Name of the journal in error messages about its lines."""


class Replay:
    """Replays a journal. The caller holds the control lock, or is the kernel's only user."""

    def __init__(self, tree: NodeTree, client: Client) -> None:
        """Prepare a replay by `client` on `tree`, which has all files of the kernel."""
        self._tree = tree
        self._client = client
        self._opened: dict[int, OpenFile] = {}
        """Handle of an open file in the journal -> open file of the kernel.

        A long write(2) has several entries, and entries of other files may come between them.
        """

    def run(self, entries: Iterable[Entry]) -> Iterator[str]:
        """Apply all entries; yield a message for each change that succeeded earlier and fails now.

        Raises: KeyError, TypeError, ValueError (the entries are not those of a journal of kprobefs).
        """
        for entry in entries:
            match entry:
                case {"modules": list() as names}:
                    for name in names:
                        yield from self._write(MODULES, -1, f"load {name}\n".encode())
                    self._release(-1)
                case {"lines": list() as texts}:
                    lines = [Line(PLACE, number, text) for number, text in enumerate(texts, 1)]
                    yield from Loader(TreeFiles(self._tree, self._client)).apply(lines)
                case {"write": str() as path, "handle": int() as handle, "data": str() as data}:
                    failed = bool(entry["failed"])
                    is_part = bool(entry.get("part"))
                    yield from self._write(path, handle, data.encode("latin-1"), failed, is_part)
                case {"release": int() as handle}:
                    self._release(handle)
                case {"truncate": str() as path}:
                    yield from self._try(path, partial(self._truncate, path))
                case {"mkdir": str() as path}:
                    yield from self._try(path, partial(self._tree.mkdir, self._client, f"/{path}", 0o755))
                case {"rmdir": str() as path}:
                    yield from self._try(path, partial(self._tree.rmdir, self._client, f"/{path}"))
        # These files were open when the daemon ended.
        for handle in list(self._opened):
            self._release(handle)

    def _write(
        self, path: str, handle: int, data: bytes, failed: bool = False, is_part: bool = False
    ) -> Iterator[str]:
        try:
            opened = self._open(path, handle)
            # A daemon of an earlier version wrote an entry for a whole long write.
            for piece in [Piece(data, True)] if is_part else opened.pieces(data):
                finish(opened.begin_write(piece.data, opened.next_offset, is_part=piece.is_part))
        except KernelError as error:
            if not failed:
                yield f"{path}: {error.strerror}: {data[:80].decode('latin-1')}"

    def _open(self, path: str, handle: int) -> OpenFile:
        if handle not in self._opened:
            self._opened[handle] = self._tree.open(f"/{path}", os.O_WRONLY, self._client)
        return self._opened[handle]

    def _release(self, handle: int) -> None:
        if opened := self._opened.pop(handle, None):
            self._tree.release(opened)

    def _truncate(self, path: str) -> None:
        self._tree.release(self._tree.open(f"/{path}", os.O_WRONLY | os.O_TRUNC, self._client))

    def _try(self, path: str, action: Callable[[], None]) -> Iterator[str]:
        try:
            action()
        except KernelError as error:
            yield f"{path}: {error.strerror}"
