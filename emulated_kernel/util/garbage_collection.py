"""Garbage collection: a context manager that stops Python's while many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_stopped() -> Iterator[None]:
    """Stop Python's garbage collection during a `with` block that makes many objects and no garbage.

    There, the collection would take up to a quarter of the time, and find nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Count all new objects as old ones. Otherwise the next collection would examine all of them.
        gc.freeze()
        gc.unfreeze()
        if was_on:
            gc.enable()
