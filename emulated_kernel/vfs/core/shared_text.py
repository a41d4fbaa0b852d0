"""Rendered texts of open files: open files that hold the same long text share one object."""

from __future__ import annotations

from weakref import WeakValueDictionary

SHARED_SIZE = 4096
"""Minimum size in bytes of a text that is shared. A shorter text costs less than an entry in `_texts`."""


class SharedText:
    """A rendered text of one or more open files."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


EMPTY = SharedText(b"")
_texts: WeakValueDictionary[int, SharedText] = WeakValueDictionary()
"""Hash of a long text that some open file holds -> the text."""


def shared(data: bytes) -> SharedText:
    """Return a SharedText of `data`. Equal long texts share one object while an open file holds it."""
    if len(data) < SHARED_SIZE:
        return SharedText(data)
    found = _texts.get(hash(data))
    if found is None or found.data != data:
        found = _texts[hash(data)] = SharedText(data)
    return found
