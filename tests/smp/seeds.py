"""Number of seeds for tests of races; KPROBEFS_SEEDS sets it for long runs."""

from __future__ import annotations

import os

from tests.sample import fewer


def seeds(count: int, parts: int = 2) -> range:
    """Return `count` seeds in a whole run, otherwise 1 / `parts` of this number.

    KPROBEFS_SEEDS sets another number.
    """
    return range(1, int(os.environ.get("KPROBEFS_SEEDS", fewer(count, parts))) + 1)
