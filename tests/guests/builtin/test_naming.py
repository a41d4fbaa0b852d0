"""Paths in clients' system calls, and the lookups that the host's kernel makes for a path."""

from __future__ import annotations

import os
import posixpath
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.guests.builtin.mounts.path_walk import walk_of, walks_at_end
from emulated_kernel.guests.common.client_call import ARGUMENTS, ClientCall
from emulated_kernel.vfs.core.client import Stat

FILE, DIRECTORY, LINK = (Stat(1, kind, 1, 0, 0) for kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK))
ROOTS = ("/mnt", "/tmp/a mount", "/sys/kernel")
NAMES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4)


def call(name: str, *paths: str, flags: int = 0) -> ClientCall:
    """Return a ClientCall named `name` with these paths.

    `flags` is the value of all its numeric arguments.
    """
    left = iter(paths)
    kinds = ARGUMENTS[name]
    data = {at: next(left).encode() for at, kind in enumerate(kinds) if kind in "ps"}
    if "h" in kinds:
        data[kinds.index("h")] = flags.to_bytes(8, "little") + bytes(16)
    return ClientCall(name, tuple(flags if kind == "n" else 0x1000 for kind in kinds), data)


@given(root=st.sampled_from(ROOTS), names=NAMES, work=st.integers(0, 4), data=st.data())
def test_every_lookup_of_a_walk(root: str, names: list[str], work: int, data: st.DataObject) -> None:
    """walk_of() returns a client's path from the mount's root on, and whether the path ends at the lookup.

    The client's path may be absolute or relative. For a lookup that is not on this path, walk_of() returns
    None.
    """
    path = "/scratch/" + "/".join(names)
    start = root + "/scratch" + "".join("/" + name for name in names[:work])
    text = data.draw(st.sampled_from([root + path, posixpath.relpath(root + path, start)]))
    if text == ".":
        return
    seen = walk_of(text, path)
    assert seen == (path, True)
    if text.startswith("/"):
        assert walk_of(text, "/scratch") == (path, False)
        assert walk_of(text + "/", path) == (path + "/", True)
    assert walk_of(text, path + "x") is None


@pytest.mark.parametrize(
    "name", ["newstat", "newlstat", "newfstatat", "statx", "access", "faccessat", "faccessat2"]
)
def test_looking_ends_with_the_lookup(name: str) -> None:
    """A call such as stat(2) ends with the lookup of the file, or with the lookup of a missing directory
    above the file.
    """
    looking = call(name, "/mnt/scratch/d/f")
    for found in (FILE, DIRECTORY, LINK, None):
        assert walks_at_end(looking, "/scratch/d/f", found) == ["/scratch/d/f"]
    assert walks_at_end(looking, "/scratch/d", DIRECTORY) is None
    assert walks_at_end(looking, "/scratch/d", None) == ["/scratch/d/f"]
    assert walks_at_end(looking, "/other", None) is None


MAKES = [name for name in ARGUMENTS if name.startswith(("mkdir", "mknod", "symlink"))]


@pytest.mark.parametrize("name", MAKES)
def test_making_ends_where_the_name_is_taken(name: str) -> None:
    paths = ["target", "d/new"] if name.startswith("symlink") else ["d/new"]
    making = call(name, *paths)
    assert walks_at_end(making, "/scratch/d/new", FILE) == ["/scratch/d/new"]
    assert walks_at_end(making, "/scratch/d/new", None) is None
    assert walks_at_end(making, "/scratch/d", DIRECTORY) is None
    assert walks_at_end(making, "/scratch/d", None) == ["/scratch/d/new"]


@pytest.mark.parametrize("name", ["link", "linkat", "rename", "renameat2"])
def test_two_names(name: str) -> None:
    """In link(2) and rename(2), a path without a lookup of its own is resolved from the same directory as the
    other path.
    """
    for root in ("/mnt/scratch/", ""):
        moving = call(name, root + "old", root + "d/new")
        assert walks_at_end(moving, "/scratch/old", None) == ["/scratch/old", "/scratch/d/new"]
        assert walks_at_end(moving, "/scratch/old", FILE) is None
        assert walks_at_end(moving, "/scratch/d/new", None) is None
        taken = ["/scratch/old", "/scratch/d/new"] if name.startswith("link") else None
        assert walks_at_end(moving, "/scratch/d/new", FILE) == taken
        assert walks_at_end(moving, "/scratch/d", None) == ["/scratch/old", "/scratch/d/new"]


@pytest.mark.parametrize("name", ["open", "openat", "openat2"])
def test_opening_goes_on_unless_it_is_refused(name: str) -> None:
    for flags, found, ends in (
        (0, FILE, False),
        (0, None, True),
        (os.O_CREAT, None, False),
        (os.O_CREAT, FILE, False),
        (os.O_CREAT | os.O_EXCL, FILE, True),
        (os.O_DIRECTORY, FILE, True),
        (os.O_DIRECTORY, DIRECTORY, False),
        (os.O_DIRECTORY, LINK, False),
    ):
        expected = ["/scratch/f"] if ends else None
        assert walks_at_end(call(name, "f", flags=flags), "/scratch/f", found) == expected, flags
    assert walks_at_end(call("creat", "f"), "/scratch/f", None) is None


def test_removing_what_is_of_the_other_kind() -> None:
    for removal, refused in (
        (call("rmdir", "f"), FILE),
        (call("unlinkat", "f", flags=0x200), FILE),
        (call("unlink", "f"), DIRECTORY),
        (call("unlinkat", "f"), DIRECTORY),
    ):
        assert walks_at_end(removal, "/scratch/f", refused) == ["/scratch/f"]
        assert walks_at_end(removal, "/scratch/f", DIRECTORY if refused is FILE else FILE) is None
        assert walks_at_end(removal, "/scratch/f", None) == ["/scratch/f"]
