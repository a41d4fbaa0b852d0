"""events/ftrace, compared with that of a real Linux 6.1: the mode of each file, and each format."""

from __future__ import annotations

import stat
from pathlib import Path

from emulated_kernel.vfs.core.node_tree import NodeTree
from tests.format_file import in_short
from tests.vfs.files import names, read

RECORDED = Path(__file__).with_name("own_entries-6.1.txt")
EVENTS = "/tracing/events/ftrace"


def shown(tree: NodeTree, name: str) -> list[str]:
    """Return the modes of the files in the directory of the event `name`, and its format, as the recording
    has them.
    """
    files = sorted(names(tree, f"{EVENTS}/{name}"))
    modes = (stat.S_IMODE(tree.getattr(f"{EVENTS}/{name}/{file}").mode) for file in files)
    title, *lines = in_short(read(tree, f"{EVENTS}/{name}/format"))
    assert title == f"name: {name}"
    return [" ".join((name, *(f"{file}:{mode:o}" for file, mode in zip(files, modes, strict=True)))), *lines]


def test_each_entry_is_as_recorded(unchanged: NodeTree) -> None:
    recorded = [part.splitlines() for part in RECORDED.read_text().split("\n\n")[1:]]
    assert sorted(names(unchanged, EVENTS)) == [part[0].split()[0] for part in recorded]
    for part in recorded:
        assert shown(unchanged, part[0].split()[0]) == part
