"""kprobefs's probes in Debian's kernel: how many hits are counted, and that the kernel does not notice the
probes.
"""

from __future__ import annotations

import pytest

from stress.linux import everywhere
from tests.guests.linux.probing import MODES
from tests.sample import fewer


@pytest.fixture(scope="module")
def unprobed() -> everywhere.Unprobed:
    return everywhere.unprobed()


@pytest.fixture(scope="module")
def hits() -> dict[int, int]:
    """Return a map that the tests of all modes share: address -> number of hits."""
    return {}


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_does_not_notice(mode: str, unprobed: everywhere.Unprobed, hits: dict[int, int]) -> None:
    """The workload has the same answers with and without probes.

    If only the text is written, memory is the same, too.
    """
    starts = everywhere.functions(fewer(60, 3), seed=1)
    armed = everywhere.arm(mode, starts, unprobed)
    assert len(armed.places) > len(starts) * (50 if mode in ("stepped", "boosted") else 1 / 3)
    assert sum(armed.found.hits.values()) > 500
    everywhere.compare(hits, armed)
