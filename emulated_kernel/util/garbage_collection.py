"""Context manager that stops Python's garbage collection while many objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_stopped() -> Iterator[None]:
    """Stop Python's garbage collection during a `with` block that creates many objects and no garbage.

    Otherwise, garbage collection would take up to a quarter of the block's time, and free nothing.
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
