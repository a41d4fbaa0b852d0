"""The number of seeds with which tests of races run. KPROBEFS_SEEDS sets this number for long runs."""

from __future__ import annotations

import os

from tests.sample import fewer


def seeds(count: int, parts: int = 2) -> range:
    """Return `count` seeds with KPROBEFS_WHOLE=1, otherwise 1 / `parts` of this number.

    If KPROBEFS_SEEDS is set, return this number of seeds.
    """
    return range(1, int(os.environ.get("KPROBEFS_SEEDS", fewer(count, parts))) + 1)
