"""How many seeds the tests of races run with: KPROBEFS_SEEDS has them run for long."""

from __future__ import annotations

import os

from tests.sample import fewer


def seeds(count: int, parts: int = 2) -> range:
    """The first `parts`-th of `count` seeds, all in a whole run, or as many as the environment says."""
    return range(1, int(os.environ.get("KPROBEFS_SEEDS", fewer(count, parts))) + 1)
