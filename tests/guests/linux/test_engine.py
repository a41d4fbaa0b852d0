"""Our probes in Debian's kernel: what they count, and that the kernel doesn't notice them."""

from __future__ import annotations

import pytest

from stress.linux import everywhere
from tests.guests.linux.probing import MODES


@pytest.fixture(scope="module")
def unprobed() -> everywhere.Unprobed:
    return everywhere.unprobed()


@pytest.fixture(scope="module")
def hits() -> dict[int, int]:
    """Of each place, whatever the mode."""
    return {}


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_does_not_notice(mode: str, unprobed: everywhere.Unprobed, hits: dict[int, int]) -> None:
    """All answers are the same; and all memory, where nothing but the text was written to."""
    starts = everywhere.functions(60, seed=1)
    armed = everywhere.arm(mode, starts, unprobed)
    assert len(armed.places) > (3000 if mode in ("stepped", "boosted") else 20)
    assert sum(armed.found.hits.values()) > 500
    everywhere.compare(hits, armed)
