"""Samples of exhaustive tests: a run tries a part of all cases, or with KPROBEFS_WHOLE=1 all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

WHOLE = bool(os.environ.get("KPROBEFS_WHOLE"))
_T = TypeVar("_T")


def share(items: Sequence[_T], part: int, parts: int) -> Sequence[_T]:
    """Return every `parts`-th item, beginning with number `part`; parts 0 to `parts` - 1 cover all items."""
    return items if WHOLE else items[part % parts :: parts]


def fewer(count: int, parts: int) -> int:
    """Return `count` divided by `parts`, rounded up; in a whole run, return `count`."""
    return count if WHOLE else -(-count // parts)
