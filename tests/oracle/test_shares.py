"""The shares of optimized probes in the documentation are those that the recorded flags of a real kernel
give.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.recorded import oracle_directory, recording, versions
from tests.oracle.shares import WAYS, share

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coverage.md"
DIRECTORY = oracle_directory()
KERNELS = ("6.1", "6.1-rethunk")
"""Recordings that are columns of the page's table."""


@pytest.mark.skipif(
    not set(KERNELS) <= set(versions(DIRECTORY)), reason=f"no recorded verdicts in {DIRECTORY}"
)
@pytest.mark.parametrize("way", WAYS)
def test_the_page_has_each_way_of_counting(way: str) -> None:
    shares = [share(recording(DIRECTORY, version), WAYS[way]) for version in KERNELS]
    assert f"{way} | {shares[0]:.1f} | {shares[1]:.1f} |" in PAGE.read_text()
