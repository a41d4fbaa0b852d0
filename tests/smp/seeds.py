"""How many seeds the tests of races run with: KPROBEFS_SEEDS has them run for long."""

from __future__ import annotations

import os


def seeds(count: int) -> range:
    """The first `count` seeds, or as many as the environment says."""
    return range(1, int(os.environ.get("KPROBEFS_SEEDS", count)) + 1)
