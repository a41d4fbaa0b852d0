"""Number of seeds for tests of races; KPROBEFS_SEEDS sets it for long runs."""

from __future__ import annotations

import os

from tests.sample import fewer


def seeds(count: int, parts: int = 2) -> range:
    """Return 1 / `parts` of `count` seeds; all in a whole run, or the number in KPROBEFS_SEEDS."""
    return range(1, int(os.environ.get("KPROBEFS_SEEDS", fewer(count, parts))) + 1)
