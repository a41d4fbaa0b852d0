"""The filter files of a whole kernel, with real hits."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.events.event_filters import GROUP_FILTER_TEXT
from emulated_kernel.vfs.core.node_tree import NodeTree
from tests.vfs.files import assert_errno, opened, read, write

GROUP = "/tracing/events/kprobes"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as booted:
        yield booted


@pytest.fixture
def tree(kernel: Kernel) -> Iterator[NodeTree]:
    """Yield a file system with two events on strlen, of which the first is enabled."""
    made = kernel.filesystem()
    write(made, "/kprobe_events", "p:a strlen s=+0(%di):string\np:b strlen n=%di\n")
    write(made, f"{GROUP}/a/enable", "1")
    yield made
    write(made, "/tracing/events/enable", "0")
    kernel.tracing.kprobe_events.clear()


def _records(kernel: Kernel) -> list[str]:
    """Return the arguments of the recorded hits of strlen."""
    return [line.rpartition(") ")[2] for line in kernel.trace.trace_text().splitlines() if "strlen" in line]


def test_files(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, f"{GROUP}/a/filter", 's ~ "vfs_*" && comm != "bash"\n')
    for name in ("do_fork", "vfs_read"):
        kernel.call("strlen", name)
    assert _records(kernel) == ['s="vfs_read"']
    assert "".join(kernel.tracing.kprobe_events.profile_records()).split()[:2] == ["a", "2"]
    write(tree, f"{GROUP}/filter", "n == 1")
    assert "n == 1\n^\nparse_error: " in read(tree, f"{GROUP}/a/filter")
    assert read(tree, f"{GROUP}/b/filter") == "n == 1\n"
    assert read(tree, f"{GROUP}/filter") == GROUP_FILTER_TEXT


def test_common_fields_are_those_of_the_record(kernel: Kernel, tree: NodeTree) -> None:
    number = int(read(tree, f"{GROUP}/a/id"))
    kernel.trace.clear_trace()
    write(tree, f"{GROUP}/a/filter", f"common_type == {number} && common_flags == 0 && common_pid > 0")
    kernel.call("strlen", "x")
    write(tree, f"{GROUP}/a/filter", "common_pid <= 0 || CPU > 0")
    kernel.call("strlen", "y")
    assert _records(kernel) == ['s="x"']


def test_files_of_removed_events(kernel: Kernel, tree: NodeTree) -> None:
    of_group, of_event = (opened(tree, f"{GROUP}/{name}", os.O_RDWR) for name in ("filter", "b/filter"))
    write(tree, "/kprobe_events", "-:b\n")
    for file in (of_event, of_group):
        with assert_errno(errno.ENODEV):
            file.read(10, 0)
        with assert_errno(errno.ENODEV):
            file.write(b"0", 0)
        write(tree, "/tracing/events/enable", "0")
        kernel.tracing.kprobe_events.clear()
