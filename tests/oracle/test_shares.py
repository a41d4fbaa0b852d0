"""The page's shares of what a real kernel optimized are those that its recorded flags come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.recorded import oracle_directory, recordings
from tests.oracle.shares import WAYS, share

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
DIRECTORY = oracle_directory()
RECORDINGS = {each.version: each for each in recordings(DIRECTORY)} if DIRECTORY.is_dir() else {}


@pytest.mark.skipif(not RECORDINGS, reason=f"no recorded verdicts in {DIRECTORY}")
@pytest.mark.parametrize("way", WAYS)
def test_the_page_has_each_way_of_counting(way: str) -> None:
    shares = [share(RECORDINGS[version], WAYS[way]) for version in ("6.1", "6.1-rethunk")]
    assert f"{way} | {shares[0]:.1f} | {shares[1]:.1f} |" in PAGE.read_text()
