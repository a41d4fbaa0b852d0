"""Path walks: maps the paths of a client's call to paths in the mount, and finds calls that end early.

The host's kernel looks up each component of a path. It sends the request for the call itself only after all
lookups have succeeded. So a call that ends with a lookup, such as a failing open(2), has to be recognized at
this lookup.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Sequence

from emulated_kernel.guests.common.client_call import ClientCall
from emulated_kernel.vfs.core.client import Stat

_LOOKS = frozenset({"newstat", "newlstat", "newfstatat", "statx", "access", "faccessat", "faccessat2"})
_MAKES = frozenset({"mkdir", "mkdirat", "mknod", "mknodat", "symlink", "symlinkat", "link", "linkat"})
_RENAMES = frozenset({"rename", "renameat2"})
_AT_REMOVEDIR = 0x200


def walk_of(text: str, path: str) -> tuple[str, bool] | None:
    """Return (the client's path relative to the mount's root, whether that path ends at `path`).

    `text`: the path as the client passed it. `path`: the path in the mount that the host has looked up.
    Return None if the client's path does not lead through `path`.
    """
    named = _components(text)
    seen = _components(path)
    for end in range(len(named), 0, -1):
        common = min(end, len(seen))
        if common and named[end - common : end] == seen[-common:]:
            slash = "/" if text.endswith("/") else ""
            return "/" + "/".join([*seen, *named[end:]]) + slash, end == len(named)
    return None


def walks_at_end(call: ClientCall, path: str, found: Stat | None) -> Sequence[str] | None:
    """Return a call's paths, relative to the mount's root, if the call ends with the lookup of `path`.

    Return None if the call does not end with this lookup, or if its paths could not be read from the client's
    memory. `found`: the attributes of the file at `path`; None if it does not exist.
    """
    if call.is_hidden:
        return None
    paths = call.paths
    matches = [walk_of(text, path) for _at, text in paths]
    for (number, (_at, text)), match in zip(enumerate(paths), matches, strict=True):
        if match is None:
            continue
        walk, is_last = match
        is_new = number == len(paths) - 1
        if _misses(call, is_last and is_new) if found is None else is_last and _stops(call, is_new, found):
            return [
                walk if other == number else _beside(text, walk, their_text)
                for other, (_at, their_text) in enumerate(paths)
            ]
    return None


def _misses(call: ClientCall, is_last: bool) -> bool:
    """Return True if the call fails because the name that was looked up does not exist.

    A call that creates the name does not fail. `is_last`: the name is the last component of the call's last
    path.
    """
    makes = call.name in _MAKES or call.name in _RENAMES or bool(call.flags & os.O_CREAT)
    return not (is_last and makes)


def _stops(call: ClientCall, is_new: bool, found: Stat) -> bool:
    """Return True if the call ends when the host has found the file that one of the call's paths names.

    The call may end because it only reads attributes, or because it must fail. `found`: attributes of the
    file. `is_new`: the path is the call's last one; a call such as mkdir(2) would create this name.
    """
    is_directory = stat.S_ISDIR(found.mode)
    if call.name in _LOOKS:
        return True
    if call.name in _MAKES:
        return is_new
    if call.name == "rmdir" or (call.name == "unlinkat" and call.args[2] & _AT_REMOVEDIR):
        return not is_directory
    if call.name in ("unlink", "unlinkat"):
        return is_directory
    flags = call.flags
    if flags & os.O_CREAT and flags & os.O_EXCL:
        return True
    return bool(flags & os.O_DIRECTORY) and not is_directory and not stat.S_ISLNK(found.mode)


def _beside(text: str, walk: str, other: str) -> str:
    """Return the other path of a system call with two paths, such as rename(2), relative to the mount's root.

    `text`: the path that has been looked up, as the client passed it. `walk`: the same path, relative to the
    mount's root. `other`: the other path, as the client passed it. The result is only a guess if the two
    paths do not begin at the same directory.
    """
    if text.startswith("/") and other.startswith("/") and text.endswith(walk):
        root = text[: -len(walk)]
        if other.startswith(root + "/"):
            return other[len(root) :]
    elif walk.endswith("/" + text) and not other.startswith("/"):
        return posixpath.normpath(walk[: -len(text)] + other)
    return posixpath.join(posixpath.dirname(walk), posixpath.basename(other))


def _components(path: str) -> list[str]:
    """Return the names in a path, without "." and ".."."""
    return [name for name in posixpath.normpath(path).split("/") if name not in ("", ".", "..")]
