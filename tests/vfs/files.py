"""Access to files of a NodeTree as root."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.open_file import OpenFile, finish

ROOT = Client(1, 0, 0)


def opened(tree: NodeTree, path: str, flags: int = os.O_RDONLY) -> OpenFile:
    return tree.open(path, flags, ROOT)


def read(tree: NodeTree, path: str, client: Client = ROOT) -> str:
    file = tree.open(path, os.O_RDONLY, client)
    text = file.read(1 << 20, 0).decode("utf-8", "surrogateescape")
    tree.release(file)
    return text


def write(tree: NodeTree, path: str, text: str | bytes, flags: int = os.O_WRONLY) -> int:
    """Write to a file, close it in any case, and return the number of bytes taken."""
    file = tree.open(path, flags, ROOT)
    data = text if isinstance(text, bytes) else text.encode()
    try:
        prepared = file.prepare(ROOT, data) if file.node.reads_host else None
        return finish(file.begin_write(data, 0, prepared))
    finally:
        tree.release(file)


def truncate(tree: NodeTree, path: str) -> None:
    """Open a file with O_TRUNC, as `> path` does, and close it."""
    tree.release(tree.open(path, os.O_WRONLY | os.O_TRUNC, ROOT))


def names(tree: NodeTree, path: str) -> list[str]:
    """Return the names of a directory's entries, without "." and ".."."""
    return [entry.name for entry in tree.readdir(path)][2:]


def assert_errno(number: int) -> AbstractContextManager[object]:
    return pytest.raises(KernelError, match=rf"Errno {number}\b")


def name_of(action: Callable[[], object]) -> str:
    """Return the name of the errno that `action` raises, or "None"."""
    try:
        action()
    except KernelError as error:
        return error.name
    return "None"
