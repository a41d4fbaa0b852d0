"""What a run takes of what could be tried everywhere: a share, or with KPROBEFS_WHOLE=1 all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

WHOLE = bool(os.environ.get("KPROBEFS_WHOLE"))
_T = TypeVar("_T")


def share(items: Sequence[_T], part: int, parts: int) -> Sequence[_T]:
    """Every `parts`-th item from the one numbered `part` on; the parts 0 to `parts` - 1 cover all."""
    return items if WHOLE else items[part % parts :: parts]


def fewer(count: int, parts: int) -> int:
    """A `parts`-th of so many attempts; a whole run makes all."""
    return count if WHOLE else -(-count // parts)
